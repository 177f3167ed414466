"""``pagedkv curve``: reads the trace, measures point after point, shows progress, prints the curve.

The bars go to stderr, and only if that is a terminal. While the trace is read, the bar shows the share of the file, in
stored bytes; then it shows the share of the points, one for each policy and capacity.

Sizes of the cache are blocks of one pool, or GiB of a model. Sizes of host memory and of a disk below it are combined,
a curve each.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, cast

import typer
from rich.progress import Progress

from pagedkv.cli import options as opt
from pagedkv.cli.options import command, flag, option, parse_gib_list, parse_size
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.progress import named_model, prepare, progress_bars
from pagedkv.cli.serving import TYPICAL_TOKENS
from pagedkv.cli.tables import print_first, print_numbers, print_table, print_warnings, share, shown_parts
from pagedkv.cli.trace_options import (
    NO_MERGING,
    MergingOptions,
    SeveralTracesOptions,
    TraceOptions,
    TraceSources,
    name_of,
    partitions_of,
)
from pagedkv.contract.space_config import DEFAULT_EVICTION, blocks_that_fit
from pagedkv.contract.spec import keeps_whole_prefix
from pagedkv.errors import ConfigurationError, InterruptedRunError
from pagedkv.models import ModelMemory
from pagedkv.models.memory import GIB, block_nbytes_of, groups_of
from pagedkv.planner.capacity.curve import (
    FOR_MANY_REQUESTS,
    MOST_FOR_ALL,
    OPTIMAL,
    POLICIES,
    CapacityCurve,
    CurveTier,
    TierCurve,
    default_capacities,
    device_hits_of,
    measure_curve,
    measure_tiers,
    policies_for,
    with_multiples,
)
from pagedkv.planner.capacity.model_curve import (
    MOST_TOKENS_A_STEP,
    CachedModel,
    CachePoint,
    ModelCurve,
    measure_model_curve,
)
from pagedkv.planner.capacity.references import BlockReferences, Partition, ReferenceCollector
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import ContentBlocks
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.tiers import TOKEN_NBYTES
from pagedkv.tiers import Admission
from pagedkv.warming import Part, make_ready, of_curves, of_model_curves, of_stores

DEFAULTS: Final = TraceOptions()
BLOCK_SIZE: Final = 16
NUM_LOOKED_AT: Final = 1000
"""Number of requests that are read to determine whether a trace has content."""


@dataclass(frozen=True, slots=True)
class CurveOptions:
    """The options of a measurement, as typed."""

    full_blocks_only: Annotated[bool, flag("Leave out the id of a partly filled last block.")] = False
    policies: Annotated[
        str | None,
        option(
            "NAME,...",
            f"Eviction policies. Default: all; beyond {MOST_FOR_ALL:,} requests {', '.join(FOR_MANY_REQUESTS)}.",
            "--eviction",
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


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model and sizes of its cache, not yet split among its pools.

    Args:
        model: memory of the model.
        block_size: tokens of a block.
        sizes_gib: the sizes, ascending; empty: the default ones of a cache.
    """

    model: ModelMemory
    block_size: int
    sizes_gib: tuple[float, ...]

    def split(self, mean_tokens: float) -> CachedModel:
        """Split each size among the model's pools, for requests of ``mean_tokens``.

        Raises:
            ConfigurationError: the block size is not positive, or a size is too small.
        """
        groups, nbytes = groups_of(self.model, self.block_size), block_nbytes_of(self.model, self.block_size)
        points = [
            CachePoint(gib, blocks_that_fit(groups, nbytes, gib * GIB, mean_tokens, MOST_TOKENS_A_STEP))
            for gib in self.sizes_gib
        ]
        return CachedModel(self.model.name, groups, points)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The options, as typed."""

    capacities: Annotated[
        str | None,
        option(
            "C,C,...",
            "Blocks of the cache. Default: ten in geometric progression, from the longest prompt's blocks, or "
            "half of the ideal hits if that takes fewer, to the number of distinct blocks.",
        ),
    ] = None
    model: opt.ModelName = None
    memory: Annotated[
        str | None,
        option(
            "SIZE,SIZE,...",
            "Memory of the model's KV cache, instead of --capacities. Default: ten sizes, as of --capacities.",
            panel=opt.MEMORY,
        ),
    ] = None
    block_size: Annotated[int, option("B", "Tokens a block, of the model and of texts.", panel=opt.MEMORY)] = 16
    kv_dtype: opt.KvDtype = None

    def of_one_pool(self) -> list[int] | None:
        """Parse the capacities; None if none are given. Raises ConfigurationError as :func:`parse_capacities`."""
        return None if self.capacities is None else parse_capacities(self.capacities)

    def of_model(self) -> SizedModel | None:
        """Read the model and the sizes, which are split among its pools as in a replay; None if no model is named.

        Raises:
            ConfigurationError: options contradict one another; a size is no number, not positive or too small; the
                model is unknown.
        """
        if self.model is None:
            if self.memory is not None or self.kv_dtype is not None:
                raise ConfigurationError("--memory and --kv-dtype need a model: give --model")
            return None
        if self.capacities is not None:
            raise ConfigurationError("--capacities counts blocks of one pool: with --model give --memory instead")
        sizes_gib = () if self.memory is None else tuple(parse_gib_list(self.memory))
        sized = SizedModel(named_model(self.model, self.kv_dtype), self.block_size, sizes_gib)
        if not sizes_gib and not all(map(keeps_whole_prefix, groups_of(sized.model, self.block_size))):
            raise ConfigurationError(
                f"{sized.model.name} has windows or states, and is measured at given sizes: name them, as in "
                "--memory 8,16,32"
            )
        sized.split(TYPICAL_TOKENS)
        return sized


TIERS: Final = "Tiers"


@dataclass(frozen=True, slots=True)
class CurveTierOptions:
    """The options, as typed."""

    PANEL: ClassVar = TIERS
    host_memory: Annotated[
        str | None,
        option(
            "SIZE,...", "Host memory that keeps blocks below the cache: 64GiB,256GiB, a curve each; loads take no time."
        ),
    ] = None
    disk: Annotated[str | None, option("SIZE,...", "Disk that keeps blocks below the cache: 0,1TB, a curve each.")] = (
        None
    )
    admission: Annotated[
        str | None,
        option("RULE", "always: tiers store all blocks (default); second-offer: blocks that are offered twice."),
    ] = None

    def settings(self) -> list[tuple[CurveTier, ...]]:
        """Return the tiers of each curve, host memory first; none without these options.

        Raises:
            ConfigurationError: a size is none, too many combinations, or an admission without a tier.
        """
        sizes = [
            list(_sizes(text, option)) for text, option in ((self.host_memory, "--host-memory"), (self.disk, "--disk"))
        ]
        admission = cast("Admission", self.admission or "always")
        settings = [
            tuple(
                CurveTier(medium, nbytes, admission)
                for medium, nbytes in zip(("host", "disk"), both, strict=True)
                if nbytes
            )
            for both in product(*sizes)
        ]
        settings = [tiers for tiers in settings if tiers]
        if self.admission is not None and not settings:
            raise ConfigurationError("--admission is for tiers: give --host-memory or --disk")
        if len(settings) > MOST_CURVES:
            raise ConfigurationError(f"{len(settings)} curves of tiers are more than {MOST_CURVES}: give shorter lists")
        return settings


@command
def curve(  # noqa: PLR0913 - a trace, and groups of options
    traces: Annotated[list[str], typer.Argument(help=opt.LOGS)],
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


@dataclass(frozen=True, slots=True)
class TiersBelow:
    """Tiers below a cache.

    Args:
        settings: the tiers of each curve.
        token_nbytes: bytes of a token.
        sizes_gib: sizes of the cache; empty: they are given in blocks.
        is_of_model: whether a token's bytes are those of a named model.
    """

    settings: Sequence[tuple[CurveTier, ...]] = ()
    token_nbytes: int = 0
    sizes_gib: Sequence[float] = ()
    is_of_model: bool = False

    def capacities(self, references: BlockReferences) -> list[int] | None:
        """Return the blocks of the trace that fit each size; None without sizes.

        Raises:
            ConfigurationError: a block does not fit.
        """
        if not self.sizes_gib:
            return None
        nbytes = self._block_nbytes(references)
        if min(self.sizes_gib) * GIB < nbytes:
            raise ConfigurationError(f"a block of the trace has {nbytes:,} bytes: --memory must hold at least one")
        return [int(gib * GIB) // nbytes for gib in self.sizes_gib]

    def measured(
        self,
        references: BlockReferences,
        policies: Sequence[str],
        capacities: Sequence[int],
        show: Callable[[int], None],
    ) -> tuple[TierCurve, ...]:
        """Measure the curve of each setting; call ``show`` with the number of finished ones."""
        if not self.settings:
            return ()
        device_hits = device_hits_of(references, policies, capacities)
        curves = []
        for tiers in self.settings:
            curves.append(measure_tiers(references, device_hits, tiers, self._block_nbytes(references)))
            show(len(curves))
        return tuple(curves)

    def _block_nbytes(self, references: BlockReferences) -> int:
        return max(1, references.block_size) * self.token_nbytes


NO_TIERS: Final = TiersBelow()


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
    parts = [*map(of_curves, policies_for(0)), *([of_stores(DEFAULT_EVICTION)] if below.settings else [])]
    blocks = TraceBlocks([path], options, parts, full_blocks_only=full_blocks_only, block_size=block_size)
    return _curve(blocks, capacities, num_tokens=num_tokens, below=below)


class TraceBlocks:
    """The blocks to which a trace refers, read with a progress bar.

    Args:
        paths: the trace, or several as one.
        options: how to read each.
        parts: what the measurements that follow call.
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
        parts: Iterable[Part],
        *,
        full_blocks_only: bool,
        block_size: int,
        keeps_answers: bool = True,
        merging: MergingOptions = NO_MERGING,
    ) -> None:
        self._paths = paths
        self._keeps_answers = keeps_answers
        self._merging = merging
        self._parts = tuple(parts)
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
            prepare(partial(make_ready, *self._parts))
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


