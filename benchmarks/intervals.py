"""Whether a plan's interval holds what the engine then does: two models, five traces, one CPU thread.

    python -m benchmarks.intervals [--models narrow,wide] [--traces chat,...] [--seconds 60] [--wall]

1.  Each model is calibrated on random prompts, alone and in batches of 1 to 64, such as ``pagedkv calibrate --url``
    sends; none of the traces is used.
2.  The interval is that of ``pagedkv plan``: the search, again with the error of the fit on either side, and again with
    resampled arrivals.
3.  The truth: the engine serves the trace in this process, each request when it is due, and whether the load holds is
    said by the same rule as of a simulation. Loads are halved down to 2 %.

A trace has as many requests as the engine serves in the given seconds. Shared traces (``--folder``) are cut down:
lengths are divided, and long requests left out. The clock is that of ``benchmarks.predictions``.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import ceil, inf, sqrt
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.machine import describe
from benchmarks.markdown import table
from benchmarks.predictions import (
    BLOCK_SIZE,
    MAX_BATCHED_TOKENS,
    MAX_SEQUENCES,
    NUM_BLOCKS,
    Served,
    as_told,
    serve,
)
from pagedkv.cli.engine_replay import within_vocabulary
from pagedkv.contract.arrays import Float64Array, Int32Array
from pagedkv.engine import StepRecord
from pagedkv.planner.traces import ConversationWorkload, Request, TokenizedRequest, tokenized
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.workload import LogNormal
from pagedkv.probe import compat
from pagedkv.simulation import ServingConfig, compile_loops
from pagedkv.simulation.calibration import Calibration, calibrate, read_steps
from pagedkv.simulation.planning import (
    Bounds,
    LoadInterval,
    LoadSearch,
    PlanPoint,
    PointFigures,
    interval_of,
    run_point,
)
from pagedkv.simulation.planning.figures import HOLDS, Steadiness, steadiness_of
from pagedkv.simulation.planning.interval import FAST, SLOW
from pagedkv.simulation.planning.searching import limit_of

VOCABULARY: Final = 4096
MODELS: Final = {"narrow": (128, 2), "wide": (320, 4)}
"""Width and layers of models with random weights."""
BATCHES: Final = (8, 1, 64, 2, 16, 4, 32)
NUM_ROUNDS: Final = 2
NUM_OUTPUT: Final = 24
LONGEST: Final = 2000
BOUNDS: Final = Bounds(ttft_s=2.0)
NUM_RESAMPLES: Final = 6
MOST_REQUESTS: Final = 4000
PRECISION: Final = 1.02
STEP: Final = 2 ** (1 / 8)


def llama(width: int, num_layers: int) -> compat.Model:
    """Make a model with random weights, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64}
    return compat.make_llama({"vocab_size": VOCABULARY, "max_position_embeddings": 32_768, **sizes, **heads})


