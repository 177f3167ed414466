"""Options of several commands, groups of them as one parameter, and values in the user's notation.

A command takes shared options as a value of the dataclass that declares them::

    @command
    def report(sources: ..., *, output: ..., serving: ServingOptions) -> None: ...

typer sees the fields in place of that parameter, including those of nested classes.

All sizes follow one rule: a unit is written (16GiB, 500MB), and a number alone is GiB; 0 is no size, or no tier where
one may be left out. Where GiB would be absurd (a body of a request, bytes a second) a number alone is refused. Shares
are written with %.
"""

import ipaddress
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeAlias, cast, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from pagedkv.cli.user_errors import reported
from pagedkv.contract.space_config import EVICTION_POLICIES, SpaceConfig
from pagedkv.errors import ConfigurationError
from pagedkv.listening import bound
from pagedkv.models.memory import GIB
from pagedkv.models.presets import model_names
from pagedkv.tiers import parse_nbytes

DEFAULT_NUM_TOKENS: Final = 2**22
"""4.2 million tokens, about what eight H200 have room for with the model below."""
DEFAULT_COST_MODEL: Final = "qwen3-32b/8xh200"
MOST_JOBS: Final = 1024
LOG: Final = (
    "Log or trace, plain or gzip: of an engine, a gateway, Bedrock; a file or a folder of Claude Code's or Codex's "
    "sessions, or of Weka's traces."
)
LOGS: Final = f"{LOG} Several are one, a tenant each."
MEMORY: Final = "Memory"
SCHEDULING: Final = "Scheduling"
TRACE: Final = "Trace"


def option(
    metavar: str, told: str, *names: str, panel: str | None = None, complete: Callable[[], Iterable[str]] | None = None
) -> Any:  # noqa: ANN401 - typer's
    """Declare an option with a value.

    Args:
        metavar: the value in help.
        told: the help.
        names: as typed; without them the parameter's own.
        panel: its heading in help; None: that of its group, if there is one.
        complete: gives the values that a shell completes.
    """
    completion = None if complete is None else _completed_by(complete)
    return typer.Option(*names, metavar=metavar, help=told, rich_help_panel=panel, autocompletion=completion)


def flag(told: str, *names: str, panel: str | None = None) -> Any:  # noqa: ANN401 - as above
    """Declare an option without a value; it has no negative form."""
    return typer.Option(*names, help=told, rich_help_panel=panel)