def parse_capacities(text: str) -> list[int]:
    """Parse capacities separated by commas.

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


MOST_CURVES: Final = 16


def token_nbytes_of(sized: SizedModel | None) -> int:
    """Return the bytes of a token: of the model, or of that of the default cost model.

    Raises:
        ConfigurationError: the model has windows or states.
    """
    if sized is None:
        return TOKEN_NBYTES
    groups = groups_of(sized.model, sized.block_size)
    if not all(map(keeps_whole_prefix, groups)):
        raise ConfigurationError(
            f"a curve with tiers needs a model whose layers all keep whole prefixes: {sized.model.name} has windows or "
            "states. pagedkv replay has tiers for such models"
        )
    return sized.model.token_nbytes


def below_of(config: ServingConfig) -> TiersBelow:
    """Return the tiers of a simulation for a curve; none where its groups have windows or states."""
    specs = config.group_specs
    tiers = tuple(CurveTier(tier.medium, tier.nbytes, tier.admission) for tier in config.tiers if tier.nbytes)
    if not tiers or not all(map(keeps_whole_prefix, specs)):
        return NO_TIERS
    nbytes = sum(block // spec.block_size for block, spec in zip(config.entry_block_nbytes, specs, strict=True))
    return TiersBelow([tiers], nbytes)


def _sizes(text: str | None, option: str) -> Iterator[int]:
    """Yield the sizes of a list, each once; 0 where there is none."""
    texts = ["0"] if text is None else text.split(",")
    yield from dict.fromkeys(parse_size(each.strip(), option) for each in texts)


MANY_GIB: Final = 1000
HEADINGS: Final = MappingProxyType({OPTIMAL: "optimal, offline"})
"""Headings of columns. The optimum could not run as a policy, since it depends on future requests."""


def print_curve(title: str, curve: CapacityCurve, read_as: str) -> None:
    """Print the curve of a trace, and the trace's format."""
    print_table(title, [("read as", read_as), *_facts(curve), *_left_out(curve)])
    _print_by_capacity("Hit ratio by block", curve, {name: partial(curve.hit_ratio, name) for name in curve.hits})
    is_sized = curve.token_nbytes is not None
    sizes = [f"{_size_gib(curve, each)} GiB" if is_sized else f"{each:,}" for each in curve.capacities]
    of = f", by {'memory' if is_sized else 'blocks'} of the cache; ideal by token"
    _print_parts(curve, curve.capacities, sizes, "block", of)
    _print_gains(curve)
    gaps = {name: partial(curve.policy_gap, name) for name in curve.hits if name != OPTIMAL}
    title = "Policy gaps, to the offline optimum; and the capacity gap, from there to the ideal"
    _print_by_capacity(title, curve, {**gaps, "capacity gap": curve.capacity_gap})
    for tiers in curve.tiers:
        _print_tiers(curve, tiers)


