"""Latencies through HTTP by the wall clock, beside those that a plan predicts, at 0.8, 1.0 and 1.2 of what it holds.

    python -m benchmarks.server.predicted [--sessions 400] [--calibrate 60]

1.  ``pagedkv serve`` with the demonstration's model is measured as ``pagedkv calibrate --url`` does.
2.  The plan's search finds the load that other conversations hold.
3.  These conversations are sent at each load, in open loop, from this process; beside them stands what ``run_point``
    predicts by the fitted seconds, and by seconds that are longer and shorter by the error of the fit.

What the network and the server add to a first token is no part of a plan, and neither is this client, which has the
same cores. The table of docs/planning.md is written.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from benchmarks.intervals import PAGE, measured_on, searched
from benchmarks.machine import describe
from benchmarks.markdown import table, with_table
from benchmarks.predictions import (
    BLOCK_SIZE,
    MAX_BATCHED_TOKENS,
    MAX_SEQUENCES,
    NUM_BLOCKS,
    as_told,
    conversations,
)
from benchmarks.server.serving import PORT, serving
from benchmarks.server.streams import StreamedResponse, stream
from pagedkv.engine.demo.trained import load_trained
from pagedkv.planner.traces import TokenizedRequest
from pagedkv.probe import compat
from pagedkv.simulation import ServingConfig, compile_loops
from pagedkv.simulation.calibration import calibrate
from pagedkv.simulation.calibration.running_server import measure_server
from pagedkv.simulation.planning import Bounds, LoadSearch, PlanPoint, PointFigures, run_point
from pagedkv.simulation.planning.searching import limit_of

SHARES: Final = (0.8, 1.0, 1.2)
BOUNDS: Final = Bounds(ttft_s=2.0)
PERCENTILES: Final = (50, 90)
NAME: Final = "http"


def body_of(request: TokenizedRequest) -> bytes:
    """Write a request."""
    wish = {
        "model": "demo",
        "prompt": request.prompt_token_ids.tolist(),
        "max_tokens": len(request.output_token_ids),
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    body = json.dumps(wish).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def send_all(requests: Sequence[TokenizedRequest], load: float) -> list[StreamedResponse]:
    """Send each request when it is due."""
    bodies = [body_of(each) for each in requests]
    begun_s = time.perf_counter() - requests[0].arrival_s / load
    tasks = []
    for request, body in zip(requests, bodies, strict=True):
        await asyncio.sleep(max(0.0, begun_s + request.arrival_s / load - time.perf_counter()))
        tasks.append(asyncio.ensure_future(stream(PORT, body)))
    return list(await asyncio.gather(*tasks))


def times_of(requests: Sequence[TokenizedRequest], heard: Sequence[StreamedResponse]) -> list[float]:
    """Return percentiles of the milliseconds to the first token, and then of those for each further one."""
    assert all(each.is_answered for each in heard), "a request was refused"
    first_s = [each.first_s for each in heard]
    further_s = [
        (each.times_s[-1] - each.times_s[0]) / (len(request.output_token_ids) - 1)
        for request, each in zip(requests, heard, strict=True)
        if len(request.output_token_ids) > 1
    ]
    return [1000 * float(each) for times in (first_s, further_s) for each in np.percentile(times, PERCENTILES)]


def predicted_of(figures: PointFigures) -> list[float]:
    """Return the same of a simulation."""
    return [1000 * (times[f"p{each}"] or 0.0) for times in (figures.ttft_s, figures.tpot_s) for each in PERCENTILES]


def measure(num_sessions: int, seconds: float) -> str:
    """Measure, and set the table."""
    options = ("--num-blocks", "--block-size", "--max-sequences", "--max-batched-tokens")
    values = (NUM_BLOCKS, BLOCK_SIZE, MAX_SEQUENCES, MAX_BATCHED_TOKENS)
    requests = conversations(1, num_sessions, compat.vocabulary_size(load_trained()))
    told = [replace(as_told(each), output_token_ids=None) for each in requests]  # the server answers otherwise
    rows = []
    with serving(*(f"{name}={value}" for name, value in zip(options, values, strict=True))):
        costs = calibrate(measure_server(f"http://127.0.0.1:{PORT}", seconds))
        config = ServingConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_sequences=MAX_SEQUENCES,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
        point = PlanPoint(config, costs.model, BOUNDS)
        runs = searched(point, told, LoadSearch())
        held = limit_of((load, figures.steadiness.verdict) for load, figures in runs).held
        assert held is not None, "no load holds"
        print(f"error {costs.overall.median:.1%}, of sums {costs.of_sums:.1%}; load {held} holds", flush=True)
        for share in SHARES:
            load = share * held
            predictions = [
                predicted_of(
                    run_point(replace(point, costs=costs.model.scaled(factor), config=replace(config, load=load)), told)
                )
                for factor in (1.0, 1 - costs.of_sums, 1 + costs.of_sums)
            ]
            heard = asyncio.run(send_all(requests, load))
            cells = [
                (f"{likeliest:.3g} ({low:.3g} to {high:.3g})", f"{took:.3g}")
                for likeliest, low, high, took in zip(*predictions, times_of(requests, heard), strict=True)
            ]
            offered = len(requests) / (requests[-1].arrival_s - requests[0].arrival_s) * load
            rows.append((f"{share:g}", f"{offered:.3g}", *(cell for pair in cells for cell in pair)))
            print(rows[-1], flush=True)
    names = [f"{name} p{each}" for name in ("TTFT", "TPOT") for each in PERCENTILES]
    head = ("load", "requests/s", *(cell for name in names for cell in (f"{name}, ms", "measured")))
    notes = (
        f"{len(requests):,} requests; calibrated on {costs.overall.num_steps:,} steps by `calibrate --url`: an error "
        f"of {costs.overall.median:.1%} in the median, of {costs.of_sums:.1%} on sums. {measured_on(describe())}"
    )
    return f"{table(head, *rows)}\n\n{notes}"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--calibrate", type=float, default=60.0, metavar="SECONDS")
    given = parser.parse_args()
    compat.be_silent()
    compile_loops()
    text = measure(given.sessions, given.calibrate)
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), NAME, text), "utf-8")


if __name__ == "__main__":
    main()
