"""The compared values of a plan: lists as typed, the settings made of them, and the cost of their tokens.

Each setting has the names of its values. The other values of each axis are compared with its first. If a single number
of GPUs or GiB is given, half and twice as many are tried as well, if the weights and a prompt fit. With replicas, each
has exactly the given number.

The user types the prices, in any currency; no prices are downloaded. The cost is the number of a setting's GPUs times
the price of one for an hour, divided by the tokens of good answers that it sustains in an hour. Without a sustained
load there is no cost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, ClassVar, Final, TypeVar, cast

from pagedkv.cli import options as opt
from pagedkv.cli.options import flag, option, parse_gib, parse_gpu, parse_size
from pagedkv.cli.progress import named_model
from pagedkv.cli.serving import ServingOptions, TierOptions, TierRates, origin_of
from pagedkv.cli.trace_options import SeveralTimedTracesOptions, TraceSources
from pagedkv.contract.space_config import GIB
from pagedkv.contract.spec import keeps_whole_prefix
from pagedkv.errors import ConfigurationError
from pagedkv.models import ModelMemory, model_names
from pagedkv.planner.recording.engine_pool import read_engine
from pagedkv.planner.results import Result
from pagedkv.routing import ROUTINGS, Routing
from pagedkv.routing.residency import MOST_REPLICAS
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.closed_loop import ClosedLoop
from pagedkv.simulation.cluster import ClusterSetting
from pagedkv.simulation.cost import CostOrigin, Gpu, find_gpu, kv_budget_nbytes
from pagedkv.simulation.planning import Bounds, PlanPoint, Steadiness
from pagedkv.simulation.planning.decision import GPU_AXIS, REPLICAS_AXIS
from pagedkv.simulation.planning.searching import HIGHEST_LOAD

BY_NEED: Final = "need"
_T = TypeVar("_T")


class _OutOfRangeError(ValueError):
    """A value that is a number out of range."""


def listed(option: str, text: str, read: Callable[[str], _T]) -> list[_T]:
    """Parse a list of an option. Raises ConfigurationError."""
    parts = [part.strip() for part in text.split(",")]
    try:
        values = [read(part) for part in parts if part]
    except ConfigurationError:
        raise  # a ValueError, too
    except _OutOfRangeError as error:
        raise ConfigurationError(f"{option}: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{option} must be a list of values such as 16,64, got {text!r:.60}") from error
    if not values or len(values) < len(parts) or len(set(values)) < len(values):
        raise ConfigurationError(f"{option} must be a list of different values, got {text!r:.60}")
    return values


def as_gib(text: str) -> float:
    """Parse a size of memory, in GiB. Raises ConfigurationError."""
    return parse_gib(text)


def as_positive(text: str) -> float:
    """Parse a number over 0. Raises ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise _OutOfRangeError(f"each must be over 0 and finite, got {text:.60}")
    return value


def as_load(text: str) -> float:
    """Parse a multiple of the recorded traffic. Raises ValueError."""
    value = float(text)
    if value == 0:
        raise _OutOfRangeError(
            "at 0 times the recorded traffic no request ever arrives: give 1 for the traffic as recorded, or leave "
            "--load out, and the highest load that holds is searched for"
        )
    if not 0 < value <= HIGHEST_LOAD:
        raise _OutOfRangeError(
            f"each must be over 0 and at most {HIGHEST_LOAD:,.0f} times the recorded traffic, got {text:.60}: above it "
            "the whole trace arrives at once, which shows how fast a queue drains, not a sustained load"
        )
    return value


def as_num_replicas(text: str) -> int:
    """Parse a number of replicas. Raises ValueError."""
    number = int(text)
    if not 1 <= number <= MOST_REPLICAS:
        raise _OutOfRangeError(f"each must be from 1 to {MOST_REPLICAS}, got {text:.60}")
    return number


def as_routing(text: str) -> str:
    """Parse the name of a routing. Raises ValueError."""
    if text not in ROUTINGS:
        raise _OutOfRangeError(f"each must be one of {', '.join(ROUTINGS)}, got {text!r:.60}")
    return text


def size_of(option: str) -> Callable[[str], str]:
    """Return a reader of sizes, which stay as typed."""

    def read(text: str) -> str:
        parse_size(text, option)
        return text

    return read


def as_split(text: str) -> str:
    """Parse a factor of the memory of full attention, or ``need``. Raises ValueError."""
    return text if text == BY_NEED else f"{as_positive(text):g}"