def _print_tiers(curve: CapacityCurve, below: TierCurve) -> None:
    """Print the hits with tiers below the device: by medium for the first policy, in all for the others."""
    first, *others = below.device_hits
    num_refs = curve.num_block_refs
    media = [tier.medium for tier in below.tiers]
    sizes = " and ".join(f"{tier.medium} of {_gib(tier.nbytes)} GiB" for tier in below.tiers)
    rule = "" if below.tiers[0].admission == "always" else f", {below.tiers[0].admission}"
    title = f"Hit ratio by block with {sizes}{rule}; loads take no time; GiB written"
    rows = [
        (
            f"{capacity:,}",
            _gib(capacity * below.block_nbytes),
            f"{below.device_hits[first][capacity] / num_refs:.2%}",
            *(f"{count / num_refs:.2%}" for count in below.tier_hits[first][capacity]),
            *(f"{below.num_hits(policy, capacity) / num_refs:.2%}" for policy in (first, *others)),
            *(_gib(count * below.block_nbytes) for count in below.num_written[capacity]),
        )
        for capacity in curve.capacities
    ]
    together = [f"all, {policy}" for policy in (first, *others)]
    headings = ("blocks", "GiB", f"device, {first}", *media, *together, *(f"{medium} written" for medium in media))
    print_numbers(title, headings, rows, num_keys=2)


