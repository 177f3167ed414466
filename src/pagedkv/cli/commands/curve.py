"""``pagedkv curve``."""

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.atomic_file import STANDARD_OUTPUT, require_writable
from pagedkv.cli.command_line import command_line
from pagedkv.cli.curve import curve_of_trace, parse_capacities
from pagedkv.cli.curve_tables import print_curve
from pagedkv.cli.json_file import write_json
from pagedkv.cli.trace_options import TraceOptions
from pagedkv.cli.user_errors import reported

__all__ = ["curve"]


def curve(  # noqa: PLR0913 - one parameter an option
    trace: Annotated[str, typer.Argument(help="Trace file with block ids, plain or gzip.")],
    *,
    capacities: Annotated[
        str | None,
        typer.Option(
            metavar="C,C,...",
            help="Blocks of the cache. Default: ten in geometric progression, from the longest prompt's blocks, or "
            "half of the ideal hits if that takes fewer, to the number of distinct blocks.",
        ),
    ] = None,
    full_blocks_only: Annotated[
        bool, typer.Option("--full-blocks-only", help="Leave out the id of a partly filled last block.")
    ] = False,
    session_interval: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds between session starts, in a trace with a session a line. Default: one after the other.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None,
    max_gap: opt.MaxGap = None,
    trace_block_size: opt.TraceBlockSize = None,
    limit: opt.Limit = None,
    json_file: opt.JsonFile = None,
) -> None:
    """Show what a cache of each size would hit, by each eviction policy and the optimum, and what no cache can serve.

    Prompts come one at a time, in file order, as the block ids of the trace. A prompt hits its leading run of cached
    blocks; the rest takes the blocks that the policy evicts first.

    For example:

    pagedkv curve mooncake_conversation.jsonl.gz

    pagedkv curve mooncake_conversation.jsonl.gz --capacities 1000,10000,100000 --full-blocks-only

    zcat trace.jsonl.gz | pagedkv curve /dev/stdin --limit 1000 --json -
    """
    with reported():
        if json_file is not None:
            require_writable(json_file, trace)
        result = curve_of_trace(
            trace,
            None if capacities is None else parse_capacities(capacities),
            full_blocks_only=full_blocks_only,
            options=TraceOptions(session_interval, max_gap, trace_block_size, limit),
        )
        if json_file is not None:
            write_json(json_file, {"trace": trace, "command": command_line(), **result.as_dict()})
        if json_file != STANDARD_OUTPUT:
            print_curve(f"Capacity curve of {Path(trace).name}", result)
