"""Whether a plan's interval holds what the engine then does: two models, five traces, one CPU thread each.

    python -m benchmarks.intervals [--models narrow,wide] [--traces chat,...] [--seconds 46] [--results FILE] [--wall]
    python -m benchmarks.intervals --plan FILE ...

1.  The model is calibrated on random prompts with answers of random lengths, 1 to 64 of them in the engine at once,
    short prompts and long ones in turn; none of the traces is used.
2.  The truth: the engine serves the trace in this process, each request when it is due, and whether the load holds is
    said by the same rule as of a simulation. Loads are halved down to 2 %.
3.  ``--plan`` finds the interval of each measured case, as ``pagedkv plan`` does, from nothing but the trace and the
    calibration: the search, again with the error of the fit on either side, and again with resampled arrivals. It
    writes the table of docs/planning.md.

A trace has as many requests as the engine serves in the given seconds. Shared traces (``--folder``) are cut down:
lengths are divided, and long requests left out. The clock is that of ``benchmarks.predictions``: processor's seconds of
this process, which has one thread, so that other work on the machine takes no part of them, but for what it does to
caches and to the clock of the cores. So each case is calibrated anew, by random prompts right before the truth and
between the loads that are tried for it: what is judged is the plan, not whether the machine is as fast as minutes ago.

Each measured case is a line of ``--results``, and is not measured again.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, inf, sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.machine import describe
from benchmarks.markdown import table, with_table
from benchmarks.predictions import (
    BLOCK_SIZE,
    MAX_BATCHED_TOKENS,
    MAX_SEQUENCES,
    NUM_BLOCKS,
    Served,
    as_told,
    serve,
)
from benchmarks.repository import ROOT
from pagedkv.cli.engine_replay import within_vocabulary
from pagedkv.contract.arrays import Float64Array, Int32Array
from pagedkv.planner.traces import ConversationWorkload, Request, TokenizedRequest, tokenized
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.workload import LogNormal
from pagedkv.probe import compat
from pagedkv.simulation import ServingConfig, compile_loops
from pagedkv.simulation.calibration import Calibration, MeasuredSteps, calibrate
from pagedkv.simulation.cost import CostModel
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
from pagedkv.simulation.planning.interval import points_again, search_again
from pagedkv.simulation.planning.searching import limit_of

VOCABULARY: Final = 4096
MODELS: Final = {"narrow": (128, 2), "wide": (192, 3)}
"""Width and layers of models with random weights."""
NUM_FIRST: Final = 3
AT_ONCE: Final = (8, 1, 64, 2, 16, 4, 32)
NUM_ROUNDS: Final = 2
PROMPTS: Final = ((8, 128), (256, 1000))
"""Shortest and longest calibrating prompts, in tokens: with little context, and with much."""
ANSWERS: Final = (4, 100)
MOST_AT_ONCE: Final = 16_384
"""Tokens of prompts at once: what the blocks hold."""
LONGEST: Final = 2000
BOUNDS: Final = Bounds(ttft_s=2.0)
NUM_RESAMPLES: Final = 10
NUM_SAMPLED: Final = 400
MOST_REQUESTS: Final = 6000
PRECISION: Final = 1.02
STEP: Final = 1.06
PAGE: Final = ROOT / "docs" / "planning.md"
TABLE: Final = "intervals"


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
    "documents": Shape(12, 150, 8, 48),
    "essays": Shape(13, 16, 120, 48),
}
CUT: Final = {"mooncake_conversation": 64, "agent_text_blk16": 8}
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


def random_requests(chance: random.Random, number: int, shortest: int, longest: int) -> list[TokenizedRequest]:
    """Draw prompts between two lengths, and lengths of answers, by the logarithm of their lengths."""

    def length(least: int, most: int) -> int:
        return round(float(least * (most / least) ** chance.random()))

    return [
        TokenizedRequest(
            0.0,
            np.array(chance.choices(range(VOCABULARY), k=length(shortest, longest)), np.int32),
            np.zeros(length(*ANSWERS), np.int32),
        )
        for _ in range(number)
    ]


def random_steps(model: compat.Model, clock: Callable[[], float], chance: random.Random) -> list[MeasuredSteps]:
    """Measure steps of random prompts, as many at once as each of a few numbers, with little context and with much.

    The first steps of each engine, which touch its memory for the first time, are left out.
    """
    measured = []
    for at_once in AT_ONCE:
        for shortest, most in PROMPTS:
            longest = min(most, MOST_AT_ONCE // at_once)
            requests = random_requests(chance, max(4, 2 * at_once), min(shortest, longest // 2), longest)
            steps = serve(model, requests, 1.0, clock, at_once).steps
            measured.append(steps.chosen(np.arange(NUM_FIRST, len(steps))))
    return measured


def calibrated(steps: Sequence[MeasuredSteps]) -> Calibration:
    """Fit a cost model to steps."""
    names = ("seconds", "num_new_tokens", "num_attended_pairs", "num_context_tokens", "num_sequences")
    seconds, *counts = (np.concatenate([getattr(each, name) for each in steps]) for name in names)
    new, pairs, context, sequences = counts
    return calibrate(MeasuredSteps(seconds, new, pairs, context, sequences))


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


def truth(serving: Callable[[float], Steadiness], load: float) -> float:
    """Return the answers a second that the engine sustains, within 2 %, beginning at a load.

    Args:
        serving: serves the trace at a load.
        load: times the trace's own.
    """
    held, ended, good_per_s, step = 0.0, inf, 0.0, STEP
    while ended > PRECISION * held:
        steady = serving(load)
        print(f"load {load:.3g} {steady.verdict} {steady.binds}", flush=True)
        if steady.verdict == HOLDS:
            held, good_per_s = load, steady.good_per_s
        else:
            ended = load
        load = ended / step if not held else held * step if ended == inf else sqrt(held * ended)
        step *= STEP  # further each time, until one holds and one does not
    return good_per_s * sqrt(ended / held)


def point_of(costs: CostModel) -> PlanPoint:
    """Return the setting that is served."""
    config = ServingConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=MAX_SEQUENCES,
        max_batched_tokens=MAX_BATCHED_TOKENS,
    )
    return PlanPoint(config, costs, BOUNDS)


def searched(point: PlanPoint, requests: Sequence[Request], search: LoadSearch) -> list[tuple[float, PointFigures]]:
    """Run a search."""
    runs = []
    while (load := search.next_load()) is not None:
        figures = run_point(replace(point, config=replace(point.config, load=load)), requests)
        search.record(figures.steadiness.verdict)
        runs.append((load, figures))
    return runs


def held_by(runs: Sequence[tuple[float, PointFigures]]) -> float:
    """Return the load that held."""
    held = limit_of((load, figures.steadiness.verdict) for load, figures in runs).held
    assert held is not None, "no load holds"
    return held


def planned(costs: CostModel, error: float, requests: Sequence[Request]) -> LoadInterval:
    """Return the interval of a plan."""
    point = point_of(costs)
    own = searched(point, requests, LoadSearch())
    points = points_again(point, error, NUM_RESAMPLES)
    again = {name: searched(each, requests, search_again(name, held_by(own))) for name, each in points.items()}
    return interval_of(own, again, error)


def requests_of(trace: str, folder: Path) -> list[TokenizedRequest]:
    """Return the first requests of a trace."""
    everything = GENERATED[trace].requests() if trace in GENERATED else shared(folder, trace)
    return [within_vocabulary(each, VOCABULARY) for each in islice(everything, MOST_REQUESTS)]


def cut_to(seconds: float, costs: CostModel, requests: Sequence[TokenizedRequest]) -> Sequence[TokenizedRequest]:
    """Take as many requests as the engine serves in so many seconds, by the cost model."""
    point = point_of(costs)
    sample = [as_told(each) for each in requests[:NUM_SAMPLED]]
    figures = run_point(replace(point, config=replace(point.config, load=1000.0)), sample)
    return requests[: ceil(seconds * figures.throughput_per_s)]


def measured(
    name: str, trace: str, seconds: float, folder: Path, clock: Callable[[], float]
) -> dict[str, str | int | float | dict[str, Any]]:
    """Calibrate a model, and measure the traffic of a trace that it holds."""
    model = llama(*MODELS[name])
    serve(model, random_requests(random.Random(2), 16, *PROMPTS[0]), 1.0, clock)  # compiles
    chance = random.Random(1)
    steps = [each for _ in range(NUM_ROUNDS) for each in random_steps(model, clock, chance)]
    costs = calibrated(steps)
    print(f"{name}: {costs.overall.num_steps} steps, {costs.of_sums:.1%}, {costs.model.as_dict()}", flush=True)
    requests = cut_to(seconds, costs.model, requests_of(trace, folder))
    load = held_by(searched(point_of(costs.model), [as_told(each) for each in requests], LoadSearch()))
    print(f"{name}, {trace}: {len(requests)} requests, the plan holds {load}", flush=True)

    def serving(load: float) -> Steadiness:
        steady = steadiness_of(_Times(serve(model, requests, load, clock), requests), BOUNDS)
        steps.extend(random_steps(model, clock, chance))
        return steady

    measured_per_s = truth(serving, load)
    costs = calibrated(steps)
    return {
        "model": name,
        "trace": trace,
        "num_requests": len(requests),
        "median": costs.overall.median,
        "of_sums": costs.of_sums,
        "costs": costs.model.as_dict(),
        "measured_per_s": measured_per_s,
    }


def cells_of(case: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of a case."""
    low, high, measured = case["low_per_s"], case["high_per_s"], case["measured_per_s"]
    return (
        *(case["model"], case["trace"], f"{case['num_requests']:,}", f"{case['median']:.1%}", f"{case['error']:.1%}"),
        *(f"-{case['slower']:.0%}, +{case['faster']:.0%}", f"{case['arrivals']:.0%}"),
        *(f"{low:.3g} to {high:.3g}", f"{case['likeliest_per_s']:.3g}", f"{measured:.3g}"),
        *("yes" if low <= measured <= high else "no", f"{2 * (high - low) / (high + low):.0%}"),
    )


