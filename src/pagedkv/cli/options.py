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
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, get_type_hints

import typer

from pagedkv.cli.user_errors import reported
from pagedkv.contract.space_config import EVICTION_POLICIES, SpaceConfig
from pagedkv.errors import ConfigurationError
from pagedkv.models.memory import GIB
from pagedkv.models.presets import model_names
from pagedkv.tiers import parse_nbytes

__all__ = [
    "DEFAULT_COST_MODEL",
    "DEFAULT_NUM_TOKENS",
    "MEMORY",
    "MEMORY_OPTIONS",
    "SCHEDULING",
    "TRACE",
    "Beams",
    "BlockSize",
    "CostModelName",
    "EvictionName",
    "GpuName",
    "HostBlocks",
    "InspectOptions",
    "Isolates",
    "Jobs",
    "JsonFile",
    "KvDtype",
    "Limit",
    "Load",
    "MaxBatchedTokens",
    "MaxGap",
    "MaxLength",
    "MaxSequences",
    "MemorySize",
    "ModelName",
    "NumBlocks",
    "PreemptionName",
    "Samples",
    "Seed",
    "SessionInterval",
    "SessionIntervalOrNone",
    "Sort",
    "TraceBlockSize",
    "UtcOffset",
    "Watermark",
    "WindowName",
    "command",
    "completed_by",
    "is_loopback",
    "num_jobs",
    "parse_blocks",
    "parse_gib",
    "parse_gib_list",
    "parse_gpu",
    "parse_share",
    "parse_size",
    "parse_size_with_unit",
    "require_free",
    "require_memory",
]
DEFAULT_NUM_TOKENS: Final = 2**22
"""4.2 million tokens, about what eight H200 have room for with the model below."""
DEFAULT_COST_MODEL: Final = "qwen3-32b/8xh200"
MOST_JOBS: Final = 1024
MEMORY: Final = "Memory"
SCHEDULING: Final = "Scheduling"
TRACE: Final = "Trace"


