"""``pagedkv validate``: a cost model held against steps that were measured."""

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.atomic_file import STANDARD_OUTPUT, require_writable
from pagedkv.cli.command_line import command_line
from pagedkv.cli.commands.calibrate import error_rows
from pagedkv.cli.json_file import write_json
from pagedkv.cli.option_groups import command
from pagedkv.cli.tables import print_numbers, print_table, print_warnings
from pagedkv.simulation.calibration import read_steps, validate as validated
from pagedkv.simulation.cost import read_cost_model

__all__ = ["validate"]


@command
def validate(
    steps: Annotated[str, typer.Argument(help="What calibrate takes: CSV, StepRecords, a vLLM log or bench result.")],
    *,
    cost_model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A preset such as llama-3.1-8b/h100, or a JSON file.")
    ],
    block_size: Annotated[
        int, typer.Option(metavar="B", help="Tokens a block, for StepRecords, which count blocks.")
    ] = 16,
    json_file: opt.JsonFile = None,
) -> None:
    """Tell how far off a cost model is on steps that an engine took.

    Calibrate on one measurement and validate on another one: the error of a fit says little of other loads.

    For example:

    pagedkv validate bench.json --cost-model llama-3.1-8b/h100

    pagedkv validate vllm.log --cost-model cost.json
    """
    if json_file is not None:
        require_writable(json_file, steps)
    model = read_cost_model(cost_model)
    measured = read_steps(steps, block_size)
    found = validated(measured, model)
    if json_file is not None:
        head = {"steps": steps, "command": command_line(), "read_as": measured.told_by, "cost_model": cost_model}
        write_json(json_file, {**head, **found.as_dict()})
    if json_file == STANDARD_OUTPUT:
        return
    print_warnings(found.notes)
    facts = [("read as", measured.told_by), ("steps", f"{len(measured):,}"), ("cost model", cost_model)]
    print_table(f"Steps of {Path(steps).name}", facts)
    title = "Error of the cost model, relative to what was measured"
    print_numbers(title, ("tokens of a step", "steps", "median", "p90", "bias"), error_rows(found))
