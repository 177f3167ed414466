"""``pagedkv convert``: reads a trace of any known format, and writes it in the pagedkv trace format.

Requests flow one at a time from the reader through the chosen conversions (sessions interleaved, sorting, block ids
made from tokens) to the writer, so a trace need not fit in memory. The bar goes to stderr, and only if that is a
terminal; it shows the share of the file that has been read, in stored bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from secrets import token_bytes
from typing import Annotated, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.options import command, flag, option
from pagedkv.cli.output_files import (
    atomic_file,
    command_line,
    is_replaced_whole,
    maybe_compressed,
    require_writable,
    write_json,
)
from pagedkv.cli.progress import progress_bars
from pagedkv.cli.trace_options import SourceOptions, in_order_of_arrival, require_limit
from pagedkv.cli.user_errors import as_typed
from pagedkv.errors import ConfigurationError, InterruptedRunError, TraceError
from pagedkv.planner.traces.clocks import rebased
from pagedkv.planner.traces.merging import interleave_sessions
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import anonymized, with_block_ids
from pagedkv.planner.traces.writer import TraceWriter

SALT_NBYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Conversion:
    """The changes of a conversion, apart from the format.

    Args:
        trace_block_size: tokens per block id of the source; replaces the source's own value.
        block_size: make ids of blocks of this many tokens from the tokens of the source.
        sort: whether requests are sorted by arrival; else unsorted ones are refused.
        session_interval_s: seconds from the start of one session to the next, for a trace with one session in each
            line.
        max_gap_s: longest time between two requests of a session, in seconds; only with an interval.
        anonymize: replace tokens by salted digests of blocks, and names of sessions by salted digests.
        salt: salt of these digests, for several files that belong together; None: a random one.
        limit: most requests to write, in the order of the output.
        source: properties of the file that its content does not determine.

    Raises:
        ConfigurationError: a number is out of range, or a gap is given without an interval.
    """

    block_size: Annotated[
        int | None, option("B", "Make block ids, of B tokens each, from the tokens of the trace.")
    ] = None
    sort: opt.Sort = False
    session_interval_s: Annotated[
        float | None,
        option("S", "For a trace with a session a line: seconds between session starts.", "--session-interval"),
    ] = None
    max_gap_s: opt.MaxGap = None
    trace_block_size: opt.TraceBlockSize = None
    anonymize: Annotated[
        bool, flag("Write no text or token: block ids (of --block-size, else 16, tokens) are salted digests.")
    ] = False
    salt: Annotated[
        str | None, option("TEXT", "Salt of --anonymize, for files that belong together. Default: a random one.")
    ] = None
    limit: opt.Limit = None
    source: SourceOptions = SourceOptions()  # noqa: RUF009 - a value: frozen

    def __post_init__(self) -> None:
        require_limit(self.limit)
        if self.salt is not None and not (self.anonymize and self.salt):
            raise ConfigurationError("--salt is a text for --anonymize: give both")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigurationError(f"--block-size must be at least 1 token, got {self.block_size}")
        if self.max_gap_s is not None and self.session_interval_s is None:
            raise ConfigurationError("--max-gap cuts the gaps within sessions: give --session-interval, too")


@command
def convert(
    trace: Annotated[str, typer.Argument(help="Trace file, plain or gzip.")],
    *,
    output: Annotated[
        Path, option("OUT", "File to write, compressed if it ends in .gz; - is standard output.", "--output", "-o")
    ],
    conversion: Conversion,
    json_file: opt.JsonFile = None,
) -> None:
    """Convert a trace of any known format to the pagedkv trace format, which docs/trace-format.md describes.

    The first line determines the format, as for replay. Memory stays bounded, except with --block-size.

    For example:

    pagedkv convert mooncake_conversation.jsonl.gz -o conversation.jsonl.gz

    pagedkv convert sessions.jsonl.gz -o busy.jsonl.gz --session-interval 60 --max-gap 60

    pagedkv convert tokens.jsonl -o - --block-size 16 | pagedkv curve /dev/stdin

    pagedkv convert requests.log --anonymize -o trace.jsonl.gz

    pagedkv convert usage.csv --columns arrival=ts_ms,input=n_in,output=n_out -o trace.jsonl
    """
    require_writable(output)
    if json_file is not None:
        require_writable(json_file, trace)
        if output == json_file:
            raise ConfigurationError(f"--output and --json both go to {output}: name two files")
    num_requests, recognised, notes = convert_trace(trace, output, conversion)
    if json_file is not None:
        head = {"trace": trace, "command": command_line(), "output": str(output)}
        write_json(json_file, {**head, "read_as": recognised, "num_requests": num_requests, "warnings": notes})
    for note in notes:
        typer.echo(f"warning: {note}", err=True)
    typer.echo(f"{num_requests:,} requests written to {output}, read as {recognised}", err=True)  # OUT may be stdout


def convert_trace(path: str, output: Path, conversion: Conversion) -> tuple[int, str, list[str]]:
    """Convert a trace.

    Args:
        path: the trace, plain or gzip.
        output: the file to write; one that ends in .gz is compressed, always to the same bytes. - is the standard
            output.

    Returns:
        The number of requests written, the recognised format, and the notes on it.

    Raises:
        ConfigurationError: a size or time is out of range, or the trace has blocks of several sizes.
        TraceError: the trace cannot be read, or lacks what the conversion needs.
        OutputError: the output, or a temporary file, cannot be written.
        InterruptedRunError: Ctrl-C.
    """
    num_read = 0
    try:
        with (
            conversion.source.open(path, conversion.trace_block_size, any_order=conversion.sort) as trace,
            progress_bars() as progress,
        ):
            task = progress.add_task(PurePath(path).name, total=trace.num_bytes, so_far="")

            def count_one() -> None:
                nonlocal num_read
                num_read += 1
                progress.update(task, completed=trace.num_bytes_read, so_far=f"{num_read:,} requests")

            requests = _converted(path, _counted(_in_order(path, trace, conversion), count_one), conversion)
            with atomic_file(output) as file, maybe_compressed(file, output) as sink, TraceWriter(sink) as writer:
                for request in requests:
                    writer.write(request)
            return writer.num_requests, as_typed(trace.recognised), [as_typed(note) for note in trace.notes]
    except KeyboardInterrupt as error:
        outcome = "nothing was written" if is_replaced_whole(output) else "the output is incomplete"
        raise InterruptedRunError(f"interrupted after {num_read:,} requests; {outcome}") from error


def _in_order(path: str, trace: TraceReader, conversion: Conversion) -> Iterator[Request]:
    """Return the requests on one clock, sorted if they come of a folder, else not yet."""
    if conversion.session_interval_s is not None:
        return interleave_sessions(trace.sessions(), conversion.session_interval_s, conversion.max_gap_s)
    if trace.session_per_row:
        reason = "each session has a clock of its own"
        raise TraceError(
            path, None, reason, "State the seconds between the starts of two sessions: --session-interval 60"
        )
    return in_order_of_arrival(trace) if trace.is_folder else iter(trace)


def _counted(requests: Iterator[Request], count_one: Callable[[], None]) -> Iterator[Request]:
    for request in requests:
        count_one()
        yield request


def _converted(path: str, requests: Iterator[Request], conversion: Conversion) -> Iterator[Request]:
    if conversion.sort and conversion.session_interval_s is None:
        requests = in_order_of_arrival(requests)
    requests = islice(rebased(conversion.source.in_time(requests)), conversion.limit)
    if conversion.anonymize:
        salt = token_bytes(SALT_NBYTES) if conversion.salt is None else conversion.salt.encode()
        return anonymized(requests, salt, conversion.block_size)
    return requests if conversion.block_size is None else with_block_ids(path, requests, conversion.block_size)