def completed_by(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Make a shell completion: it returns the names that begin with a typed word."""

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
    typer.Option(
        metavar="N",
        help="Blocks of each pool, one of them the null block, which holds nothing; or pool by pool: "
        f"full=1000,window_1024=200. Default: what --memory or --gpu leave, or {DEFAULT_NUM_TOKENS:,} tokens.",
        rich_help_panel=MEMORY,
    ),
]
BlockSize: TypeAlias = Annotated[int, typer.Option(metavar="B", help="Tokens a block.", rich_help_panel=MEMORY)]
KvDtype: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Type of keys and values: fp8, bf16, ...", rich_help_panel=MEMORY)
]
HostBlocks: TypeAlias = Annotated[
    int, typer.Option(metavar="N", help="Blocks of each host pool, for --preemption swap.", rich_help_panel=MEMORY)
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Preset (see pagedkv presets) or config.json: its groups of layers get pools, and blocks become GiB.",
        rich_help_panel=MEMORY,
        autocompletion=completed_by(model_names),
    ),
]
GpuName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="[Nx]GPU",
        help="GPUs of the model (h100, 8xh100), which determine the blocks that fit and the cost of steps.",
        rich_help_panel=MEMORY,
        autocompletion=completed_by(_gpu_names),
    ),
]
MemorySize: TypeAlias = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory for the model's KV cache: 16GiB.", rich_help_panel=MEMORY),
]
MaxLength: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens of the largest contiguous reservation. Default: the model's context, or the longest request.",
        rich_help_panel=MEMORY,
    ),
]
CostModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Seconds of a step: a preset such as llama-3.1-8b/h100, instant, or a JSON file. "
        f"Default: by --model and --gpu, else {DEFAULT_COST_MODEL}.",
        rich_help_panel=SCHEDULING,
        autocompletion=completed_by(_cost_model_names),
    ),
]
MaxSequences: TypeAlias = Annotated[
    int, typer.Option(metavar="N", help="Sequences that run at once.", rich_help_panel=SCHEDULING)
]
MaxBatchedTokens: TypeAlias = Annotated[
    int, typer.Option(metavar="N", help="Tokens that a step computes.", rich_help_panel=SCHEDULING)
]
Watermark: TypeAlias = Annotated[
    str, typer.Option(metavar="N%", help="Share of a pool that admissions leave free.", rich_help_panel=SCHEDULING)
]
EvictionName: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Eviction policy: {', '.join(EVICTION_POLICIES)}.",
        rich_help_panel=SCHEDULING,
        autocompletion=completed_by(lambda: EVICTION_POLICIES),
    ),
]
PreemptionName: TypeAlias = Annotated[
    str,
    typer.Option(
        "--preemption", metavar="KIND", help="recompute, or swap (--host-blocks).", rich_help_panel=SCHEDULING
    ),
]
Overlap: TypeAlias = Annotated[
    bool,
    typer.Option("--overlap", help="Schedule each step while the one before it runs.", rich_help_panel=SCHEDULING),
]
Samples: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", help="Samples of every request, instead of the trace's.", rich_help_panel=SCHEDULING),
]
Beams: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", help="Beams of every request, instead of samples.", rich_help_panel=SCHEDULING),
]
Load: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="X", help="Times the recorded traffic: requests arrive X times as fast.", rich_help_panel=TRACE
    ),
]
Seed: TypeAlias = Annotated[
    int, typer.Option(metavar="N", help="Seed of all random values.", rich_help_panel=SCHEDULING)
]
SessionInterval: TypeAlias = Annotated[
    float,
    typer.Option(
        "--session-interval",
        metavar="S",
        help="Seconds between session starts, in a trace with a session a line.",
        rich_help_panel=TRACE,
    ),
]
SessionIntervalOrNone: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--session-interval",
        metavar="S",
        help="Seconds between session starts, in a trace with a session a line. Default: one after the other.",
        rich_help_panel=TRACE,
    ),
]
MaxGap: TypeAlias = Annotated[
    float | None,
    typer.Option("--max-gap", metavar="S", help="Cut longer gaps within a session to this.", rich_help_panel=TRACE),
]
TraceBlockSize: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="B", help="Tokens of a block id, instead of the trace's own.", rich_help_panel=TRACE),
]
Limit: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", help="Only the first N requests.", rich_help_panel=TRACE)
]
WindowName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTH|TIMES",
        help="Give figures by windows of recorded time, too: 1h, 15m, or times of day, 09:00-18:00.",
        rich_help_panel=TRACE,
    ),
]
UtcOffset: TypeAlias = Annotated[
    float, typer.Option(metavar="H", help="Hours that --window's clock is ahead of UTC.", rich_help_panel=TRACE)
]
Isolates: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--isolate", help="No tenant hits another's blocks, as with a salt for each tenant.", rich_help_panel=TRACE
    ),
]
Sort: TypeAlias = Annotated[
    bool, typer.Option("--sort", help="Put the requests in order of arrival.", rich_help_panel=TRACE)
]
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - prints only that.")
]
Jobs: TypeAlias = Annotated[
    int | None, typer.Option("-j", "--jobs", metavar="N", help="Points at once. Default: one for each core.")
]


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
        known = parameter.replace(annotation=hints[parameter.name])
        parameters += [known] if group is None else _options(group)

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
        for name in getattr(metadata, "param_decls", None) or ()
        if name.startswith("--")
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
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field), annotation=hint)


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


MEMORY_OPTIONS: Final = "--memory"
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


def parse_gib(text: str, option: str = MEMORY_OPTIONS) -> float:
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


def parse_gib_list(text: str, option: str = MEMORY_OPTIONS) -> list[float]:
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
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except OSError as problem:
        raise ConfigurationError(
            f"the server cannot listen at {host}:{port} ({problem.strerror}): name another {host_option} or "
            f"{port_option}"
        ) from None


PANEL: Final = "Page"
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

    inspect: Annotated[
        bool,
        typer.Option("--inspect", help="Show blocks, requests and misses on a page as it runs.", rich_help_panel=PANEL),
    ] = False
    inspect_speed: Annotated[
        str,
        typer.Option(metavar="X", help="Seconds of the trace in a second; max.", rich_help_panel=PANEL),
    ] = "1"
    inspect_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address of the page; needs a key if others reach it.", rich_help_panel=PANEL
        ),
    ] = "127.0.0.1"
    inspect_port: Annotated[
        int, typer.Option(metavar="N", help="Port of the page; 0: a free one.", rich_help_panel=PANEL)
    ] = 8001
    inspect_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="API keys, as of serve. Default: a new one, if needed.", rich_help_panel=PANEL
        ),
    ] = None

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
