"""``pagedkv curve``: reads the trace, measures point after point, shows how far it has come.

The bars go to stderr, and only when that is a terminal. While the trace is read, the bar shows the share of the file,
in stored bytes; then the share of the points, of which there is one for each policy and capacity.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path, PurePath
from typing import Annotated, Final

import typer
from rich.progress import Progress

from pagedkv.capacity.curve import POLICIES, CapacityCurve, compile_loops, default_capacities, measure_curve
from pagedkv.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.cli import options as opt
from pagedkv.cli.atomic_file import STANDARD_OUTPUT, require_writable
from pagedkv.cli.command_line import command_line
from pagedkv.cli.curve_tables import print_curve
from pagedkv.cli.json_file import write_json
from pagedkv.cli.option_groups import command
from pagedkv.cli.progress import prepare, progress_bars
from pagedkv.cli.trace_options import TraceOptions
from pagedkv.cli.user_errors import InterruptedRunError
from pagedkv.errors import ConfigurationError
from pagedkv.traces.reader import TraceReader
from pagedkv.traces.request import Request

__all__ = ["curve", "curve_of_trace", "has_block_ids", "parse_capacities"]

DEFAULTS: Final = TraceOptions()


@command
def curve(
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
    reading: TraceOptions,
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
    if json_file is not None:
        require_writable(json_file, trace)
    result = curve_of_trace(
        trace,
        None if capacities is None else parse_capacities(capacities),
        full_blocks_only=full_blocks_only,
        options=reading,
    )
    if json_file is not None:
        write_json(json_file, {"trace": trace, "command": command_line(), **result.as_dict()})
    if json_file != STANDARD_OUTPUT:
        print_curve(f"Capacity curve of {Path(trace).name}", result)


def parse_capacities(text: str) -> list[int]:
    """Read capacities separated by commas.

    Raises:
        ConfigurationError: one is not a whole number, or not positive.

    >>> parse_capacities("1000, 200")
    [1000, 200]
    """
    try:
        capacities = [int(capacity) for capacity in text.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"--capacities must be whole numbers separated by commas, got {text!r}") from error
    if min(capacities) < 1:
        raise ConfigurationError(f"--capacities must be at least 1 block, got {min(capacities)}")
    return capacities


def curve_of_trace(
    path: str,
    capacities: list[int] | None = None,
    *,
    full_blocks_only: bool = False,
    options: TraceOptions = DEFAULTS,
) -> CapacityCurve:
    """Measure a trace at the given capacities or the default ones.

    Raises:
        ConfigurationError: a size or the limit is out of range.
        TraceError: the trace cannot be read, or has no block ids.
        InterruptedRunError: Ctrl-C.
    """
    collector = ReferenceCollector(path, full_blocks_only=full_blocks_only)
    with options.open(path) as trace:
        prepare(compile_loops)
        with progress_bars() as progress:
            references = _collect(trace, options.requests(trace), collector, PurePath(path).name, progress)
            return _measure(references, capacities or default_capacities(references), progress)


def has_block_ids(path: str, options: TraceOptions = DEFAULTS) -> bool:
    """Tell whether the first request of a trace has block ids. Raises TraceError."""
    with options.open(path) as trace:
        return any(request.block_ids is not None for request in islice(trace, 1))


def _collect(
    trace: TraceReader, requests: Iterable[Request], collector: ReferenceCollector, name: str, progress: Progress
) -> BlockReferences:
    task = progress.add_task(name, total=trace.num_bytes, come_to="")
    try:
        for request in requests:
            collector.add(request)
            progress.update(task, completed=trace.num_bytes_read, come_to=f"{collector.num_requests:,} requests")
        return collector.references()
    except KeyboardInterrupt as error:
        message = f"interrupted after {collector.num_requests:,} requests; nothing was written"
        raise InterruptedRunError(message) from error


def _measure(references: BlockReferences, capacities: list[int], progress: Progress) -> CapacityCurve:
    num_points = len(set(capacities)) * len(POLICIES)
    task = progress.add_task("curve", total=num_points, come_to=f"{num_points} points")
    try:
        return measure_curve(references, capacities, show=lambda num_done: progress.update(task, completed=num_done))
    except KeyboardInterrupt as error:
        num_done = int(progress.tasks[-1].completed)
        message = f"interrupted after {num_done} of {num_points} points of the curve; nothing was written"
        raise InterruptedRunError(message) from error
