"""What a plan predicts, beside what an engine does: answers a second and hit ratio, at five loads, on one CPU thread.

    python -m benchmarks.predictions [--loads 0.25,0.5,1,2,4] [--sessions 120] [--wall]

1.  Other conversations than those below are served at the highest load, the steps' ``StepRecord`` written down, and a
    cost model fitted to them, as ``pagedkv calibrate`` does.
2.  ``run_point``, which is what ``pagedkv plan`` runs, predicts each load by that cost model.
3.  The engine serves the same requests at the same load, each submitted when it is due by the clock.
4.  The engine serves them once more, each submitted before the same step as in the simulation, as ``pagedkv replay
    --engine`` does.

The clock counts the processor's seconds that went into this process, and skips those in which the engine has nothing to
do: on a machine that others use, too, a step's seconds by the wall clock are mostly theirs. ``--wall`` is for a machine
of one's own.

Of 3 come the measured answers a second; its hits depend on when exactly steps end, so they may be off a little. Of 4
come the hits that must agree exactly; the run ends with an error if they do not. The model is the demonstration's, and
answers as the conversations do.
"""

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.machine import describe
from benchmarks.markdown import table
from pagedkv.cli.engine_replay import Script, replay_with_engine, submit_scripted, within_vocabulary
from pagedkv.cli.serving import ServingOptions
from pagedkv.contract.arrays import Float64Array
from pagedkv.engine import EngineConfig, EngineRequest, StepRecord
from pagedkv.engine.core import EngineCore
from pagedkv.engine.demo.trained import load_trained
from pagedkv.engine.llm import find_groups
from pagedkv.planner.traces import ConversationWorkload, Request, TokenizedRequest
from pagedkv.planner.traces.workload import LogNormal
from pagedkv.planner.traces.writer import TraceWriter
from pagedkv.probe import compat
from pagedkv.simulation import ServingConfig, compile_loops
from pagedkv.simulation.calibration import Calibration, MeasuredSteps, calibrate, read_steps
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import work_of
from pagedkv.simulation.planning import PlanPoint, PointFigures, run_point
from pagedkv.space.observer import SpaceObserver
from pagedkv.space.steps import InFlightStep

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 1200
MAX_SEQUENCES: Final = 64
MAX_BATCHED_TOKENS: Final = 512
LOADS: Final = "0.25,0.5,1,2,4"


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine did by the clock.

    Args:
        answers_per_s: from the first arrival to the last answer.
        hit_ratio: of prompt tokens.
        busy_s: seconds of all steps.
        records: the steps.
        steps: the same as a cost model is fitted to: seconds from the end of the step before, so that what the engine
            does between steps, such as taking requests, counts.
        arrival_s, first_token_s, end_s: float64 ``[requests]``, when each was due, began and ended.
    """

    answers_per_s: float
    hit_ratio: float
    busy_s: float
    records: Sequence[StepRecord]
    steps: MeasuredSteps
    arrival_s: Float64Array
    first_token_s: Float64Array
    end_s: Float64Array


@dataclass(frozen=True, slots=True)
class Row:
    """One load: what was predicted and what was measured."""

    load: float
    offered_per_s: float
    predicted: PointFigures
    measured: Served
    exact_hit_ratio: float

    @property
    def throughput_error(self) -> float:
        """Predicted by measured answers a second, less one."""
        return self.predicted.throughput_per_s / self.measured.answers_per_s - 1

    @property
    def busy_error(self) -> float:
        """The same of the seconds of all steps."""
        return self.predicted.busy_s / self.measured.busy_s - 1


def conversations(seed: int, num_sessions: int, vocabulary: int) -> list[TokenizedRequest]:
    """Generate short conversations, such as the small model can serve."""
    workload = ConversationWorkload(
        seed=seed,
        num_sessions=num_sessions,
        system_prompt_lengths=(192, 96, 48),
        user_turn=LogNormal(median=24, sigma=0.8),
        answer=LogNormal(median=40, sigma=0.7),
        mean_turns=3.7,
        sessions_per_s=5.0,
        mean_think_s=2.0,
        output_tokens_per_s=200.0,
        max_context=960,
    )
    return [within_vocabulary(each, vocabulary) for each in workload.requests()]


def as_told(request: TokenizedRequest) -> Request:
    """Return a request as a trace would have it."""
    return Request(
        arrival_s=request.arrival_s,
        input_length=request.input_length,
        output_length=len(request.output_token_ids),
        session=request.session,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
    )


class CountedWork(SpaceObserver):
    """Counts the work of each planned step: new tokens, pairs, context and sequences."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []

    def planned(self, step: InFlightStep) -> None:
        """Count a step."""
        work = work_of(step.plan, {})
        self.rows.append((work.num_new_tokens, work.num_attended_pairs, work.num_context_tokens, work.num_sequences))


