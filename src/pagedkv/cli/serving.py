"""Serves a trace on the virtual clock, for several commands: options, configuration, the loop over the requests.

The source of the seconds is worded equally in every command, and so are warnings about the figures, one sentence each:
in tables, page and JSON. Figures by tenant and by window of recorded time are the same for a replay and a plan.

The bar goes to stderr, and only if that is a terminal. It shows the share of the trace that has been read, in stored
bytes, and the virtual time.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Final, TypeAlias, cast

from pagedkv.cli import options as opt
from pagedkv.cli.options import (
    option,
    parse_blocks,
    parse_gib,
    parse_gpu,
    parse_share,
    parse_size,
    parse_size_with_unit,
    require_memory,
)
from pagedkv.cli.progress import named_model, prepare, progress_bars
from pagedkv.cli.trace_options import TimedTraceOptions, TraceSources
from pagedkv.cli.user_errors import as_typed
from pagedkv.contract.space_config import DEFAULT_EVICTION, blocks_that_fit
from pagedkv.errors import ConfigurationError, InterruptedRunError
from pagedkv.models import ModelMemory
from pagedkv.models.memory import GIB, block_nbytes_of, groups_of
from pagedkv.planner.traces.request import Request
from pagedkv.report.documents import Seconds
from pagedkv.report.figures import pool_balance
from pagedkv.scheduling import PreemptionKind
from pagedkv.simulation import ServingConfig, ServingResult, SimulatedTier, VirtualServer, compile_loops
from pagedkv.simulation.closed_loop import ClosedLoop, serve_closed
from pagedkv.simulation.cost import (
    DATA_SHEET,
    CostModel,
    CostOrigin,
    derive_cost_model,
    find_gpu,
    kv_budget_nbytes,
    read_cost_model,
    read_cost_origin,
)
from pagedkv.simulation.planning.figures import TENANT, WINDOW, Division, PartFigures, busiest_and_quietest
from pagedkv.simulation.tiers import DISK_BANDWIDTH, DISK_LATENCY_S, HOST_BANDWIDTH, HOST_LATENCY_S, MediumName
from pagedkv.tiers import Admission, LoadRule

TIERS: Final = "Tiers"
GB: Final = 10**9


@dataclass(frozen=True, slots=True)
class TierRates:
    """The options for the speed of tiers, and for the rule of loads, as typed."""

    PANEL: ClassVar = TIERS
    host_bandwidth: Annotated[
        str | None,
        option(
            "SIZE",
            f"Bytes a second to and from host memory. Default: {HOST_BANDWIDTH / GB:.0f}GB for each GPU of --gpu.",
        ),
    ] = None
    host_latency: Annotated[
        float | None, option("S", f"Seconds of each of its copies in addition. Default: {HOST_LATENCY_S:g}.")
    ] = None
    disk_bandwidth: Annotated[
        str | None, option("SIZE", f"Bytes a second to and from the disk. Default: {DISK_BANDWIDTH / GB:.0f}GB.")
    ] = None
    disk_latency: Annotated[
        float | None, option("S", f"Seconds of each of its accesses in addition. Default: {DISK_LATENCY_S:g}.")
    ] = None
    load_rule: Annotated[
        str | None,
        option("RULE", "if-faster: load where that is predicted to be faster than computing (default); always."),
    ] = None


NO_RATES: Final = TierRates()


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options, as typed."""

    PANEL: ClassVar = TIERS
    host_memory: Annotated[str | None, option("SIZE", "Host memory that keeps cached blocks: 64GiB; 0: none.")] = None
    disk: Annotated[str | None, option("SIZE", "Disk that keeps cached blocks: 1TB; 0: none.")] = None
    admission: Annotated[
        str | None,
        option(
            "RULE",
            "always: tiers store all computed blocks (default); second-offer: blocks that are offered twice; "
            "before-eviction: blocks that the device is about to evict.",
        ),
    ] = None
    rates: TierRates = NO_RATES

    def tiers(self, num_gpus: int = 1) -> tuple[SimulatedTier, ...]:
        """Return the tiers, host memory first; those of size 0 are left out.

        Args:
            num_gpus: GPUs, each with a bus of its own to host memory.

        Raises:
            ConfigurationError: a value is out of range, or belongs to a tier without a size.
        """
        pinned = (num_gpus * HOST_BANDWIDTH, HOST_LATENCY_S)
        host = self._tier("host", self.host_memory, self.rates.host_bandwidth, self.rates.host_latency, pinned)
        plain = (DISK_BANDWIDTH, DISK_LATENCY_S)
        disk = self._tier("disk", self.disk, self.rates.disk_bandwidth, self.rates.disk_latency, plain)
        if self.host_memory is None and self.disk is None and (self.admission or self.rates.load_rule):
            raise ConfigurationError("--admission and --load-rule are for tiers: give --host-memory or --disk")
        return tuple(each for each in (host, disk) if each is not None and each.nbytes)

    def _tier(
        self,
        medium: MediumName,
        size: str | None,
        bandwidth: str | None,
        latency_s: float | None,
        defaults: tuple[float, float],
    ) -> SimulatedTier | None:
        option = {"host": "--host-memory", "disk": "--disk"}[medium]
        if size is None:
            if bandwidth is not None or latency_s is not None:
                raise ConfigurationError(
                    f"--{medium}-bandwidth and --{medium}-latency are those of a tier: give {option}"
                )
            return None
        return SimulatedTier(
            medium,
            parse_size(size, option),
            defaults[0] if bandwidth is None else float(parse_size_with_unit(bandwidth, f"--{medium}-bandwidth")),
            defaults[1] if latency_s is None else latency_s,
            admission=cast("Admission", self.admission or "always"),
            loads=cast("LoadRule", self.rates.load_rule or "if-faster"),
        )


