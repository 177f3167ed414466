"""``pagedkv curve``: reads the trace, measures point after point, shows progress.

The bars go to stderr, and only if that is a terminal. While the trace is read, the bar shows the share of the file, in
stored bytes; then it shows the share of the points, one for each policy and capacity.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Final

import typer
from rich.progress import Progress

from pagedkv.cli import options as opt
from pagedkv.cli.curve_options import NO_TIERS, CacheSizes, CurveTierOptions, SizedModel, TiersBelow, token_nbytes_of
from pagedkv.cli.curve_tables import print_curve, print_model_curve
from pagedkv.cli.option_groups import command
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.progress import prepare, progress_bars
from pagedkv.cli.tables import print_first, print_warnings
from pagedkv.cli.trace_options import NO_MERGING, MergingOptions, SeveralTracesOptions, TraceOptions
from pagedkv.cli.trace_sources import TraceSources, name_of, partitions_of
from pagedkv.contract.space_config import DEFAULT_EVICTION
from pagedkv.errors import InterruptedRunError
from pagedkv.planner.capacity.curve import (
    FOR_MANY_REQUESTS,
    MOST_FOR_ALL,
    OPTIMAL,
    POLICIES,
    CapacityCurve,
    default_capacities,
    measure_curve,
    policies_for,
    with_multiples,
)
from pagedkv.planner.capacity.model_curve import ModelCurve, measure_model_curve
from pagedkv.planner.capacity.references import BlockReferences, Partition, ReferenceCollector
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import ContentBlocks
from pagedkv.warming import Rehearsal, make_ready, of_curves, of_model_curves, of_stores

__all__ = ["curve", "curve_of_trace", "has_content"]

DEFAULTS: Final = TraceOptions()
BLOCK_SIZE: Final = 16
NUM_LOOKED_AT: Final = 1000
"""Number of requests that are read to determine whether a trace has content."""


@dataclass(frozen=True, slots=True)
class CurveOptions:
    """The options of a measurement, as typed."""

    full_blocks_only: Annotated[
        bool, typer.Option("--full-blocks-only", help="Leave out the id of a partly filled last block.")
    ] = False
    policies: Annotated[
        str | None,
        typer.Option(
            "--eviction",
            metavar="NAME,...",
            help=f"Eviction policies. Default: all; beyond {MOST_FOR_ALL:,} requests {', '.join(FOR_MANY_REQUESTS)}.",
        ),
    ] = None
    jobs: opt.Jobs = None

    @property
    def num_threads(self) -> int:
        """Points measured at once. Raises ConfigurationError."""
        return opt.num_jobs(self.jobs)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The named policies, if any. Raises ConfigurationError."""
        return None if self.policies is None else policies_for(0, map(str.strip, self.policies.split(",")))