SECONDS_AN_HOUR: Final = 3600.0
MILLION: Final = 1e6
HIGHEST_PRICE: Final = 1e9


@dataclass(frozen=True, slots=True)
class TokenCost(Result):
    """The cost of a setting under the highest load that it holds.

    Args:
        an_hour: cost of all its GPUs.
        a_million_output_tokens: cost of tokens generated in good answers; None if there are none.
        a_million_tokens: cost of tokens, counting the prompts of good answers as well.
    """

    an_hour: float
    a_million_output_tokens: float | None
    a_million_tokens: float | None


def parse_prices(text: str) -> dict[str, float]:
    """Parse prices of GPUs for an hour.

    Raises:
        ConfigurationError: a price is invalid, or a GPU is unknown or named twice.

    >>> parse_prices("h100=2.5,H200=3")
    {'h100': 2.5, 'h200': 3.0}
    """
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (each.strip() for each in part.partition("="))
        price = _number(number)
        if not equals or price is None or not 0 < price <= HIGHEST_PRICE:
            raise ConfigurationError(
                f"--price must be the price of a GPU for an hour, as in h100=2.5,l4=0.7, got {part!r:.60}"
            )
        find_gpu(name)
        if name.lower() in prices:
            raise ConfigurationError(f"--price names {name} twice: {text!r:.60}")
        prices[name.lower()] = price
    return prices


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def token_cost(gpus: str, prices: Mapping[str, float], steady: Steadiness) -> TokenCost | None:
    """Compute the cost of tokens on some GPUs; None without a price for them.

    Args:
        gpus: as typed, ``8xh100``.
        prices: result of :func:`parse_prices`.
        steady: steadiness of a load that holds.
    """
    number, name = parse_gpu(gpus)
    price = prices.get(name.lower())
    if price is None:
        return None
    an_hour = number * price
    hours = steady.measured_s / SECONDS_AN_HOUR
    outputs = steady.num_good_output_tokens
    return TokenCost(
        an_hour,
        _a_million(an_hour * hours, outputs),
        _a_million(an_hour * hours, outputs + steady.num_good_prompt_tokens),
    )


def _a_million(cost: float, num_tokens: int) -> float | None:
    return cost / num_tokens * MILLION if num_tokens else None


AXES: Final = "Axes: lists; the other values are compared with the first"
ROUTING_AXIS: Final = "routing"
MOST_POINTS: Final = 1000
MOST_OF_MEMORY: Final = 0.98
GOALS: Final = "Goals"
BLOCK_SIZES: Final = "16,64"
SIZED_TIERS: Final = ("host memory", "disk")


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """A point with the names of its choices.

    Args:
        choices: by axis, as shown to users.
        load: multiple of the recorded traffic.
        point: its setting and load.
    """

    choices: Mapping[str, str]
    load: float
    point: PlanPoint