def parts_as_dict(parts: Sequence[PartFigures]) -> dict[str, Any]:
    """Return parts for JSON, by kind, with the busiest and the quietest window; missing ones are left out."""
    by_kind = {
        f"by_{kind}": [part.as_dict() for part in parts if part.kind == kind]
        for kind in (TENANT, WINDOW)
        if any(part.kind == kind for part in parts)
    }
    extremes = busiest_and_quietest(parts)
    if extremes is None:
        return by_kind
    busiest, quietest = extremes
    return {**by_kind, "busiest_window": busiest.name, "quietest_window": quietest.name}


def shared_name(name: str) -> str:
    """Return a cost model's name without the user's folders; names of presets are unchanged.

    >>> shared_name("/home/me/cost.json"), shared_name("llama-3.1-8b/8xh100")
    ('cost.json', 'llama-3.1-8b/8xh100')
    """
    return PurePath(name).name if name.startswith(("/", "./", "../", "~")) or name.endswith(".json") else name


def origin_of(cost_model: str | None) -> CostOrigin:
    """Return the source of the seconds: that of ``--cost-model``; without that option, the GPU's data sheet.

    Raises:
        ConfigurationError: there is no such name or file, or its calibration cannot be read.
    """
    return CostOrigin(DATA_SHEET) if cost_model is None else read_cost_origin(cost_model)


@dataclass(frozen=True, slots=True)
class SecondsSource:
    """A cost model as named beside figures.

    Args:
        name: as typed, or of a preset.
        origin: the source of its seconds.
        is_assumed: whether no option determines the cost of steps.
    """

    name: str
    origin: CostOrigin
    is_assumed: bool = False

    @property
    def in_short(self) -> str:
        """The name and the origin: "cost.json, calibrated, error 12.7%"; and whether it is assumed."""
        return f"{shared_name(self.name)}, {self._origin_in_short}"

    def as_dict(self) -> Seconds:
        """Return the source for JSON and pages, which users share: a file is named without its folders."""
        return {
            "cost_model_name": shared_name(self.name),
            "in_short": self._origin_in_short,
            "is_assumed": self.is_assumed,
            "kind": self.origin.kind,
            "num_steps": self.origin.num_steps,
            "median": self.origin.median,
            "p90": self.origin.p90,
        }

    @property
    def _origin_in_short(self) -> str:
        return f"{self.origin.in_short}, assumed" if self.is_assumed else self.origin.in_short

    def warnings(self, remedy: str, model: str | None = None) -> Iterator[str]:
        """List the assumptions behind these seconds, one sentence each.

        Args:
            remedy: options that describe the hardware of a run.
            model: the served model, if it is known.
        """
        name = shared_name(self.name)
        others = model is not None and "/" in name and name.partition("/")[0].lower() != model.lower()
        if self.is_assumed:
            difference = f", not of {model}" if others else ""
            yield f"the seconds are those of {name}{difference}, since the hardware is not given: name it by {remedy}"
        elif others:
            yield f"the seconds are those of {name}, the memory is that of {model}"
        yield f"the seconds are those of {name}, {self.origin.sentence}"