@command
def curve(  # noqa: PLR0913 - a trace, and groups of options
    traces: Annotated[
        list[str], typer.Argument(help="Trace with block ids, tokens or texts; several are one, a tenant each.")
    ],
    *,
    measured: CurveOptions,
    sizes: CacheSizes,
    tier: CurveTierOptions,
    reading: SeveralTracesOptions,
    json_file: opt.JsonFile = None,
) -> None:
    """Show what a cache of each size would hit, by each eviction policy and the optimum, and what no cache can serve.

    Prompts come one at a time, in file order, as the block ids of the trace, or as blocks of --block-size tokens made
    of its texts. A prompt hits its leading run of cached blocks; the rest takes blocks that the policy evicts first, as
    does its answer where the trace has it.

    Several traces, as logs of several teams, share the cache, on one clock; hits are given in all and by tenant, as
    with --tenant-by; --isolate hides each tenant's blocks from the others. --window gives them by time.

    With --model, sizes are GiB. With --memory, hits are those of its groups of layers, including windows and states,
    each in a pool of its own, split as in pagedkv replay; there is no optimum then.

    With --host-memory or --disk, hits are also given by medium: those that a tier still has below a cache of each size.
    There is no clock, so a load always pays and takes no time; pagedkv replay has the times.

    For example:

    pagedkv curve mooncake_conversation.jsonl.gz

    pagedkv curve mooncake_conversation.jsonl.gz --model llama-3.1-8b

    pagedkv curve mooncake_conversation.jsonl.gz --capacities 1000,10000,100000 --full-blocks-only

    zcat trace.jsonl.gz | pagedkv curve /dev/stdin --limit 1000 --eviction lru,hazard --json -

    pagedkv curve mooncake_conversation.jsonl.gz --model gemma-3-27b --memory 16,32,64

    pagedkv curve mooncake_conversation.jsonl.gz --model llama-3.1-8b --memory 16,64 --host-memory 64GiB,256GiB

    pagedkv curve team-a.jsonl team-b.jsonl --isolate --window 1h
    """
    if json_file is not None:
        require_writable(json_file, *traces)
    model, settings = sizes.of_model(), tier.settings()
    of_pool = model is None or bool(settings) or not model.sizes_gib
    token_nbytes = token_nbytes_of(model) if of_pool else 0
    names, num_threads = measured.names, measured.num_threads
    read = TraceBlocks(
        traces,
        reading,
        [
            *map(of_curves if of_pool else of_model_curves, names or policies_for(0)),
            *([of_stores(DEFAULT_EVICTION)] if settings else []),
        ],
        full_blocks_only=measured.full_blocks_only,
        block_size=sizes.block_size,
        keeps_answers=of_pool,
        merging=reading.merging,
    )
    result: CapacityCurve | ModelCurve
    if model is not None and not of_pool:
        result = _curve_of_model(read, model, names=names)
    else:
        below = TiersBelow(settings, token_nbytes, () if model is None else model.sizes_gib, model is not None)
        result = _curve(read, sizes.of_one_pool(), names=names, num_threads=num_threads, below=below)
    if json_file is not None:
        sources: dict[str, object] = {"trace": traces[0]} if len(traces) == 1 else {"traces": traces}
        head = {**sources, "command": command_line(), "read_as": read.recognised, "warnings": read.notes}
        write_json(json_file, {**head, **result.as_dict()})
    if json_file == STANDARD_OUTPUT:
        return
    print_first(result.need.sentence)
    print_warnings(read.notes)
    if isinstance(result, CapacityCurve):
        named = "" if model is None else f", {model.model.name}"
        print_curve(f"Capacity curve of {name_of(traces)}{named}", result, read.recognised)
    else:
        print_model_curve(f"Capacity curve of {name_of(traces)}, {result.model}", result, read.recognised)


def curve_of_trace(  # noqa: PLR0913 - a trace, and all options of its curve, by keywords
    path: str,
    capacities: list[int] | None = None,
    *,
    full_blocks_only: bool = False,
    options: TraceOptions = DEFAULTS,
    num_tokens: int | None = None,
    block_size: int = BLOCK_SIZE,
    below: TiersBelow = NO_TIERS,
) -> CapacityCurve:
    """Measure a trace at the given capacities or the default ones.

    Args:
        path: the trace.
        capacities: blocks; None: the default ones.
        full_blocks_only: leave out the id of a partly filled last block.
        options: how to read the trace.
        num_tokens: also measure a cache of this many tokens, and two and four times that.
        block_size: tokens of the blocks that are made from tokens and texts.
        below: tiers below the cache.

    Raises:
        ConfigurationError: a size or the limit is out of range.
        TraceError: the trace cannot be read, or has no content.
        InterruptedRunError: Ctrl-C.
    """
    rehearsals = [*map(of_curves, policies_for(0)), *([of_stores(DEFAULT_EVICTION)] if below.settings else [])]
    blocks = TraceBlocks([path], options, rehearsals, full_blocks_only=full_blocks_only, block_size=block_size)
    return _curve(blocks, capacities, num_tokens=num_tokens, below=below)


class TraceBlocks:
    """The blocks to which a trace refers, read with a progress bar.

    Args:
        paths: the trace, or several as one.
        options: how to read each.
        rehearsals: rehearsals of the measurements that follow.
        full_blocks_only: leave out the id of a partly filled last block.
        block_size: tokens of the blocks that are made from tokens and texts.
        keeps_answers: whether blocks of answers stay cached, if the trace has their tokens.
        merging: how several traces become one.

    Attributes:
        recognised: the format; available after reading.
        notes: warnings about the trace, one sentence each; likewise.
        partitions: divisions of its requests; likewise.
    """

    def __init__(  # noqa: PLR0913 - traces, and all options of their reading, by keywords
        self,
        paths: Sequence[str],
        options: TraceOptions,
        rehearsals: Iterable[Rehearsal],
        *,
        full_blocks_only: bool,
        block_size: int,
        keeps_answers: bool = True,
        merging: MergingOptions = NO_MERGING,
    ) -> None:
        self._paths = paths
        self._keeps_answers = keeps_answers
        self._merging = merging
        self._rehearsals = tuple(rehearsals)
        self._options = options
        self._full_blocks_only = full_blocks_only
        self._blocks = ContentBlocks(block_size)
        self.recognised = ""
        self.notes: list[str] = []
        self.partitions: list[Partition] = []

    @contextmanager
    def read(self) -> Iterator[tuple[BlockReferences, Progress]]:
        """Read the references of the trace; show progress during and after reading."""
        with TraceSources(self._paths, self._options, self._merging) as trace:
            requests = self._named(trace.requests())
            prepare(partial(make_ready, *self._rehearsals))
            with progress_bars() as progress:
                collector = ReferenceCollector(trace.name, full_blocks_only=self._full_blocks_only)
                references = _collect(trace, requests, collector, trace.name, progress)
                del collector  # its tree takes more memory than the references, and is freed before measuring
                self.recognised = trace.recognised
                self.notes = [*trace.notes, *self._unshared(references.num_requests)]
                self.partitions = list(partitions_of(references, self._options, trace.origin_s))
                yield references, progress

    def _named(self, requests: Iterator[Request]) -> Iterator[tuple[Request, int]]:
        if self._keeps_answers:
            return self._blocks.with_answers(requests)
        return ((request, 0) for request in self._blocks.of(requests))

    def _unshared(self, num_requests: int) -> Iterator[str]:
        num_unshared = self._blocks.num_unshared
        if num_unshared:
            how_many = f"{num_unshared:,} of {num_requests:,} requests"
            yield f"the content of {how_many} is unknown: they count as sharing nothing"