@dataclass(frozen=True, slots=True)
class PlanAxes:
    """The options of ``pagedkv plan`` for the compared values, as typed."""

    PANEL: ClassVar = AXES
    model: Annotated[str, option("MODEL", "Preset (see pagedkv presets) or config.json.", complete=model_names)] = ""
    engine: Annotated[
        str | None,
        option("URL", "A running vLLM or SGLang: its model, memory, block size and type, unless they are given."),
    ] = None
    gpus: Annotated[str | None, option("[Nx]GPU,...", "4xh100,8xh100: memory and seconds.", "--gpu")] = None
    memory: Annotated[str | None, option("SIZE,...", "Memory for the KV cache, instead of a GPU's.")] = None
    block_sizes: Annotated[str, option("B,...", "Tokens a block.", "--block-size")] = BLOCK_SIZES
    evictions: Annotated[str, option("NAME,...", "Eviction policies.", "--eviction")] = "lru,hazard"
    tail_tokens: opt.TailTokens = 2048
    splits: Annotated[
        str,
        option(
            "X,...", f"For models with several pools: {BY_NEED}, or the memory of full attention times X.", "--split"
        ),
    ] = BY_NEED
    max_sequences: Annotated[str, option("N,...", "Sequences that run at once.")] = "256"
    max_batched_tokens: Annotated[str, option("N,...", "Tokens that a step computes.")] = "8192"
    host_memory: Annotated[str | None, option("SIZE,...", "Host memory that keeps cached blocks: 0,64GiB.")] = None
    disk: Annotated[str | None, option("SIZE,...", "Disk that keeps cached blocks: 0,1TB.")] = None
    admissions: Annotated[
        str | None, option("RULE,...", "Of these: always,second-offer,before-eviction.", "--admission")
    ] = None
    replicas: Annotated[str | None, option("N,...", "Replicas behind a router, each with this memory.")] = None
    routings: Annotated[
        str | None,
        option(
            "NAME,...",
            f"With --replicas, how requests are routed: {', '.join(ROUTINGS)}. Default: prefix.",
            "--routing",
        ),
    ] = None
    loads: Annotated[
        str | None,
        option(
            "X,...",
            "Times the recorded traffic. Default: the highest that holds is searched for, setting by setting.",
            "--load",
        ),
    ] = None
    ttft_s: Annotated[
        float | None, option("S", "Most seconds to a good answer's first token.", "--ttft", panel=GOALS)
    ] = None
    tpot_s: Annotated[
        float | None, option("S", "Most seconds a further token of a good answer.", "--tpot", panel=GOALS)
    ] = None
    price: Annotated[
        str | None, option("GPU=X,...", "Price of a GPU for an hour, for the cost of tokens.", panel=GOALS)
    ] = None
    closed_loop: Annotated[
        bool,
        flag(
            "A turn arrives a pause after the answers before it, not when recorded. Default for sessions of agents.",
            panel=GOALS,
        ),
    ] = False
    open_loop: opt.OpenLoop = False
    answer_speed: Annotated[
        float, option("X", "Tokens a second of recorded answers whose ends are not recorded.", panel=GOALS)
    ] = 50.0
    kv_dtype: opt.KvDtype = None
    cost_model: opt.CostModelName = None
    rates: TierRates = TierRates()  # noqa: RUF009 - a value: frozen
    trace: SeveralTimedTracesOptions = SeveralTimedTracesOptions()  # noqa: RUF009 - a value: frozen

    @property
    def bounds(self) -> Bounds:
        """The bounds of a good answer. Raises ConfigurationError."""
        return Bounds(self.ttft_s, self.tpot_s)

    @property
    def loop(self) -> ClosedLoop | None:
        """Think times of a closed loop; None: open loop. Raises ConfigurationError."""
        return ClosedLoop(self.answer_speed) if self.closed_loop else None

    @property
    def prices(self) -> dict[str, float]:
        """The price of a GPU for an hour. Raises ConfigurationError."""
        return {} if self.price is None else parse_prices(self.price)

    @property
    def is_searched(self) -> bool:
        """Whether the highest load that holds is searched for."""
        return self.loads is None

    @property
    def origin(self) -> CostOrigin:
        """The source of the seconds. Raises ConfigurationError."""
        return origin_of(self.cost_model)

    @property
    def is_cost_model_assumed(self) -> bool:
        """Whether no typed option determines the cost of steps."""
        return self.cost_model is None and self.gpus is None

    def with_engine(self) -> "PlanAxes":
        """Return these options with what a running engine tells of its cache, where they leave it open.

        Raises:
            ConfigurationError: its model is not known here, or has several pools, whose memory it does not tell; no
                model is given.
            RecordingError: the engine tells no cache.
        """
        if self.engine is None:
            if not self.model:
                raise ConfigurationError("name the model to plan for: --model, or the --engine that serves it")
            return self
        pool = read_engine(self.engine)
        name = self.model or pool.model
        kv_dtype = self.kv_dtype or pool.kv_dtype
        model = named_model(name, kv_dtype)
        memory = self.memory
        if memory is None and len(model.groups) > 1:
            raise ConfigurationError(
                f"{self.engine} has {pool.num_blocks:,} blocks for {len(model.groups)} kinds of layers of {name}, and "
                "does not tell their bytes: give --memory"
            )
        if memory is None:
            memory = f"{pool.num_tokens * model.token_nbytes / GIB:.15f}"
        block_sizes = str(pool.block_size) if self.block_sizes == BLOCK_SIZES else self.block_sizes
        return replace(self, model=name, memory=memory, block_sizes=block_sizes, kv_dtype=kv_dtype)

    def with_loop(self, traces: Sequence[str]) -> "PlanAxes":
        """Return these options with a closed loop where a trace is of agents, and nothing else is wanted.

        Raises:
            ConfigurationError: both loops are wanted.
            TraceError: the trace cannot be read.
        """
        if self.open_loop and self.closed_loop:
            raise ConfigurationError("--open keeps the recorded times, and --closed-loop does not: give one of them")
        if self.open_loop or self.closed_loop or self.replicas is not None:
            return self
        with TraceSources(traces, self.trace, self.trace.merging) as trace:
            return replace(self, closed_loop=trace.is_of_agents)

    def points(self, mean_tokens: float, longest: int, *, has_content: bool) -> list[PlannedPoint]:
        """Return all points, in the order of the axes; if loads are searched, those of the recorded traffic.

        Args:
            mean_tokens, longest: tokens of requests, by which memory is split among several pools.
            has_content: whether content is known; if not, all policies are equal, and only the first one is taken.

        Raises:
            ConfigurationError: a value is missing or out of range, or a setting contradicts itself.
        """
        axes = self._axes()
        self._require_prices(axes)
        if not has_content:
            axes["policy"] = axes["policy"][:1]
            if ROUTING_AXIS in axes:
                axes[ROUTING_AXIS] = axes[ROUTING_AXIS][:1]
        loads = [1.0] if self.loads is None else listed("--load", self.loads, as_load)
        num_points = len(loads)
        for axis in axes.values():
            num_points *= len(axis)
        if num_points > MOST_POINTS:
            raise ConfigurationError(f"{num_points:,} points are more than {MOST_POINTS:,}: give shorter lists")
        points = []
        for values in product(*axes.values()):
            setting = dict(zip(axes, values, strict=True))
            points += [self._point(setting, axes, load, mean_tokens, longest) for load in loads]
        bounds = self.bounds
        if bounds.are_given:
            fastest = min((each.point for each in points), key=lambda point: point.costs.step_s(1, 1, 1, 1))
            bounds.require_possible(str(fastest.config.cost_model_name), fastest.costs)
        return points

    def _require_prices(self, axes: Mapping[str, Sequence[object]]) -> None:
        tried = {parse_gpu(str(gpus))[1].lower() for gpus in axes.get(GPU_AXIS, [self.gpus] if self.gpus else [])}
        others = [name for name in self.prices if name not in tried]
        if others:
            named = f"on {', '.join(sorted(tried))}" if tried else "on no GPU that was named (--gpu)"
            raise ConfigurationError(f"--price names {others[0]}, and the plan is {named}: name a GPU of the plan")

    def _axes(self) -> dict[str, list[object]]:
        """Return the values of each axis, by its name."""
        axes: dict[str, list[object]] = {}
        if self.gpus is not None and (self.memory is None or "," in self.gpus):
            if self.memory is not None:
                raise ConfigurationError("--memory goes with one --gpu, whose seconds count: give one of the two lists")
            axes[GPU_AXIS] = list(self._gpus(self.gpus))
        elif self.memory is not None:
            memory = listed("--memory", self.memory, as_gib)
            axes["memory"] = list(memory if self.replicas is not None else _with_half_and_double(memory))
        else:
            raise ConfigurationError(
                "name the hardware to plan for: --gpu 8xh100, or --memory 40 (GiB for the KV cache)"
            )
        axes |= self._cluster_axes()
        axes["block size"] = list(listed("--block-size", self.block_sizes, int))
        axes["policy"] = list(listed("--eviction", self.evictions, str))
        axes["split"] = list(listed("--split", self.splits, as_split))
        axes["sequences"] = list(listed("--max-sequences", self.max_sequences, int))
        axes["tokens a step"] = list(listed("--max-batched-tokens", self.max_batched_tokens, int))
        if self.host_memory is not None:
            axes["host memory"] = list(listed("--host-memory", self.host_memory, size_of("--host-memory")))
        if self.disk is not None:
            axes["disk"] = list(listed("--disk", self.disk, size_of("--disk")))
        if self.admissions is not None:
            axes["admission"] = list(listed("--admission", self.admissions, str))
        return axes

    def _cluster_axes(self) -> dict[str, list[object]]:
        """Return the axes of a cluster, none without replicas."""
        if self.replicas is None:
            if self.routings is not None:
                raise ConfigurationError("--routing routes requests to replicas: give --replicas as well")
            return {}
        if self.closed_loop:
            raise ConfigurationError("--closed-loop has one server: leave it out, or --replicas")
        routings = listed("--routing", self.routings or ROUTINGS[0], as_routing)
        return {
            REPLICAS_AXIS: list(listed("--replicas", self.replicas, as_num_replicas)),
            ROUTING_AXIS: list(routings),
        }

    def _gpus(self, text: str) -> Iterator[str]:
        given = listed("--gpu", text, str)
        if len(given) > 1 or self.replicas is not None:
            yield from given
            return
        num_gpus, name = parse_gpu(given[0])
        yield given[0]
        model, gpu = named_model(self.model, self.kv_dtype), find_gpu(name)
        for number in (num_gpus // 2, 2 * num_gpus):
            if number and _fits(model, gpu, number):
                yield f"{number}x{name}" if number > 1 else name

    def _point(
        self, setting: Mapping[str, object], axes: Mapping[str, list[object]], load: float, mean: float, longest: int
    ) -> PlannedPoint:
        options = ServingOptions(
            model=self.model,
            gpu=str(setting[GPU_AXIS]) if GPU_AXIS in setting else self.gpus,
            memory=f"{setting['memory']:.15f}" if "memory" in setting else None,
            kv_dtype=self.kv_dtype,
            cost_model=self.cost_model,
            block_size=int(_as_number(setting["block size"])),
            eviction=str(setting["policy"]),
            tail_tokens=self.tail_tokens,
            max_sequences=int(_as_number(setting["sequences"])),
            max_batched_tokens=int(_as_number(setting["tokens a step"])),
            load=load,
            tier=TierOptions(
                host_memory=_text(setting.get("host memory")),
                disk=_text(setting.get("disk")),
                admission=_text(setting.get("admission")),
                rates=self.rates,
            ),
            trace=self.trace,
        )
        config, costs = options.configuration(mean, longest)
        config = _split_by(config, setting["split"])
        choices = {
            axis: _named(axis, value)
            for axis, value in setting.items()
            if len(axes[axis]) > 1 or axis in {GPU_AXIS, REPLICAS_AXIS, "memory"}
        }
        return PlannedPoint(choices, load, PlanPoint(config, costs, self.bounds, self.loop, _cluster_of(setting)))


def _cluster_of(setting: Mapping[str, object]) -> ClusterSetting | None:
    """Return the cluster of a setting; None: one server, which needs no router."""
    number = int(_as_number(setting.get(REPLICAS_AXIS, 1)))
    return ClusterSetting(number, cast("Routing", setting[ROUTING_AXIS])) if number > 1 else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _as_number(value: object) -> float:
    assert isinstance(value, int | float), "an axis of numbers"
    return value


def _with_half_and_double(values: list[float]) -> list[float]:
    return values if len(values) > 1 else [values[0], values[0] / 2, values[0] * 2]


def _fits(model: ModelMemory, gpu: Gpu, number: int) -> bool:
    try:
        return kv_budget_nbytes(model, gpu, number) > 0
    except ConfigurationError:
        return False


def _named(axis: str, value: object) -> str:
    """Return the name of a choice, clear without its axis."""
    if axis in SIZED_TIERS:
        return f"no {axis}" if value == "0" else f"{axis} {value}"
    match axis:
        case "gpu" | "policy" | "admission" | "routing":
            return str(value)
        case "memory":
            return f"{value:g} GiB"
        case "block size":
            return f"block {value}"
        case "split":
            return "split by need" if value == BY_NEED else f"full attention x{value}"
        case _:
            return f"{value:,} {axis.removesuffix('s') if value == 1 else axis}"


def _split_by(config: ServingConfig, split: object) -> ServingConfig:
    """Move memory between the pools of full attention and the others.

    Raises:
        ConfigurationError: the model has one pool, or a pool would have no block.
    """
    if split == BY_NEED:
        return config
    assert isinstance(config.num_blocks, Mapping), "a model has pools with names"
    full = {group.pool for group in config.group_specs if keeps_whole_prefix(group)}
    if len(config.num_blocks) < len({"full", "another"}) or not full:
        raise ConfigurationError(f"--split is for models with several pools, and {config.model} has one: leave it out")
    nbytes = {pool: count * config.block_nbytes[pool] for pool, count in config.num_blocks.items()}
    total, by_need = sum(nbytes.values()), sum(nbytes[pool] for pool in full)
    full_nbytes = min(float(str(split)) * by_need, MOST_OF_MEMORY * total)
    scales = {
        pool: full_nbytes / by_need if pool in full else (total - full_nbytes) / (total - by_need) for pool in nbytes
    }
    num_blocks = {pool: max(2, int(count * scales[pool])) for pool, count in config.num_blocks.items()}
    return replace(config, num_blocks=num_blocks)