def _facts(curve: CapacityCurve) -> Iterator[tuple[str, str]]:
    yield "tokens a block", f"{curve.block_size:,}"
    yield "requests", f"{curve.num_requests:,}"
    yield "block references", f"{curve.num_block_refs:,}"
    yield "distinct blocks", f"{curve.num_unique_blocks:,}"
    if curve.num_answer_blocks:
        yield "of them blocks of answers", f"{curve.num_answer_blocks:,}"
    yield "ideal hit ratio by block", share(curve.ideal_block_ratio, curve.ideal_hits, curve.num_block_refs)
    yield "ideal hit ratio by token", share(curve.ideal_token_ratio, curve.ideal_hit_tokens, curve.num_prompt_tokens)
    yield "content ceiling, never seen before", f"{curve.content_ceiling:.2%}"
    for fraction, capacity in curve.capacity_for.items() if curve.ideal_hits else ():
        gib = "" if curve.token_nbytes is None else f"{_size_gib(curve, capacity)} GiB, "
        yield f"LRU reaches {float(fraction):.0%} of the ideal at", f"{gib}{capacity:,} block{'s'[: capacity > 1]}"


def _left_out(curve: CapacityCurve) -> Iterator[tuple[str, str]]:
    """Return the policies that were not measured because they take long."""
    left_out = [name for name in POLICIES if name not in curve.hits]
    if left_out and curve.num_requests > MOST_FOR_ALL:
        yield "policies left out", f"{', '.join(left_out)}, since there are many requests: --eviction selects others"