def _completed_by(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _gpu_names() -> Iterable[str]:
    from pagedkv.simulation.cost import gpu_names  # noqa: PLC0415 - commands without a GPU need no simulation

    return gpu_names()


def _cost_model_names() -> Iterable[str]:
    from pagedkv.simulation.cost import cost_model_names  # noqa: PLC0415 - as above

    return cost_model_names()


NumBlocks: TypeAlias = Annotated[
    str | None,
    option(
        "N",
        "Blocks of each pool, one of them the null block, which holds nothing; or pool by pool: "
        f"full=1000,window_1024=200. Default: what --memory or --gpu leave, or {DEFAULT_NUM_TOKENS:,} tokens.",
        panel=MEMORY,
    ),
]
BlockSize: TypeAlias = Annotated[int, option("B", "Tokens a block.", panel=MEMORY)]
KvDtype: TypeAlias = Annotated[str | None, option("TYPE", "Type of keys and values: fp8, bfloat16, ...", panel=MEMORY)]
HostBlocks: TypeAlias = Annotated[int, option("N", "Blocks of each host pool, for --preemption swap.", panel=MEMORY)]
ModelName: TypeAlias = Annotated[
    str | None,
    option(
        "MODEL",
        "Preset (see pagedkv presets) or config.json: its groups of layers get pools, and blocks become GiB.",
        panel=MEMORY,
        complete=model_names,
    ),
]
GpuName: TypeAlias = Annotated[
    str | None,
    option(
        "[Nx]GPU",
        "GPUs of the model (h100, 8xh100), which determine the blocks that fit and the cost of steps.",
        panel=MEMORY,
        complete=_gpu_names,
    ),
]
MemorySize: TypeAlias = Annotated[str | None, option("SIZE", "Memory for the model's KV cache: 16GiB.", panel=MEMORY)]
MaxLength: TypeAlias = Annotated[
    int | None,
    option(
        "N",
        "Tokens of the largest contiguous reservation. Default: the model's context, or the longest request.",
        panel=MEMORY,
    ),
]
CostModelName: TypeAlias = Annotated[
    str | None,
    option(
        "NAME|FILE",
        "Seconds of a step: a preset such as llama-3.1-8b/h100, instant, or a JSON file. "
        f"Default: by --model and --gpu, else {DEFAULT_COST_MODEL}.",
        panel=SCHEDULING,
        complete=_cost_model_names,
    ),
]
MaxSequences: TypeAlias = Annotated[int, option("N", "Sequences that run at once.", panel=SCHEDULING)]
MaxBatchedTokens: TypeAlias = Annotated[int, option("N", "Tokens that a step computes.", panel=SCHEDULING)]
Watermark: TypeAlias = Annotated[str, option("N%", "Share of a pool that admissions leave free.", panel=SCHEDULING)]
TailTokens: TypeAlias = Annotated[
    int,
    option("N", "With --eviction tlru, the last tokens of each sequence, which are evicted first.", panel=SCHEDULING),
]
EvictionName: TypeAlias = Annotated[
    str,
    option(
        "NAME",
        f"Eviction policy: {', '.join(EVICTION_POLICIES)}.",
        panel=SCHEDULING,
        complete=lambda: EVICTION_POLICIES,
    ),
]
PreemptionName: TypeAlias = Annotated[str, option("KIND", "recompute, or swap (--host-blocks).", panel=SCHEDULING)]
Overlap: TypeAlias = Annotated[bool, flag("Schedule each step while the one before it runs.", panel=SCHEDULING)]
Samples: TypeAlias = Annotated[
    int | None, option("N", "Samples of every request, instead of the trace's.", panel=SCHEDULING)
]
Beams: TypeAlias = Annotated[int | None, option("N", "Beams of every request, instead of samples.", panel=SCHEDULING)]
Load: TypeAlias = Annotated[
    float, option("X", "Times the recorded traffic: requests arrive X times as fast.", panel=TRACE)
]
OpenLoop: TypeAlias = Annotated[
    bool, flag("Keep the recorded times of agents' sessions; else their turns wait for answers.", "--open", panel=TRACE)
]
Seed: TypeAlias = Annotated[int, option("N", "Seed of all random values.", panel=SCHEDULING)]
SessionInterval: TypeAlias = Annotated[
    float,
    option("S", "Seconds between session starts, in a trace with a session a line.", "--session-interval", panel=TRACE),
]
SessionIntervalOrNone: TypeAlias = Annotated[
    float | None,
    option(
        "S",
        "Seconds between session starts, in a trace with a session a line. Default: one after the other.",
        "--session-interval",
        panel=TRACE,
    ),
]
MaxGap: TypeAlias = Annotated[
    float | None, option("S", "Cut longer gaps within a session to this.", "--max-gap", panel=TRACE)
]
TraceBlockSize: TypeAlias = Annotated[
    int | None, option("B", "Tokens of a block id, instead of the trace's own.", panel=TRACE)
]
Limit: TypeAlias = Annotated[int | None, option("N", "Only the first N requests.", panel=TRACE)]
WindowName: TypeAlias = Annotated[
    str | None,
    option(
        "LENGTH|TIMES",
        "Give figures by windows of recorded time, too: 1h, 15m, or times of day, 09:00-18:00.",
        panel=TRACE,
    ),
]
UtcOffset: TypeAlias = Annotated[float, option("H", "Hours that --window's clock is ahead of UTC.", panel=TRACE)]
Isolates: TypeAlias = Annotated[
    bool, flag("No tenant hits another's blocks, as with a salt for each tenant.", "--isolate", panel=TRACE)
]
Sort: TypeAlias = Annotated[bool, flag("Put the requests in order of arrival.", panel=TRACE)]
JsonFile: TypeAlias = Annotated[
    Path | None, option("FILE", "Also write the result as JSON; - prints only that.", "--json")
]
Jobs: TypeAlias = Annotated[int | None, option("N", "Points at once. Default: one for each core.", "-j", "--jobs")]


def num_jobs(requested: int | None) -> int:
    """Return the number of points to run at once: as requested, or one for each core. Raises ConfigurationError."""
    if requested is not None and not 1 <= requested <= MOST_JOBS:
        raise ConfigurationError(f"--jobs must be from 1 to {MOST_JOBS:,}, got {requested}")
    return requested or os.cpu_count() or 1


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command from a function: its groups of options become single options, and user errors are reported.

    Args:
        function: its parameters are arguments and options of typer, or dataclasses of them.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for parameter in signature(function).parameters.values():
        group = groups.get(parameter.name)
        parameters += [_declared(parameter, hints[parameter.name])] if group is None else _options(group)

    typed = {parameter.name: _typed(parameter) for parameter in parameters if _is_option(parameter)}

    @wraps(function)
    def run(**values: object) -> None:
        with reported(typed):
            gathered = {name: _gather(group, values) for name, group in groups.items()}
            function(**values, **gathered)

    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _is_option(parameter: Parameter) -> bool:
    return parameter.kind is Parameter.KEYWORD_ONLY


def _typed(parameter: Parameter) -> str:
    """Return the typed form of an option: from its declaration, else from its name."""
    declared = [
        name
        for metadata in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(metadata, OptionInfo)
        for name in (metadata.default, *(metadata.param_decls or ()))  # typer keeps the first one as its default
        if isinstance(name, str) and name.startswith("--")
    ]
    return declared[0] if declared else f"--{parameter.name.replace('_', '-')}"


def _options(group: Any) -> Iterator[Parameter]:  # noqa: ANN401 - a class; typeshed has no type of dataclasses
    """Yield the options of a group, and of the groups in it, in the order of its fields."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _options(hint)
        else:
            parameter = Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field))
            yield _declared(parameter, hint, getattr(group, "PANEL", None))


def _declared(parameter: Parameter, hint: Any, panel: str | None = None) -> Parameter:  # noqa: ANN401 - as above
    """Give an option its group's panel, and a flag its name, since typer would add a negative form."""
    kind, *infos = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    if not infos or not isinstance(infos[0], OptionInfo):
        return parameter.replace(annotation=hint)
    info = copy(infos[0])
    info.rich_help_panel = info.rich_help_panel or panel
    if kind is bool and info.default is ... and not info.param_decls:
        info.param_decls = (f"--{parameter.name.replace('_', '-')}",)
    return parameter.replace(annotation=cast("Any", Annotated)[kind, info])


def _default(field: "Field[Any]") -> object:
    return Parameter.empty if field.default is MISSING else field.default


def _gather(group: Any, values: dict[str, object]) -> object:  # noqa: ANN401 - as above
    """Make a group from the values of its options, which are removed from ``values``."""
    hints: Mapping[str, Any] = get_type_hints(group, include_extras=True)
    return group(
        **{
            field.name: _gather(hints[field.name], values)
            if is_dataclass(hints[field.name])
            else values.pop(field.name)
            for field in fields(group)
        }
    )


MOST_GIB: Final = 2**20
"""A million GiB: more than any machine has, and small enough for counters."""
SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%")
NO_UNIT: Final = re.compile(r"\s*[\d.]+\s*")
RECORD_NBYTES: Final = 100  # bookkeeping of a block without its tokens, rounded up
TOKEN_NBYTES: Final = 4
ENTRY_NBYTES: Final = 4


def parse_blocks(text: str) -> int | dict[str, int]:
    """Parse a number of blocks, or one for each pool.

    Raises:
        ConfigurationError: the text is neither, or a pool is named twice.

    >>> parse_blocks("1000"), parse_blocks("full=1000,window_1024=200")
    (1000, {'full': 1000, 'window_1024': 200})
    """
    try:
        if "=" not in text:
            return int(text)
        pairs = [(pool.strip(), int(count)) for pool, count in (part.split("=") for part in text.split(","))]
    except ValueError as error:
        raise ConfigurationError(
            f"--num-blocks must be a whole number, or one for each pool as in full=1000,window_1024=200; got {text!r}"
        ) from error
    if len(dict(pairs)) < len(pairs):
        raise ConfigurationError(f"--num-blocks names a pool twice: {text!r}")
    return dict(pairs)


def parse_size(text: str, option: str) -> int:
    """Parse bytes; 0: there is none.

    Raises:
        ConfigurationError: it is no size.

    >>> (
    ...     parse_size("64", "--host-memory") == parse_size("64GiB", "--host-memory") == 64 * 2**30,
    ...     parse_size("0", "--disk"),
    ... )
    (True, 0)
    """
    return 0 if text.strip() == "0" else parse_nbytes(text, option)


def parse_size_with_unit(text: str, option: str) -> int:
    """Parse bytes of a quantity that is never some GiB by default; a number alone is refused.

    Raises:
        ConfigurationError: it is no size, or has no unit.

    >>> parse_size_with_unit("32MiB", "--max-body")
    33554432
    """
    if NO_UNIT.fullmatch(text):
        raise ConfigurationError(f"{option} {text} has no unit: write {text}MB, {text}GB, or another unit of bytes")
    return parse_nbytes(text, option)


def parse_gib(text: str, option: str = "--memory") -> float:
    """Parse a size in GiB, over 0.

    Raises:
        ConfigurationError: it is no size, 0, or beyond a million GiB.

    >>> parse_gib("16"), parse_gib("512MiB")
    (16.0, 0.5)
    """
    gib = parse_size(text, option) / GIB
    if not 0 < gib <= MOST_GIB:
        raise ConfigurationError(f"{option} must be over 0 and at most {MOST_GIB:,} GiB, got {text.strip()}")
    return gib


def parse_gib_list(text: str, option: str = "--memory") -> list[float]:
    """Parse sizes in GiB separated by commas; return them ascending, without repetitions.

    Raises:
        ConfigurationError: one is no size, 0, or beyond a million GiB.

    >>> parse_gib_list("8, 512MiB, 8")
    [0.5, 8.0]
    """
    return sorted({parse_gib(each, option) for each in text.split(",")})


def parse_share(text: str, option: str) -> float:
    """Parse a share: with %, or 0.

    Raises:
        ConfigurationError: it is none.

    >>> parse_share("1%", "--watermark")
    0.01
    """
    found = SHARE.fullmatch(text.strip())
    share = 0.0 if text.strip() == "0" else 1.0 if found is None else float(found[1]) / 100
    if share >= 1:
        raise ConfigurationError(f"{option} must be a share below 100%, written with %, such as 1%; got {text!r:.60}")
    return share


def parse_gpu(text: str) -> tuple[int, str]:
    """Parse a number and a kind of GPU.

    >>> parse_gpu("8xh100"), parse_gpu("l4")
    ((8, 'h100'), (1, 'l4'))
    """
    number, cross, name = text.partition("x")
    return (int(number), name) if cross and number.isdecimal() else (1, text)


def require_memory(config: SpaceConfig) -> None:
    """Refuse a block space whose bookkeeping exceeds the memory of this machine.

    Raises:
        ConfigurationError: it exceeds the memory; the message has the numbers.
    """
    blocks = config.blocks_by_pool()
    block_size = max(group.block_size for group in config.groups)
    pools_nbytes = sum(blocks.values()) * (RECORD_NBYTES + TOKEN_NBYTES * block_size)
    widths = sum(-(-config.max_tokens // group.block_size) for group in config.groups)
    tables_nbytes = ENTRY_NBYTES * config.max_sequences * widths
    physical_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if pools_nbytes + tables_nbytes > physical_nbytes:
        raise ConfigurationError(
            f"the bookkeeping of {sum(blocks.values()):,} blocks takes up to {pools_nbytes / GIB:,.1f} GiB, the tables "
            f"of {config.max_sequences:,} sequences {tables_nbytes / GIB:,.1f} GiB, and this machine has "
            f"{physical_nbytes / GIB:,.1f} GiB: lower --num-blocks, --block-size or --max-sequences"
        )


def require_free(host: str, port: int, host_option: str = "--host", port_option: str = "--port") -> None:
    """Refuse an address at which a server cannot listen now; port 0 is any free one.

    Args:
        host, port: the address.
        host_option, port_option: the options that name them.

    Raises:
        ConfigurationError: the port is in use, or the machine has no such address.
    """
    for each in bound(host, port, host_option, port_option):
        each.close()


LARGEST_PORT: Final = 65_535
SLOWEST: Final = 1e-6
FASTEST: Final = 1e6
AS_FAST_AS_IT_CAN: Final = "max"


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """Whether and where a page shows the replay, as typed; ``pagedkv replay --help`` explains each.

    Raises:
        ConfigurationError: a value is out of range, or an option is given without ``inspect``.
    """

    PANEL: ClassVar = "Page"
    inspect: Annotated[bool, flag("Show blocks, requests and misses on a page as it runs.")] = False
    inspect_speed: Annotated[str, option("X", "Seconds of the trace in a second; max.")] = "1"
    inspect_host: Annotated[str, option("ADDRESS", "Address of the page; needs a key if others reach it.")] = (
        "127.0.0.1"
    )
    inspect_port: Annotated[int, option("N", "Port of the page; 0: a free one.")] = 8001
    inspect_keys: Annotated[Path | None, option("FILE", "API keys, as of serve. Default: a new one, if needed.")] = None

    def __post_init__(self) -> None:
        """Refuse values that are invalid for every trace."""
        if not self.inspect:
            for option in fields(self):
                if getattr(self, option.name) != option.default:
                    typed = f"--{option.name.replace('_', '-')}"
                    raise ConfigurationError(f"{typed} is an option of the page: give --inspect, too")
            return
        if not 0 <= self.inspect_port <= LARGEST_PORT:
            raise ConfigurationError(f"--inspect-port must be 0 to {LARGEST_PORT}, got {self.inspect_port}")
        _speed_of(self.inspect_speed)

    @property
    def speed(self) -> float | None:
        """Seconds of the trace for each second of this machine; None: as many as it can."""
        return _speed_of(self.inspect_speed)

    def require_free(self) -> None:
        """Refuse an address at which the page cannot be served now. Raises ConfigurationError."""
        require_free(self.inspect_host, self.inspect_port, "--inspect-host", "--inspect-port")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at an address; False for names other than localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _speed_of(typed: str) -> float | None:
    """Read a speed. Raises ConfigurationError."""
    if typed == AS_FAST_AS_IT_CAN:
        return None
    try:
        speed = float(typed)
    except ValueError:
        speed = math.nan
    if not SLOWEST <= speed <= FASTEST:
        raise ConfigurationError(
            f"--inspect-speed must be {SLOWEST} to {FASTEST:,.0f} seconds of the trace in a second, or "
            f"{AS_FAST_AS_IT_CAN}, got {typed}"
        )
    return speed