HEAD: Final = (
    *("model", "trace", "requests", "error of a step", "of sums", "seconds", "arrivals"),
    *("interval", "likeliest", "measured", "in it", "width by middle"),
)


def measured_on(machine: Mapping[str, object]) -> str:
    """Say where it was measured."""
    return f"Measured on {machine['processor']}, {machine['cores']} cores; commit {machine['commit']}."


def cases_in(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the cases of files of results, in the order of models and traces."""
    cases = [json.loads(line) for path in paths if path.exists() for line in path.read_text("utf-8").splitlines()]
    order = [*GENERATED, *CUT]
    return sorted(cases, key=lambda case: (list(MODELS).index(case["model"]), order.index(case["trace"])))


def write(paths: Sequence[Path], folder: Path) -> None:
    """Find the interval of each case, and write the page."""
    compile_loops()
    cases = cases_in(paths)
    rows = []
    for case in cases:
        requests = [as_told(each) for each in requests_of(case["trace"], folder)[: case["num_requests"]]]
        interval = planned(CostModel(**case["costs"]), case["of_sums"], requests)
        rows.append(cells_of({**case, **interval.as_dict()}))
        print(dict(zip(HEAD, rows[-1], strict=True)), flush=True)
    text = f"{table(HEAD, *rows)}\n\n{measured_on(cases[-1]['machine'])}"
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), TABLE, text), "utf-8")


def main() -> None:
    """Measure cases, or plan those that were measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--traces", default=",".join([*GENERATED, *CUT]))
    parser.add_argument("--folder", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--seconds", type=float, default=46.0)
    parser.add_argument("--results", type=Path, default=Path("out/intervals.jsonl"))
    parser.add_argument("--most", type=int, default=len(MODELS) * 5, help="cases to run at most")
    parser.add_argument("--wall", action="store_true", help="count the wall clock's seconds")
    parser.add_argument("--plan", type=Path, nargs="+", metavar="FILE", help="plan measured cases, and write the page")
    given = parser.parse_args()
    if given.plan:
        write(given.plan, given.folder)
        return
    torch.set_num_threads(1)
    compat.be_silent()
    compile_loops()
    clock = time.perf_counter if given.wall else time.process_time
    known = {(case["model"], case["trace"]) for case in cases_in([given.results])}
    wanted = [(name, trace) for trace in given.traces.split(",") for name in given.models.split(",")]
    given.results.parent.mkdir(parents=True, exist_ok=True)
    for name, trace in [each for each in wanted if each not in known][: given.most]:
        case = {**measured(name, trace, given.seconds, given.folder, clock), "machine": describe()}
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(case) + "\n")
        print(f"{name}, {trace}: {case['measured_per_s']:.3g} answers a second are measured", flush=True)


if __name__ == "__main__":
    main()