def warnings_of(result: ServingResult, seconds: SecondsSource) -> list[str]:
    """List warnings about the assumptions of a result.

    Args:
        result: the figures.
        seconds: their source.
    """
    return [*_seconds(result, seconds), *_content(result), *_rejected(result), *_pools(result)]


def _seconds(result: ServingResult, seconds: SecondsSource) -> Iterator[str]:
    model = result.config["model"]
    remedy = f"{'--model and --gpu' if model is None else '--gpu'} or --cost-model"
    return seconds.warnings(remedy, model)


def _content(result: ServingResult) -> Iterator[str]:
    num_requests, num_known = result.requests["num_requests"], result.requests["num_with_content"]
    if num_requests and not num_known:
        yield "the trace has lengths but no content: hits are unknown, and no blocks are shared"
    elif num_known < num_requests:
        num_unknown = num_requests - num_known
        yield f"the content of {num_unknown:,} of {num_requests:,} requests is unknown: they count as sharing nothing"


def _rejected(result: ServingResult) -> Iterator[str]:
    num_requests, num_rejected = result.requests["num_requests"], result.requests["num_rejected"]
    if num_rejected:
        yield (
            f"{num_rejected:,} of {num_requests:,} requests ({num_rejected / num_requests:.1%}) were rejected, being "
            "too large for the pools: no figure counts them"
        )


def _pools(result: ServingResult) -> Iterator[str]:
    balance = as_typed(pool_balance(result.pools))
    if balance:
        yield f"{balance[0].lower()}{balance[1:]}"