def _curve(  # noqa: PLR0913 - a trace, and all options of its curve
    blocks: TraceBlocks,
    capacities: list[int] | None,
    *,
    num_tokens: int | None = None,
    names: Sequence[str] | None = None,
    num_threads: int = 1,
    below: TiersBelow = NO_TIERS,
) -> CapacityCurve:
    """Measure a curve. Raises as :func:`curve_of_trace`."""
    with blocks.read() as (references, progress):
        wanted = below.capacities(references) or capacities or default_capacities(references)
        if num_tokens is not None:
            capacity = max(1, num_tokens // max(1, references.block_size))
            wanted = with_multiples(wanted, capacity, references.num_unique_blocks)
        online = policies_for(references.num_requests, names)
        policies = {name: POLICIES[name] for name in (*online, OPTIMAL)}
        num_points = len(set(wanted)) * len(policies)
        with _shown(progress, num_points + len(below.settings)) as show:
            result = measure_curve(
                references, wanted, policies, show=show, num_threads=num_threads, partitions=blocks.partitions
            )
            shown = partial(_shown_behind, show, num_points)
            tiers = below.measured(references, online, result.capacities, shown)
            return replace(result, tiers=tiers, token_nbytes=below.token_nbytes if below.is_of_model else None)


def _shown_behind(show: Callable[[int], None], num_before: int, num_done: int) -> None:
    show(num_before + num_done)


def _curve_of_model(blocks: TraceBlocks, sized: SizedModel, *, names: Sequence[str] | None) -> ModelCurve:
    """Measure a model's curve on a trace. Raises as :func:`curve_of_trace`."""
    with blocks.read() as (references, progress):
        model = sized.split(references.mean_tokens)
        policies = policies_for(references.num_requests, names)
        with _shown(progress, len(model.points) * len(policies)) as show:
            return measure_model_curve(references, model, policies, show, blocks.partitions)


def has_content(path: str, options: TraceOptions = DEFAULTS) -> bool:
    """Return whether any of the first requests of a trace has content: ids, tokens or texts. Raises TraceError."""
    with options.open(path) as trace:
        return any(request.has_content for request in islice(trace, NUM_LOOKED_AT))


def _collect(
    trace: TraceSources,
    requests: Iterable[tuple[Request, int]],
    collector: ReferenceCollector,
    name: str,
    progress: Progress,
) -> BlockReferences:
    task = progress.add_task(name, total=trace.num_bytes, so_far="")
    try:
        for request, num_answer_blocks in requests:
            collector.add(request, num_answer_blocks)
            progress.update(task, completed=trace.num_bytes_read, so_far=f"{collector.num_requests:,} requests")
        return collector.references()
    except KeyboardInterrupt as error:
        message = f"interrupted after {collector.num_requests:,} requests; nothing was written"
        raise InterruptedRunError(message) from error


@contextmanager
def _shown(progress: Progress, num_points: int) -> Iterator[Callable[[int], None]]:
    """Show the number of measured points of a curve; the message after Ctrl-C has it too."""
    task = progress.add_task("curve", total=num_points, so_far=f"{num_points} points")
    try:
        yield lambda num_done: progress.update(task, completed=num_done)
    except KeyboardInterrupt as error:
        num_done = int(progress.tasks[-1].completed)
        message = f"interrupted after {num_done} of {num_points} points of the curve; nothing was written"
        raise InterruptedRunError(message) from error
