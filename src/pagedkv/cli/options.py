"""Options of several commands, with their help."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from pagedkv.contract.space_config import EVICTION_POLICIES
from pagedkv.errors import ConfigurationError
from pagedkv.models.presets import model_names

__all__ = [
    "DEFAULT_COST_MODEL",
    "DEFAULT_NUM_TOKENS",
    "MEMORY",
    "SCHEDULING",
    "TRACE",
    "Beams",
    "BlockSize",
    "CostModelName",
    "EvictionName",
    "GpuName",
    "HostBlocks",
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
    "completed_by",
    "num_jobs",
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