def serve(
    model: compat.Model,
    requests: Sequence[TokenizedRequest],
    load: float,
    clock: Callable[[], float],
    at_once: int | None = None,
) -> Served:
    """Serve requests with the engine, each when it is due; time in which the engine has nothing to do is skipped.

    With ``at_once`` a request that is due waits outside until fewer than so many are in the engine.
    """
    script = Script(compat.vocabulary_size(model))
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_sequences=MAX_SEQUENCES,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        max_tokens=BLOCK_SIZE * NUM_BLOCKS,
        watermark=0.01,
        self_test=False,
    )
    core = EngineCore(model, find_groups(model, config), config, sampler=script, clock=clock)
    coming, served, records, busy_s = deque(requests), list[EngineRequest](), list[StepRecord](), 0.0
    counted, step_s, num_ended = CountedWork(), list[float](), 0
    core.space.observe(counted)
    starts_s = []
    first_s = requests[0].arrival_s / load
    started_s = clock() - first_s
    ended_s = clock()
    while coming or core.has_work:
        now_s = clock() - started_s
        if not core.has_work and coming[0].arrival_s / load > now_s:
            started_s -= coming[0].arrival_s / load - now_s
            ended_s = clock()
            continue
        while coming and coming[0].arrival_s / load <= now_s and (at_once is None or len(served) - num_ended < at_once):
            served.append(submit_scripted(core, script, coming.popleft(), len(served)))
            starts_s.append(started_s)
        begun_s = clock()
        records.append(core.step())
        before_s, ended_s = ended_s, clock()
        busy_s += ended_s - begun_s
        step_s.append(ended_s - before_s)
        num_ended += records[-1].num_finished + records[-1].num_rejected
    span_s = clock() - started_s - first_s
    num_hits = sum(each.num_cached_tokens or 0 for each in served)
    num_prompt_tokens = sum(each.input_length for each in requests)
    return Served(
        len(served) / span_s,
        num_hits / num_prompt_tokens,
        busy_s,
        records,
        _measured_steps(step_s, counted.rows),
        np.array([each.arrival_s / load for each in requests]),
        np.array([each.first_token for each in served], np.float64) - starts_s,
        np.array([each.finished for each in served], np.float64) - starts_s,
    )


def _measured_steps(seconds: Sequence[float], rows: Sequence[tuple[int, int, int, int]]) -> MeasuredSteps:
    assert len(seconds) == len(rows), "each step has one plan"
    counts = np.array(rows, np.int64)
    computes = counts[:, 0] > 0
    new, pairs, context, sequences = counts[computes].T
    return MeasuredSteps(
        np.array(seconds)[computes], new, pairs, context, sequences, source="steps of an engine in this process"
    )


def calibrated(
    model: compat.Model,
    requests: Sequence[TokenizedRequest],
    load: float,
    clock: Callable[[], float],
    folder: Path,
) -> Calibration:
    """Fit a cost model to the steps of requests, by way of the file that ``pagedkv calibrate`` reads."""
    steps = folder / "steps.jsonl"
    records = serve(model, requests, load, clock).records
    steps.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))
    return calibrate(read_steps(str(steps), BLOCK_SIZE))