def _print_parts(
    curve: CapacityCurve | ModelCurve, places: Iterable[int], sizes: Iterable[str], measure: str, of: str = ""
) -> None:
    """Print the hits of each tenant and window in the common cache, by the first policy."""
    policy = next(iter(curve.hits))
    headings = ("requests", "prompt tokens", "ideal", *sizes)
    for kind in dict.fromkeys(part.kind for part in curve.parts):
        parts = [part for part in curve.parts if part.kind == kind]
        shown, note = shown_parts(parts, [part.num_prompt_tokens for part in parts])
        rows = [
            (
                part.name,
                f"{part.num_requests:,}",
                f"{part.num_prompt_tokens:,}",
                f"{part.ideal_hit_tokens / max(1, part.num_prompt_tokens):.2%}",
                *(f"{part.hit_ratio(policy, place):.2%}" for place in places),
            )
            for part in shown
        ]
        print_numbers(f"By {kind}: hit ratio by {measure} of {policy}{of}{note}", (kind, *headings), rows)


def _print_gains(curve: CapacityCurve) -> None:
    """Print each policy's gain of more memory, if twice or four times a capacity was measured as well."""
    gains = curve.gains()
    if not gains:
        return
    policies = list(next(iter(gains.values())))
    rows = [
        (*_size_cells(curve, capacity), f"{factor}x", *(f"+{100 * by_policy[policy]:.2f}" for policy in policies))
        for (capacity, factor), by_policy in gains.items()
    ]
    headings = (*_size_headings(curve), "memory", *(HEADINGS.get(policy, policy) for policy in policies))
    num_keys = len(_size_headings(curve)) + 1
    print_numbers("Gain from more memory, in points of the hit ratio by block", headings, rows, num_keys=num_keys)


def _print_by_capacity(title: str, curve: CapacityCurve, columns: Mapping[str, Callable[[int], float]]) -> None:
    """Print shares of all references, a row for each capacity: each column with its heading and its function."""
    rows = [
        (*_size_cells(curve, capacity), *(f"{share_at(capacity):.2%}" for share_at in columns.values()))
        for capacity in curve.capacities
    ]
    headings = (*_size_headings(curve), *(HEADINGS.get(name, name) for name in columns))
    print_numbers(title, headings, rows, num_keys=len(_size_headings(curve)))


def _size_headings(curve: CapacityCurve) -> tuple[str, ...]:
    return ("blocks",) if curve.token_nbytes is None else ("GiB", "blocks")


def _size_cells(curve: CapacityCurve, capacity: int) -> tuple[str, ...]:
    blocks = f"{capacity:,}"
    return (blocks,) if curve.token_nbytes is None else (_size_gib(curve, capacity), blocks)


def _size_gib(curve: CapacityCurve, capacity: int) -> str:
    return f"{curve.gib(capacity) or 0.0:,.4g}"


def _gib(nbytes: int) -> str:
    """Return bytes in GiB, with four digits or all before the point."""
    gib = nbytes / GIB
    return f"{gib:,.0f}" if gib >= MANY_GIB else f"{gib:.4g}"


def print_model_curve(title: str, curve: ModelCurve, read_as: str) -> None:
    """Print the hits of a trace's prompts in the memory of a model, and the trace's format."""
    ideal, num_tokens = curve.ideal_hit_tokens, curve.num_prompt_tokens
    facts = (
        ("read as", read_as),
        ("requests", f"{curve.num_requests:,}"),
        ("prompt tokens", f"{num_tokens:,}"),
        ("ideal hit ratio", share(ideal / num_tokens, ideal, num_tokens)),
    )
    print_table(title, facts)
    rows = [
        (
            f"{point.memory_gib:g}",
            *(f"{num_blocks:,}" for num_blocks in point.num_blocks.values()),
            *(f"{curve.hit_ratio(policy, place):.2%}" for policy in curve.hits),
            f"{max(hits[place].num_unserved for hits in curve.hits.values()):,}",
        )
        for place, point in enumerate(curve.points)
    ]
    print_numbers("Hit ratio by token", ("GiB", *curve.points[0].num_blocks, *curve.hits, "not served"), rows)
    sizes = [f"{point.memory_gib:g} GiB" for point in curve.points]
    _print_parts(curve, range(len(curve.points)), sizes, "token")
