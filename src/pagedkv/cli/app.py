"""The commands and their options. What they do is done elsewhere: see :mod:`pagedkv.cli`."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

import typer

from pagedkv.cli.curve import curve_of_trace, parse_capacities
from pagedkv.cli.curve_tables import print_curve
from pagedkv.cli.demo import run_demo
from pagedkv.cli.json_file import STANDARD_OUTPUT, require_writable, write_json
from pagedkv.cli.run import replay_trace
from pagedkv.cli.tables import print_summary
from pagedkv.cli.user_errors import reported
from pagedkv.replay.replayer import ReplayConfig
from pagedkv.replay.workload import ConversationWorkload

__all__ = ["app"]

DEFAULT_BLOCK_SIZE: Final = 16
DEFAULT_NUM_BLOCKS: Final = 262_144
"""4.2 million tokens at 16 a block, in the range of one node of eight large GPUs serving a 70B model."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

NumBlocks = Annotated[
    int, typer.Option(metavar="N", help="Blocks of the pool, one of them the null block, which holds nothing.")
]
BlockSize = Annotated[int, typer.Option(metavar="B", help="Tokens a block.")]


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - called by typer with the flag's value
    if wanted:
        typer.echo(f"pagedkv {version('pagedkv')}")
        raise typer.Exit


@app.callback()
def pagedkv(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Paged KV-cache bookkeeping: block tables, prefix cache, eviction; replayed over request traces."""


@app.command()
def replay(  # noqa: PLR0913 - one parameter an option
    trace: Annotated[str, typer.Argument(help="Trace file, plain or gzip.")],
    *,
    num_blocks: NumBlocks = DEFAULT_NUM_BLOCKS,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    trace_block_size: Annotated[
        int | None, typer.Option(metavar="B", help="Tokens a block id of the trace stands for, if not as it tells.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Replay only the first N requests.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - prints only that.")
    ] = None,
) -> None:
    """Replay a request trace, one request at a time, through the block space with prefix caching.

    The first line tells the format: JSON lines with hash_ids (Mooncake), hash_runs, or requests (a session a line), or
    CSV with the header arrived_s,input_length,output_length.

    For example:

    pagedkv replay mooncake_conversation.jsonl.gz --num-blocks 100000

    pagedkv replay requests.csv.gz --block-size 32 --json result.json

    zcat trace.jsonl.gz | pagedkv replay /dev/stdin --limit 1000 --json -
    """
    with reported():
        if json_file is not None:
            require_writable(json_file)
        summary = replay_trace(
            trace, ReplayConfig(num_blocks, block_size), trace_block_size=trace_block_size, limit=limit
        )
        if json_file != STANDARD_OUTPUT:
            print_summary(f"Replay of {Path(trace).name}", summary)
        if json_file is not None:
            write_json(json_file, {"trace": trace, "limit": limit, **summary.as_dict()})


@app.command()
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
    trace_block_size: Annotated[
        int | None, typer.Option(metavar="B", help="Tokens a block id of the trace stands for, if not as it tells.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Measure only the first N requests.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - prints only that.")
    ] = None,
) -> None:
    """Show what a cache of each size would hit: LRU, the offline optimum, and what no cache can serve.

    Prompts come one at a time, in file order, as the block ids of the trace. A prompt hits its leading run of cached
    blocks, then takes the cache's least recently used blocks for the rest.

    For example:

    pagedkv curve mooncake_conversation.jsonl.gz

    pagedkv curve mooncake_conversation.jsonl.gz --capacities 1000,10000,100000 --full-blocks-only

    zcat trace.jsonl.gz | pagedkv curve /dev/stdin --limit 1000 --json -
    """
    with reported():
        if json_file is not None:
            require_writable(json_file)
        result = curve_of_trace(
            trace,
            None if capacities is None else parse_capacities(capacities),
            full_blocks_only=full_blocks_only,
            trace_block_size=trace_block_size,
            limit=limit,
        )
        if json_file != STANDARD_OUTPUT:
            print_curve(f"Capacity curve of {Path(trace).name}", result)
        if json_file is not None:
            write_json(json_file, {"trace": trace, **result.as_dict()})


@app.command()
def demo(
    *,
    traces: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where mooncake_conversation.jsonl.gz may be.")
    ] = None,
    num_blocks: NumBlocks = DEFAULT_NUM_BLOCKS,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the generated conversations.")] = 0,
    sessions: Annotated[int, typer.Option(metavar="N", help="Number of generated conversations.")] = 1000,
) -> None:
    """Replay generated conversations and, where there is one, a real trace.

    For example:

    pagedkv demo

    pagedkv demo --seed 7 --sessions 5000 --num-blocks 20000

    pagedkv demo --traces ~/traces
    """
    with reported():
        workload = ConversationWorkload(seed=seed, num_sessions=sessions)
        run_demo(workload, ReplayConfig(num_blocks, DEFAULT_BLOCK_SIZE), traces)