TYPICAL_TOKENS: Final = 2048
"""Tokens of a request, if memory is split among pools before any request is known."""
NUM_SAMPLED: Final = 1000
MOST_SAMPLED_TOKENS: Final = 2**24
"""Tokens of the first requests, by which memory is split among pools; limited, since they wait in memory."""
Follow: TypeAlias = Callable[[VirtualServer, Request], None]
"""Begins to follow a server, whose first request is given."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The options of the commands that serve a trace, as typed; ``pagedkv replay --help`` explains each."""

    num_blocks: opt.NumBlocks = None
    block_size: opt.BlockSize = 16
    model: opt.ModelName = None
    gpu: opt.GpuName = None
    memory: opt.MemorySize = None
    kv_dtype: opt.KvDtype = None
    host_blocks: opt.HostBlocks = 0
    cost_model: opt.CostModelName = None
    max_sequences: opt.MaxSequences = 256
    max_batched_tokens: opt.MaxBatchedTokens = 8192
    watermark: opt.Watermark = "1%"
    eviction: opt.EvictionName = DEFAULT_EVICTION
    tail_tokens: opt.TailTokens = 2048
    preemption: opt.PreemptionName = "recompute"
    overlap: opt.Overlap = False
    samples: opt.Samples = None
    beams: opt.Beams = None
    max_length: opt.MaxLength = None
    load: opt.Load = 1.0
    open_loop: opt.OpenLoop = False
    seed: opt.Seed = 0
    tier: TierOptions = TierOptions()
    trace: TimedTraceOptions = TimedTraceOptions()  # noqa: RUF009 - a value: frozen

    def configuration(self, mean_tokens: float = TYPICAL_TOKENS, longest: int = 0) -> tuple[ServingConfig, CostModel]:
        """Read and check everything that the options name.

        Args:
            mean_tokens: mean tokens of a request, by which memory is split among several pools.
            longest: tokens of the longest known prompt, which is admitted as a whole.

        Raises:
            ConfigurationError: an option is out of range, contradicts another one, or has an unknown name.
        """
        model = None if self.model is None else named_model(self.model, self.kv_dtype)
        if model is None and (self.gpu or self.memory is not None or self.kv_dtype):
            raise ConfigurationError("--gpu, --memory and --kv-dtype need a model: give --model")
        block_nbytes = {} if model is None else block_nbytes_of(model, self.block_size)
        cost_model_name, cost_model = self._cost_model(model)
        config = ServingConfig(
            num_blocks=self._num_blocks(model, block_nbytes, mean_tokens, longest),
            block_size=self.block_size,
            groups=None if model is None else groups_of(model, self.block_size),
            block_nbytes=block_nbytes,
            model=None if model is None else model.name,
            cost_model_name=cost_model_name,
            num_host_blocks=self.host_blocks,
            max_sequences=self.max_sequences,
            max_batched_tokens=self.max_batched_tokens,
            watermark=parse_share(self.watermark, "--watermark"),
            eviction=self.eviction,
            tail_tokens=self.tail_tokens,
            preemption=cast("PreemptionKind", self.preemption),
            overlap=self.overlap,
            num_samples=self.samples,
            beam_width=self.beams,
            load=self.load,
            seed=self.seed,
            max_length=self.max_length if self.max_length or model is None else model.max_context,
            tiers=self.tier.tiers(1 if self.gpu is None else parse_gpu(self.gpu)[0]),
        )
        if self.host_blocks and self.preemption != "swap":
            raise ConfigurationError(
                f"--host-blocks {self.host_blocks} is for --preemption swap: give both, or neither"
            )
        require_memory(config.space_config())
        return config, cost_model

    @property
    def is_cost_model_assumed(self) -> bool:
        """Whether no typed option determines the cost of steps."""
        return self.cost_model is None and (self.model is None or self.gpu is None)

    def seconds_of(self, config: ServingConfig) -> SecondsSource:
        """Return the source of the seconds of a run with these options. Raises ConfigurationError."""
        name = str(config.cost_model_name)
        return SecondsSource(name, origin_of(self.cost_model), self.is_cost_model_assumed)

    def _num_blocks(
        self, model: ModelMemory | None, block_nbytes: Mapping[str, int], mean_tokens: float, longest: int
    ) -> int | dict[str, int]:
        if self.num_blocks is not None:
            if self.memory is not None:
                raise ConfigurationError("--memory and --num-blocks both set the number of blocks: give one of them")
            return parse_blocks(self.num_blocks)
        if model is not None and self.memory is not None:
            return self._split(model, block_nbytes, parse_gib(self.memory) * GIB, mean_tokens, longest)
        if model is not None and self.gpu is not None:
            num_gpus, name = parse_gpu(self.gpu)
            nbytes = kv_budget_nbytes(model, find_gpu(name), num_gpus)
            return self._split(model, block_nbytes, nbytes, mean_tokens, longest)
        return default_num_blocks(self.block_size)

    def _split(
        self, model: ModelMemory, block_nbytes: Mapping[str, int], nbytes: float, mean_tokens: float, longest: int
    ) -> dict[str, int]:
        groups = groups_of(model, self.block_size)
        return blocks_that_fit(groups, block_nbytes, nbytes, mean_tokens, max(1, self.max_batched_tokens, longest))

    def _cost_model(self, model: ModelMemory | None) -> tuple[str, CostModel]:
        if self.cost_model is not None:
            return self.cost_model, read_cost_model(self.cost_model)
        if model is not None and self.gpu is not None:
            num_gpus, name = parse_gpu(self.gpu)
            return f"{model.name}/{self.gpu.lower()}", derive_cost_model(model, find_gpu(name), num_gpus)
        return opt.DEFAULT_COST_MODEL, read_cost_model(opt.DEFAULT_COST_MODEL)


DEFAULTS: Final = ServingOptions()


def default_num_blocks(block_size: int) -> int:
    """Return the number of blocks for the default number of tokens."""
    return opt.DEFAULT_NUM_TOKENS // max(1, block_size)


CLOSED_LOOP: Final = "closed loop: each turn of an agent a recorded pause after the answers for which it waits"


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """The result of a run, and the seconds that it took on this machine.

    Args:
        result: the figures.
        seconds: the source of their seconds.
        warnings: warnings about the figures, one sentence each.
        read_as: the recognised format; empty for generated requests.
        wall_s: seconds of this machine, including reading the trace.
        parts: the same by tenant and by window of recorded time, if there are any.
        is_closed: whether turns waited for the answers before them.
    """

    result: ServingResult
    seconds: SecondsSource
    warnings: list[str]
    wall_s: float
    read_as: str = ""
    parts: tuple[PartFigures, ...] = ()
    is_closed: bool = False

    def as_dict(self) -> dict[str, object]:
        """Return for JSON all values that are equal on every run."""
        head = {"read_as": self.read_as, "warnings": self.warnings, "seconds": self.seconds.as_dict()}
        loop = {"arrivals": CLOSED_LOOP} if self.is_closed else {}
        return {**head, **loop, **self.result.as_dict(), **parts_as_dict(self.parts)}


