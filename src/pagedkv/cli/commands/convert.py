"""``pagedkv convert``."""

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.atomic_file import require_writable
from pagedkv.cli.convert import Conversion, convert_trace
from pagedkv.cli.user_errors import reported

__all__ = ["convert"]


def convert(  # noqa: PLR0913 - one parameter an option
    trace: Annotated[str, typer.Argument(help="Trace file, plain or gzip.")],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT", help="File to write, compressed if it ends in .gz; - is standard output."
        ),
    ],
    block_size: Annotated[
        int | None, typer.Option(metavar="B", help="Make block ids, of B tokens each, from the tokens of the trace.")
    ] = None,
    sort: Annotated[bool, typer.Option("--sort", help="Put the requests in order of arrival.")] = False,
    session_interval: Annotated[
        float | None,
        typer.Option(metavar="S", help="For a trace with a session a line: seconds between session starts."),
    ] = None,
    max_gap: opt.MaxGap = None,
    trace_block_size: opt.TraceBlockSize = None,
    limit: opt.Limit = None,
) -> None:
    """Convert a trace of any known format to the pagedkv trace format, which docs/trace-format.md describes.

    The first line tells the format, as for replay. Memory stays bounded, except with --block-size.

    For example:

    pagedkv convert mooncake_conversation.jsonl.gz -o conversation.jsonl.gz

    pagedkv convert sessions.jsonl.gz -o busy.jsonl.gz --session-interval 60 --max-gap 60

    pagedkv convert tokens.jsonl -o - --block-size 16 | pagedkv curve /dev/stdin
    """
    with reported():
        require_writable(output)
        conversion = Conversion(
            trace_block_size=trace_block_size,
            block_size=block_size,
            sort=sort,
            session_interval_s=session_interval,
            max_gap_s=max_gap,
            limit=limit,
        )
        num_requests = convert_trace(trace, output, conversion)
        typer.echo(f"{num_requests:,} requests written to {output}", err=True)  # OUT may be the standard output
