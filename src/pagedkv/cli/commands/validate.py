"""``pagedkv validate``: compares a cost model with measured steps."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.commands.calibrate import error_rows
from pagedkv.cli.option_groups import command
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.progress import prepare, working
from pagedkv.cli.tables import print_numbers, print_table, print_warnings
from pagedkv.cli.typed_names import as_typed
from pagedkv.planner.traces.lines import Line
from pagedkv.simulation import compile_loops
from pagedkv.simulation.calibration import (
    BenchLatencies,
    ComparedLatency,
    bench_result_in,
    compare_latencies,
    read_steps,
    steps_of_bench,
    validate as validated,
)
from pagedkv.simulation.cost import CostModel, read_cost_model

__all__ = ["validate"]

NO_SHARING: Final = (
    "predicted latencies include no hits, since the result does not show what prompts share, and neither network nor "
    "server, which the stated ones include"
)


@command
def validate(  # noqa: PLR0913 - typer needs a parameter for each option
    steps: Annotated[str, typer.Argument(help="Measured steps: CSV, StepRecords, a vLLM log or bench result.")],
    *,
    cost_model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A preset such as llama-3.1-8b/h100, or a JSON file.")
    ],
    block_size: Annotated[
        int, typer.Option(metavar="B", help="Tokens a block, for StepRecords, which count blocks.")
    ] = 16,
    max_sequences: opt.MaxSequences = 256,
    max_batched_tokens: opt.MaxBatchedTokens = 8192,
    json_file: opt.JsonFile = None,
) -> None:
    """Show the error of a cost model on measured steps of an engine.

    The requests of a result of vllm bench serve are also served on the virtual clock, and its TTFT, TPOT and ITL are
    shown beside the predicted ones; give the engine's limits of a step (--max-sequences, --max-batched-tokens).

    Calibrate on one measurement and validate on another one: the error of a fit does not hold for other loads.

    For example:

    pagedkv validate bench.json --cost-model llama-3.1-8b/h100

    pagedkv validate vllm.log --cost-model cost.json
    """
    if json_file is not None:
        require_writable(json_file, steps)
    model = read_cost_model(cost_model)
    bench = bench_result_in(steps)
    measured = read_steps(steps, block_size) if bench is None else steps_of_bench(*bench)
    found = validated(measured, model) if len(measured) else None
    latencies = None if bench is None else _latencies(*bench, model, max_sequences, max_batched_tokens)
    notes = [as_typed(note) for note in (*measured.notes, *(() if latencies is None else (NO_SHARING,)))]
    if json_file is not None:
        head = {"steps": steps, "command": command_line(), "read_as": measured.source, "cost_model": cost_model}
        compared = {} if latencies is None else {"latencies": [each.as_dict() for each in latencies.compared]}
        errors = {"errors": None} if found is None else found.as_dict()
        write_json(json_file, {**head, **errors, "notes": list(notes), **compared})
    if json_file == STANDARD_OUTPUT:
        return
    print_warnings(notes)
    facts = [("read as", measured.source), ("steps", f"{len(measured):,}"), ("cost model", cost_model)]
    print_table(f"Steps of {Path(steps).name}", facts)
    if found is not None:
        title = "Error of the cost model, relative to the measured seconds"
        print_numbers(title, ("tokens of a step", "steps", "median", "p90", "bias"), error_rows(found))
    if latencies is not None:
        title = (
            f"Latencies of {latencies.num_requests:,} requests, in seconds: stated, and predicted on the virtual clock"
        )
        print_numbers(title, ("", "stated", "predicted", "error"), map(_row, latencies.compared))


def _latencies(
    line: Line, result: dict[str, Any], model: CostModel, max_sequences: int, max_batched_tokens: int
) -> BenchLatencies:
    with working("Serving the requests of the result"):
        prepare(compile_loops)
        return compare_latencies(line, result, model, max_sequences, max_batched_tokens)


def _row(each: ComparedLatency) -> tuple[str, str, str, str]:
    label = f"{each.metric.upper()} {each.statistic}"
    return label, f"{each.stated_s:.4f}", f"{each.predicted_s:.4f}", f"{each.error:+.1%}"