def predicted(costs: CostModel, requests: Sequence[TokenizedRequest], load: float) -> PointFigures:
    """Predict a load, as a point of a plan."""
    config = ServingConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=MAX_SEQUENCES,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        load=load,
    )
    return run_point(PlanPoint(config, costs), map(as_told, requests))


def exact_hits(trace: Path, costs: Path, load: float) -> float:
    """Give the hit ratio of the engine in the simulation's steps. Raises AssertionError where they part."""
    options = ServingOptions(
        num_blocks=str(NUM_BLOCKS),
        block_size=BLOCK_SIZE,
        cost_model=str(costs),
        max_sequences=MAX_SEQUENCES,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        load=load,
    )
    with options.trace.open(str(trace)) as opened:
        requests = list(options.trace.requests(opened))
    comparison = replay_with_engine(trace.name, requests, options, None)
    assert not comparison.differing, f"engine and simulation differ in {comparison.differing}"
    return comparison.measured["token_hit_ratio"]


def measure(
    loads: Sequence[float], num_sessions: int, clock: Callable[[], float], folder: Path
) -> tuple[Calibration, list[Row]]:
    """Calibrate, then predict and measure each load."""
    model = load_trained()
    vocabulary = compat.vocabulary_size(model)
    requests = conversations(1, num_sessions, vocabulary)
    serve(model, requests[:20], 100.0, clock)  # compiles
    calibration = calibrated(model, conversations(2, num_sessions, vocabulary), max(loads), clock, folder)
    trace, costs = folder / "trace.jsonl", folder / "cost.json"
    with trace.open("wb") as file, TraceWriter(file) as writer:
        for request in requests:
            writer.write(as_told(request))
    costs.write_text(json.dumps(calibration.model.as_dict()))
    rows = []
    for load in loads:
        figures, measured = predicted(calibration.model, requests, load), serve(model, requests, load, clock)
        exact = exact_hits(trace, costs, load)
        assert exact == figures.hit_ratio, f"load {load}: {exact} is hit in the same steps, {figures.hit_ratio} said"
        offered_per_s = len(requests) / (requests[-1].arrival_s - requests[0].arrival_s) * load
        rows.append(Row(load, offered_per_s, figures, measured, exact))
    return calibration, rows


def report(calibration: Calibration, rows: Sequence[Row]) -> str:
    """Set the figures in Markdown."""
    head = (
        "load", "offered/s", "answers/s predicted", "measured", "error", "seconds of steps predicted", "measured",
        "error", "hit ratio predicted", "same steps", "by the clock",
    )  # fmt: skip
    cells = (
        (
            f"{row.load:g}",
            f"{row.offered_per_s:.1f}",
            f"{row.predicted.throughput_per_s:.2f}",
            f"{row.measured.answers_per_s:.2f}",
            f"{row.throughput_error:+.1%}",
            f"{row.predicted.busy_s:.2f}",
            f"{row.measured.busy_s:.2f}",
            f"{row.busy_error:+.1%}",
            f"{row.predicted.hit_ratio:.4%}",
            f"{row.exact_hit_ratio:.4%}",
            f"{row.measured.hit_ratio:.4%}",
        )
        for row in rows
    )
    errors = calibration.overall
    sentences = (
        f"Calibration: {errors.num_steps:,} steps, median error {errors.median:.1%}, p90 {errors.p90:.1%}, "
        f"bias {errors.bias:+.1%}; {calibration.model.as_dict()}"
    )
    return f"{table(head, *cells)}\n\n{sentences}\n{describe()}"


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--sessions", type=int, default=120)
    parser.add_argument("--wall", action="store_true", help="count the wall clock's seconds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    compat.be_silent()
    compile_loops()
    with tempfile.TemporaryDirectory() as folder:
        loads = [float(each) for each in given.loads.split(",")]
        clock = time.perf_counter if given.wall else time.process_time
        calibration, rows = measure(loads, given.sessions, clock, Path(folder))
    print(report(calibration, rows))


if __name__ == "__main__":
    main()