def serve_trace(path: str, options: ServingOptions, follow: Follow | None = None) -> ServedTrace:
    """Serve a trace, selected by ``options.trace``.

    Args:
        path: the trace.
        options: how it is served.
        follow: called with the server and the first request before that is served; None: nothing follows the replay.

    Raises:
        ConfigurationError: an option is out of range.
        ConfigurationError: no request fits the pools.
        TraceError: the trace cannot be read.
        InterruptedRunError: Ctrl-C.
    """
    config, cost_model = options.configuration()
    with TraceSources([path], options.trace) as trace:
        requests = trace.requests()
        first = next(requests)  # already in memory
        requests = chain([first], requests)
        is_divided = options.trace.windows is not None or first.tenant is not None or options.trace.names_tenants
        prepare(lambda: compile_loops(config.eviction))
        with progress_bars() as progress:
            task = progress.add_task(PurePath(path).name, total=trace.num_bytes, so_far="")
            if len(config.group_specs) > 1:
                sample = sample_of(requests)
                config, cost_model = options.configuration(
                    mean_tokens(sample), max((each.input_length for each in sample), default=0)
                )
                requests = chain(sample, requests)
            is_closed = trace.is_of_agents and not options.open_loop
            server = VirtualServer(config, cost_model, is_divided=is_divided, is_closed=is_closed)
            if follow is not None:
                follow(server, first)
            served = _serve(
                requests,
                server,
                lambda so_far: progress.update(task, completed=trace.num_bytes_read, so_far=so_far),
                seconds=options.seconds_of(config),
                closed_load=options.load if is_closed else None,
            )
            parts = server.parts(Division(options.trace.windows, lambda: trace.origin_s))
            warnings = [*trace.notes, *served.warnings]
            return replace(served, read_as=trace.recognised, warnings=warnings, parts=parts, is_closed=is_closed)


def sample_of(requests: Iterator[Request]) -> list[Request]:
    """Take the first requests, up to the number that may wait in memory."""
    sample: list[Request] = []
    num_tokens = 0
    for request in islice(requests, NUM_SAMPLED):
        sample.append(request)
        num_tokens += request.input_length
        if num_tokens > MOST_SAMPLED_TOKENS:
            break
    return sample


def mean_tokens(sample: Sequence[Request]) -> float:
    """Return the mean tokens of a request, prompt and output."""
    return sum(request.input_length + request.output_length for request in sample) / max(1, len(sample))


def _serve(
    requests: Iterable[Request],
    server: VirtualServer,
    show: Callable[[str], None],
    *,
    seconds: SecondsSource,
    closed_load: float | None,
) -> ServedTrace:
    """Serve requests in open loop, or in closed loop with the given load."""
    started_s = time.perf_counter()

    def show_arrival() -> None:
        show(f"{server.num_requests:,} requests, {server.now_s:,.0f} s")

    try:
        if closed_load is None:
            for request in requests:
                server.offer(request)
                show_arrival()
        else:
            serve_closed(server, server.take_ended, requests, loop=ClosedLoop(), load=closed_load, show=show_arrival)
        show(f"{server.num_requests:,} requests, finishing")
        server.finish()
    except KeyboardInterrupt as error:
        message = f"interrupted after {server.num_requests:,} requests, at {server.now_s:,.1f} s; nothing was written"
        raise InterruptedRunError(message) from error
    result = server.result()
    require_some_served(result.requests["num_requests"], result.requests["num_rejected"], _largest_pool(result))
    return ServedTrace(result, seconds, warnings_of(result, seconds), time.perf_counter() - started_s)


def require_some_served(num_requests: int, num_rejected: int, num_blocks: int) -> None:
    """Refuse a run that served no request, since all its figures would be 0.

    Raises:
        ConfigurationError: no request was served; the message has the numbers.
    """
    if num_requests and num_requests == num_rejected:
        raise ConfigurationError(
            f"not one of {num_requests:,} requests fits the pools, the largest of which has {num_blocks:,} blocks: all "
            "were rejected. Give more memory (--num-blocks, --memory, --gpu), or more sequences where requests have "
            "many samples (--max-sequences)"
        )


def _largest_pool(result: ServingResult) -> int:
    return max(int(pool["num_blocks"]) for pool in result.pools.values())