@dataclass(frozen=True, slots=True)
class Shape:
    """A generated trace: its seed, and medians of its turns and answers in tokens."""

    seed: int
    turn: int
    answer: int
    system: int

    def requests(self) -> Iterator[TokenizedRequest]:
        """Generate requests without end, or nearly so."""
        workload = ConversationWorkload(
            seed=self.seed,
            num_sessions=3000,
            system_prompt_lengths=(self.system, self.system // 2),
            user_turn=LogNormal(median=self.turn, sigma=0.8),
            answer=LogNormal(median=self.answer, sigma=0.7),
            mean_turns=3.7,
            sessions_per_s=2.0,
            mean_think_s=2.0,
            output_tokens_per_s=200.0,
            max_context=LONGEST,
        )
        return workload.requests()


GENERATED: Final = {
    "chat": Shape(11, 24, 40, 192),
    "documents": Shape(12, 300, 16, 96),
    "essays": Shape(13, 16, 120, 48),
}
CUT: Final = {"mooncake_conversation": 32, "agent_text_blk16": 4}
"""The shared traces, and what their lengths are divided by."""


def shared(folder: Path, name: str) -> Iterator[TokenizedRequest]:
    """Read a shared trace, cut down."""
    divisor = CUT[name]

    def cut() -> Iterator[Request]:
        with TraceReader(folder / f"{name}.jsonl.gz") as reader:
            for each in reader:
                length, size = max(1, each.input_length // divisor), each.block_size // divisor
                if length < LONGEST and each.block_ids is not None:
                    ids = each.block_ids[: length // size]
                    output = min(LONGEST - length, max(1, each.output_length // divisor))
                    yield replace(each, input_length=length, output_length=output, block_ids=ids, block_size=size)

    return tokenized(cut())


def calibrated(model: compat.Model, clock: Callable[[], float]) -> Calibration:
    """Fit a cost model to batches of random prompts, by way of the file that ``pagedkv calibrate`` reads."""
    chance = random.Random(1)
    records = list[StepRecord]()
    for number in BATCHES * NUM_ROUNDS:
        lengths = [round(8 * (LONGEST / 2 / 8) ** chance.random()) for _ in range(number)]
        requests = [
            TokenizedRequest(
                0.0,
                np.array(chance.choices(range(VOCABULARY), k=length), np.int32),
                np.zeros(NUM_OUTPUT, np.int32),
            )
            for length in lengths
        ]
        records += serve(model, requests, 1.0, clock).records
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder) / "steps.jsonl"
        steps.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))
        return calibrate(read_steps(str(steps), BLOCK_SIZE))


@dataclass(frozen=True, slots=True)
class _Times:
    """What the engine did, as the rule of a simulation takes it."""

    served: Served
    requests: Sequence[TokenizedRequest]

    @property
    def arrival_s(self) -> Float64Array:
        return self.served.arrival_s

    @property
    def first_token_s(self) -> Float64Array:
        return self.served.first_token_s

    @property
    def end_s(self) -> Float64Array:
        return self.served.end_s

    def counts(self, name: str) -> Int32Array:
        of = {"num_prompt_tokens": "input_length", "num_output_tokens": "output_length", "num_sequences": "num_samples"}
        return np.array([getattr(each, of[name]) for each in self.requests], np.int32)


def truth(model: compat.Model, requests: Sequence[TokenizedRequest], load: float, clock: Callable[[], float]) -> float:
    """Return the answers a second that the engine sustains, within 2 %, beginning at a load."""

    def measured(load: float) -> Steadiness:
        return steadiness_of(_Times(serve(model, requests, load, clock), requests), BOUNDS)

    held, ended, good_per_s = 0.0, inf, 0.0
    while ended > PRECISION * held:
        steady = measured(load)
        if steady.verdict == HOLDS:
            held, good_per_s = load, steady.good_per_s
        else:
            ended = load
        load = ended / STEP if not held else held * STEP if ended == inf else sqrt(held * ended)
    return good_per_s * sqrt(ended / held)


def planned(costs: Calibration, requests: Sequence[TokenizedRequest]) -> tuple[LoadInterval, float]:
    """Return the interval of a plan, and the highest load that holds by it."""
    config = ServingConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=MAX_SEQUENCES,
        max_batched_tokens=MAX_BATCHED_TOKENS,
    )
    point = PlanPoint(config, costs.model, BOUNDS)
    told = [as_told(each) for each in requests]

    def search(point: PlanPoint, search: LoadSearch) -> list[tuple[float, PointFigures]]:
        runs = []
        while (load := search.next_load()) is not None:
            figures = run_point(replace(point, config=replace(point.config, load=load)), told)
            search.record(figures.steadiness.verdict)
            runs.append((load, figures))
        return runs

    own = search(point, LoadSearch())
    held = limit_of((load, figures.steadiness.verdict) for load, figures in own).held
    assert held is not None, "no load holds"
    error = costs.overall.median
    points = {str(seed): replace(point, resample=seed) for seed in range(NUM_RESAMPLES)}
    points[SLOW] = replace(point, costs=costs.model.scaled(1 + error))
    points[FAST] = replace(point, costs=costs.model.scaled(1 - error))
    return interval_of(own, {name: search(each, LoadSearch(held, 2)) for name, each in points.items()}, error), held


def cut_to(seconds: float, costs: Calibration, all_requests: Iterator[TokenizedRequest]) -> list[TokenizedRequest]:
    """Take as many requests as the engine serves in so many seconds, by the cost model."""
    requests = [within_vocabulary(each, VOCABULARY) for each in islice(all_requests, MOST_REQUESTS)]
    config = ServingConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_sequences=MAX_SEQUENCES, load=1000.0)
    sample = [as_told(each) for each in requests[:200]]
    figures = run_point(PlanPoint(replace(config, max_batched_tokens=MAX_BATCHED_TOKENS), costs.model), sample)
    return requests[: ceil(seconds * figures.throughput_per_s)]


def main() -> None:
    """Measure, and print a row for each case as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--traces", default=",".join([*GENERATED, *CUT]))
    parser.add_argument("--folder", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--wall", action="store_true", help="count the wall clock's seconds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    compat.be_silent()
    compile_loops()
    clock = time.perf_counter if given.wall else time.process_time
    rows = []
    for name in given.models.split(","):
        model = llama(*MODELS[name])
        calibrated(model, clock)  # compiles
        costs = calibrated(model, clock)
        for trace in given.traces.split(","):
            everything = GENERATED[trace].requests() if trace in GENERATED else shared(given.folder, trace)
            requests = cut_to(given.seconds, costs, everything)
            interval, load = planned(costs, requests)
            measured = truth(model, requests, load, clock)
            low, high = interval.low_per_s, interval.high_per_s
            rows.append(
                (
                    *(name, trace, f"{len(requests):,}", f"{costs.overall.median:.1%}"),
                    *(f"{low:.3g} to {high:.3g}", f"{interval.likeliest_per_s:.3g}", f"{measured:.3g}"),
                    *("yes" if low <= measured <= high else "no", f"{2 * (high - low) / (high + low):.0%}"),
                )
            )
            print(rows[-1], interval.reasons[0], flush=True)
    head = ("model", "trace", "requests", "error", "interval", "likeliest", "measured", "in it", "width by middle")
    print(f"\n{table(head, *rows)}\n\n{describe()}")


if __name__ == "__main__":
    main()
