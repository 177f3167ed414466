"""``pagedkv curve``: reads the trace, measures point after point, shows how far it has come.

The bars go to stderr, and only when that is a terminal. While the trace is read, the bar shows the share of the file,
in stored bytes; then the share of the points, of which there is one for each policy and capacity.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePath
from typing import Annotated, Final

import typer
from rich.progress import Progress

from pagedkv.capacity.curve import (
    POLICIES,
    CapacityCurve,
    compile_loops,
    default_capacities,
    measure_curve,
    with_multiples,
)
from pagedkv.capacity.model_curve import ModelCurve, measure_model_curve
from pagedkv.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.cli import options as opt
from pagedkv.cli.atomic_file import STANDARD_OUTPUT, require_writable
from pagedkv.cli.cache_sizes import CacheSizes, SizedModel
from pagedkv.cli.command_line import command_line
from pagedkv.cli.curve_tables import print_curve, print_model_curve
from pagedkv.cli.json_file import write_json
from pagedkv.cli.option_groups import command
from pagedkv.cli.progress import prepare, progress_bars
from pagedkv.cli.trace_options import TraceOptions
from pagedkv.cli.user_errors import InterruptedRunError
from pagedkv.pool.eviction import registry
from pagedkv.traces.reader import TraceReader
from pagedkv.traces.request import Request

__all__ = ["curve", "curve_of_trace", "has_block_ids"]

DEFAULTS: Final = TraceOptions()


@command
def curve(
    trace: Annotated[str, typer.Argument(help="Trace file with block ids, plain or gzip.")],
    *,
    full_blocks_only: Annotated[
        bool, typer.Option("--full-blocks-only", help="Leave out the id of a partly filled last block.")
    ] = False,
    sizes: CacheSizes,
    reading: TraceOptions,
    json_file: opt.JsonFile = None,
) -> None:
    """Show what a cache of each size would hit, by each eviction policy and the optimum, and what no cache can serve.

    Prompts come one at a time, in file order, as the block ids of the trace. A prompt hits its leading run of cached
    blocks; the rest takes the blocks that the policy evicts first.

    With --model, prompts hit as its groups of layers serve them: windows and states as well, each in a pool of its own,
    split as pagedkv replay does. Nothing tells the optimum there.

    For example:

    pagedkv curve mooncake_conversation.jsonl.gz

    pagedkv curve mooncake_conversation.jsonl.gz --capacities 1000,10000,100000 --full-blocks-only

    zcat trace.jsonl.gz | pagedkv curve /dev/stdin --limit 1000 --json -

    pagedkv curve mooncake_conversation.jsonl.gz --model gemma-3-27b --memory 16,32,64
    """
    if json_file is not None:
        require_writable(json_file, trace)
    model = sizes.of_model()
    result = (
        curve_of_trace(trace, sizes.of_one_pool(), full_blocks_only=full_blocks_only, options=reading)
        if model is None
        else _curve_of_model(trace, model, full_blocks_only=full_blocks_only, options=reading)
    )
    if json_file is not None:
        write_json(json_file, {"trace": trace, "command": command_line(), **result.as_dict()})
    if json_file == STANDARD_OUTPUT:
        return
    if isinstance(result, CapacityCurve):
        print_curve(f"Capacity curve of {Path(trace).name}", result)
    else:
        print_model_curve(f"Capacity curve of {Path(trace).name}, {result.model}", result)


def curve_of_trace(
    path: str,
    capacities: list[int] | None = None,
    *,
    full_blocks_only: bool = False,
    options: TraceOptions = DEFAULTS,
    num_tokens: int | None = None,
) -> CapacityCurve:
    """Measure a trace at the given capacities or the default ones.

    Args:
        path: the trace.
        capacities: blocks, or None for the default ones.
        full_blocks_only: leave out the id of a partly filled last block.
        options: how to read the trace.
        num_tokens: also measure a cache of so many tokens, and two and four times that.

    Raises:
        ConfigurationError: a size or the limit is out of range.
        TraceError: the trace cannot be read, or has no block ids.
        InterruptedRunError: Ctrl-C.
    """
    with _references(path, full_blocks_only=full_blocks_only, options=options) as (references, progress):
        wanted = capacities or default_capacities(references)
        if num_tokens is not None:
            capacity = max(1, num_tokens // max(1, references.block_size))
            wanted = with_multiples(wanted, capacity, references.num_unique_blocks)
        return _measure(references, wanted, progress)


def _curve_of_model(path: str, sized: SizedModel, *, full_blocks_only: bool, options: TraceOptions) -> ModelCurve:
    """Measure a model's curve on a trace. Raises as :func:`curve_of_trace`."""
    with _references(path, full_blocks_only=full_blocks_only, options=options) as (references, progress):
        model = sized.split(references.mean_tokens)
        num_points = len(model.points) * len(registry.POLICIES)
        with _shown(progress, num_points) as show:
            return measure_model_curve(references, model, list(registry.POLICIES), show)


@contextmanager
def _references(
    path: str, *, full_blocks_only: bool, options: TraceOptions
) -> Iterator[tuple[BlockReferences, Progress]]:
    """Read what a trace refers to, and show progress meanwhile and afterwards."""
    collector = ReferenceCollector(path, full_blocks_only=full_blocks_only)
    with options.open(path) as trace:
        prepare(compile_loops)
        with progress_bars() as progress:
            yield _collect(trace, options.requests(trace), collector, PurePath(path).name, progress), progress


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
    with _shown(progress, len(set(capacities)) * len(POLICIES)) as show:
        return measure_curve(references, capacities, show=show)


@contextmanager
def _shown(progress: Progress, num_points: int) -> Iterator[Callable[[int], None]]:
    """Show how many points of a curve are measured; Ctrl-C tells it too."""
    task = progress.add_task("curve", total=num_points, come_to=f"{num_points} points")
    try:
        yield lambda num_done: progress.update(task, completed=num_done)
    except KeyboardInterrupt as error:
        num_done = int(progress.tasks[-1].completed)
        message = f"interrupted after {num_done} of {num_points} points of the curve; nothing was written"
        raise InterruptedRunError(message) from error
