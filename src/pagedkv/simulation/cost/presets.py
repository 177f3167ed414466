"""Cost models by name: GPUs, derivation from data sheets, files.

Published peak numbers of well-known GPUs.

Rates are the manufacturer's, from the data sheets named beside each entry: *dense* BF16 operations (data sheets print
twice as many, for weights of which half are zero), memory bandwidth, and the host link in one direction (they print the
sum of both). :class:`~pagedkv.simulation.cost.presets.Assumptions` has the shares of them that programs
reach.

A cost model, and the memory left for keys and values, from a model's memory and a GPU's published numbers.

The formulas are here. The peaks are in :mod:`~pagedkv.simulation.cost.presets`, the bytes in
:mod:`pagedkv.models`. Work and memory are assumed to be split evenly over the GPUs (tensor parallelism)::

    token_compute_s = 2 * active parameters / (compute * flops * num_gpus)
    pair_compute_s  = operations a pair     / (compute * flops * num_gpus)
    weights_s       = bytes                 / (memory * bandwidth * num_gpus)     likewise context tokens and states
    fixed_s         = step_s + 2 * layers * exchange_s                            the latter with several GPUs
    swap_token_s    = bytes a token         / (link * host link * num_gpus)

Two operations a parameter and token (Kaplan et al., 2020, section 2.1); two all-reduces a layer (Megatron-LM, 2019).
Not modelled: models whose keys cannot be split (fewer key heads than GPUs, latent attention) have copies on each GPU;
arithmetic in FP8 is counted at the BF16 rate.

Cost models by name: pairs of a model and the hardware that serves it, and two simple ones for trying things out.

A pair is written ``model/gpu`` or ``model/8xgpu``. Any model preset with any GPU of the table is a name; the pairs
listed here are those with published figures.

Reads a CostModel from a name or a JSON file.

A file has one JSON object with exactly the fields of :class:`~pagedkv.simulation.cost.CostModel`, and its
calibration if there is one. A missing or misspelt field is an error, since it would silently cost nothing. Every fault
is a ConfigurationError with the file, the key and a remedy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError
from pagedkv.models import LayerGroup, ModelMemory, model_names, read_model
from pagedkv.models.config import read_json_object
from pagedkv.models.memory import GIB
from pagedkv.simulation.cost.cost_model import (
    CALIBRATION_KEY,
    DATA_SHEET,
    STATED,
    CostModel,
    CostOrigin,
    origin_in_file,
)

__all__ = [
    "Assumptions",
    "Gpu",
    "cost_model_named",
    "cost_model_names",
    "derive_cost_model",
    "find_gpu",
    "gpu_names",
    "kv_budget_nbytes",
    "read_cost_model",
    "read_cost_origin",
]
TERA: Final = 10**12
GIGA: Final = 10**9
PCIE_4_X16: Final = 32 * GIGA
PCIE_5_X16: Final = 64 * GIGA
GDDR_LEFT_BY_ECC: Final = 15 / 16
"""Cards with GDDR6 reserve a sixteenth of it for error correction: 22.5 of 24 GiB are left."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's peak numbers.

    Args:
        name: as commonly written, in lower case.
        memory_nbytes: memory that programs see; the "GB" of data sheets are GiB.
        flops: dense BF16 operations a second.
        memory_nbytes_per_s: bandwidth of its memory.
        link_nbytes_per_s: bandwidth to the host's memory, in one direction.
        source: source of the numbers.
    """

    name: str
    memory_nbytes: int
    flops: float
    memory_nbytes_per_s: float
    link_nbytes_per_s: float
    source: str = ""


GPUS: Final[Mapping[str, Gpu]] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            # NVIDIA A100 Tensor Core GPU data sheet: SXM4 40 GB and 80 GB.
            Gpu("a100-40", 40 * GIB, 312 * TERA, 1555 * GIGA, PCIE_4_X16, "NVIDIA A100 data sheet, SXM4 40 GB"),
            Gpu("a100-80", 80 * GIB, 312 * TERA, 2039 * GIGA, PCIE_4_X16, "NVIDIA A100 data sheet, SXM4 80 GB"),
            # NVIDIA H100 Tensor Core GPU data sheet: SXM5.
            Gpu("h100", 80 * GIB, 989 * TERA, 3350 * GIGA, PCIE_5_X16, "NVIDIA H100 data sheet, SXM5"),
            # NVIDIA H200 Tensor Core GPU data sheet: SXM. Programs see 140.4 GiB of its 141 GB.
            Gpu("h200", 140 * GIB, 989 * TERA, 4800 * GIGA, PCIE_5_X16, "NVIDIA H200 data sheet, SXM"),
            # NVIDIA DGX B200 data sheet, an eighth of the machine. Programs see 179 GiB of its 180 GB.
            Gpu("b200", 179 * GIB, 2250 * TERA, 8000 * GIGA, PCIE_5_X16, "NVIDIA DGX B200 data sheet, an eighth"),
            # NVIDIA L4 and L40S data sheets.
            Gpu("l4", int(24 * GIB * GDDR_LEFT_BY_ECC), 121 * TERA, 300 * GIGA, PCIE_4_X16, "NVIDIA L4 data sheet"),
            Gpu("l40s", int(48 * GIB * GDDR_LEFT_BY_ECC), 362 * TERA, 864 * GIGA, PCIE_4_X16, "NVIDIA L40S data sheet"),
        )
    }
)


def gpu_names() -> tuple[str, ...]:
    """Return the names of all GPUs in the table."""
    return tuple(GPUS)


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, in any case of letters.

    Raises:
        ConfigurationError: the GPU is not in the table.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        nearest = get_close_matches(name.lower(), GPUS, n=1)
        hint = f"nearest is {nearest[0]}; " if nearest else ""
        raise ConfigurationError(f"unknown GPU {name[:40]!r}: {hint}known are {', '.join(GPUS)}")
    return gpu


OPERATIONS_PER_PARAMETER: Final = 2
EXCHANGES_PER_LAYER: Final = 2
READ_AND_WRITTEN: Final = 2
MAX_GPUS: Final = 10_000
DEFAULT_UTILIZATION: Final = 0.9
"""Share of a GPU's memory; the rest is for activations and the driver. Equals vLLM's gpu_memory_utilization."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The share of the peaks that programs reach, and the fixed costs of a step.

    Args:
        compute: share of peak arithmetic. 0.5 is an assumption; large matrix products alone reach 0.6 to 0.8.
        memory: share of peak memory bandwidth. 0.8: gpt-fast reads the weights of Llama-2-7B, including step overhead,
            at 0.69 of an A100-80's, and its authors measured 1.7 of 2.04 TB/s at most (its README).
        link: share of the host link. 0.84: 54 of 64 GB/s, measured once on an H200.
        step_s: fixed time of a step on one GPU. 1 ms is an assumption, which matches gpt-fast's figure for one GPU
            within 3%.
        exchange_s: one all-reduce of few bytes. 20 us matches gpt-fast's figures for 2 to 8 A100s within 10%.
        sequence_s: sampling and bookkeeping for one sequence. 5 us is an assumption.
        swap_s: starting to move a sequence's blocks. 20 us is an assumption.

    Raises:
        ConfigurationError: a share is not in (0, 1], or a time is out of range.
    """

    compute: float = 0.5
    memory: float = 0.8
    link: float = 0.84
    step_s: float = 1e-3
    exchange_s: float = 20e-6
    sequence_s: float = 5e-6
    swap_s: float = 20e-6

    def __post_init__(self) -> None:
        """Check the shares; the cost model checks the times."""
        for name in ("compute", "memory", "link"):
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise ConfigurationError(f"{name} is a share of a peak and must be over 0 and at most 1, got {share!r}")


DEFAULTS: Final = Assumptions()


def derive_cost_model(
    model: ModelMemory, gpu: Gpu, num_gpus: int = 1, assumptions: Assumptions = DEFAULTS
) -> CostModel:
    """Derive the cost of a model's steps on some GPUs.

    Raises:
        ConfigurationError: the number of GPUs is not positive, or the model's number or bytes of weights is unknown.
    """
    num_gpus = as_count(num_gpus, "the number of GPUs", least=1, most=MAX_GPUS)
    num_parameters, num_active, weights_nbytes = _weights(model)
    flops = assumptions.compute * gpu.flops * num_gpus
    read_nbytes_per_s = assumptions.memory * gpu.memory_nbytes_per_s * num_gpus
    link_nbytes_per_s = assumptions.link * gpu.link_nbytes_per_s * num_gpus
    expert_parameters = _expert_parameters(model, num_parameters, num_active)
    parameter_s = weights_nbytes / num_parameters / read_nbytes_per_s
    unlimited = [group for group in model.groups if not group.extent]
    limited = [group for group in model.groups if group.extent]
    num_exchanges = EXCHANGES_PER_LAYER * model.num_layers if num_gpus > 1 else 0
    return CostModel(
        fixed_s=assumptions.step_s + num_exchanges * assumptions.exchange_s,
        token_compute_s=OPERATIONS_PER_PARAMETER * num_active / flops,
        pair_compute_s=_pair_flops(unlimited) / flops,
        weights_s=(num_parameters - expert_parameters) * parameter_s,
        experts_s=expert_parameters * parameter_s,
        expert_share=model.expert_share,
        context_token_s=_token_nbytes(unlimited) / read_nbytes_per_s,
        window=max((group.extent for group in limited), default=0),
        window_pair_compute_s=_pair_flops(limited) / flops,
        window_token_s=_token_nbytes(limited) / read_nbytes_per_s,
        sequence_state_s=READ_AND_WRITTEN * model.state_nbytes / read_nbytes_per_s,
        sequence_s=assumptions.sequence_s,
        swap_fixed_s=assumptions.swap_s + model.state_nbytes / link_nbytes_per_s,
        swap_token_s=model.token_nbytes / link_nbytes_per_s,
    )


def kv_budget_nbytes(model: ModelMemory, gpu: Gpu, num_gpus: int = 1, utilization: float = DEFAULT_UTILIZATION) -> int:
    """Return the bytes left for keys, values and states: the memory that an engine uses minus the weights.

    Args:
        model: the model; its weights must be known.
        gpu: one of the GPUs.
        num_gpus: GPUs over which weights and cache are split evenly.
        utilization: share of each GPU's memory that the engine may use, in (0, 1].

    Raises:
        ConfigurationError: nothing is left (the message has the number of GPUs that suffice), the weights are unknown,
            or a number is out of range.
    """
    num_gpus = as_count(num_gpus, "the number of GPUs", least=1, most=MAX_GPUS)
    if not 0 < utilization <= 1:
        raise ConfigurationError(f"the memory utilization must be over 0 and at most 1, got {utilization!r}")
    weights_nbytes = _weights(model)[2]
    usable_nbytes = utilization * gpu.memory_nbytes
    budget_nbytes = int(num_gpus * usable_nbytes) - weights_nbytes
    if budget_nbytes <= 0:
        raise ConfigurationError(
            f"the weights of {model.name} take {weights_nbytes:,} bytes, {num_gpus} x {gpu.name} at "
            f"{utilization:.0%} hold {int(num_gpus * usable_nbytes):,}: use at least "
            f"{ceil((weights_nbytes + 1) / usable_nbytes)} of them, or larger ones"
        )
    return budget_nbytes


def _weights(model: ModelMemory) -> tuple[int, int, int]:
    """Return the parameters, the active ones, and the bytes of the weights. Raises ConfigurationError."""
    if model.num_parameters is None or model.num_active_parameters is None:
        raise ConfigurationError(
            f"{model.name}: the number of its weights cannot be counted from its config. Set num_parameters, "
            "num_active_parameters and weights_nbytes yourself (dataclasses.replace), or write a cost model's file"
        )
    if model.weights_nbytes is None:
        raise ConfigurationError(
            f"{model.name}: the bytes of its quantised weights are not known. Set weights_nbytes yourself "
            "(dataclasses.replace), or write a cost model's file"
        )
    return model.num_parameters, model.num_active_parameters, model.weights_nbytes


def _expert_parameters(model: ModelMemory, num_parameters: int, num_active: int) -> float:
    """Count the weights in routed experts, of which a token uses a share; it uses all other weights.

    The formula solves ``active = all - experts + share * experts``. Published numbers are rounded, so the result is
    limited to all weights.
    """
    if model.expert_share == 1:
        return 0.0
    return min((num_parameters - num_active) / (1 - model.expert_share), float(num_parameters))


def _pair_flops(groups: list[LayerGroup]) -> int:
    return sum(group.pair_flops for group in groups)


def _token_nbytes(groups: list[LayerGroup]) -> int:
    return sum(group.token_nbytes for group in groups)


SIMPLE: Final[Mapping[str, CostModel]] = MappingProxyType(
    {
        "instant": CostModel(),
        "per-token": CostModel(token_compute_s=1e-3),
    }
)
"""One model without any cost, and one in which each new token takes a millisecond and all else is free."""
PAIRS: Final = (
    "deepseek-v3/8xh200",
    "gemma-2-27b/h100",
    "gemma-3-27b/h100",
    "gpt-oss-120b/h100",
    "gpt-oss-20b/h100",
    "jamba-v0.1/2xa100-80",
    "llama-2-13b/a100-80",
    "llama-2-70b/8xa100-80",
    "llama-2-7b/a100-80",
    "llama-3.1-405b/8xh200",
    "llama-3.1-70b/4xh100",
    "llama-3.1-70b/8xh100",
    "llama-3.1-8b/a100-80",
    "llama-3.1-8b/h100",
    "llama-3.1-8b/h200",
    "llama-3.1-8b/l40s",
    "llama-4-scout/4xh100",
    "mistral-7b-v0.1/l4",
    "mixtral-8x7b/2xh100",
    "opt-13b/a100-40",  # from the PagedAttention paper, like the next one
    "opt-66b/4xa100-40",
    "qwen2.5-72b/4xh100",
    "qwen2.5-7b/l40s",
    "qwen3-32b/2xh100",
    "qwen3-8b/h100",
    "qwen3-next-80b-a3b/4xh100",
)
PAIR: Final = re.compile(r"(?P<model>[^/]+)/(?:(?P<num_gpus>[1-9][0-9]{0,3})x)?(?P<gpu>[^/]+)")


def cost_model_names() -> tuple[str, ...]:
    """Return the simple names and the well-known pairs."""
    return (*SIMPLE, *PAIRS)


def cost_model_named(name: str) -> CostModel | None:
    """Return a cost model by its name; None if the name is unknown (it may be a path).

    Raises:
        ConfigurationError: a known model on an unknown GPU, or on too few GPUs to hold its weights.
    """
    lowered = name.lower()
    if lowered in SIMPLE:
        return SIMPLE[lowered]
    pair = PAIR.fullmatch(lowered)
    if pair is None or pair["model"] not in model_names():
        return None
    model, gpu, num_gpus = read_model(pair["model"]), find_gpu(pair["gpu"]), int(pair["num_gpus"] or 1)
    if kv_budget_nbytes(model, gpu, num_gpus) < model.token_nbytes:
        raise ConfigurationError(f"{name}: the weights leave no room for a single token; use more GPUs")
    return derive_cost_model(model, gpu, num_gpus)


NUM_SUGGESTIONS: Final = 3
LEAST_LIKENESS: Final = 0.4
EXAMPLE: Final = "pagedkv.simulation.cost.CostModel().as_dict() shows all keys"


def read_cost_model(name_or_path: str) -> CostModel:
    """Read a cost model.

    Args:
        name_or_path: "instant", "per-token", a pair such as "llama-3.1-8b/h100" or "llama-3.1-70b/8xh100" (any
            preset of a model with any GPU of the table), or the path of a JSON file. A name takes precedence;
            ``./name`` is always a path.

    Raises:
        ConfigurationError: there is no such name or file, or the file has other keys or values than a cost model.

    >>> read_cost_model("per-token").step_s(100, 5050, 100, 1)
    0.1
    """
    named = cost_model_named(name_or_path)
    return _from_file(_found(name_or_path)) if named is None else named


def read_cost_origin(name_or_path: str) -> CostOrigin:
    """Read the origin of a cost model's seconds, by name or file as in :func:`read_cost_model`.

    Raises:
        ConfigurationError: there is no such name or file, or its calibration cannot be read.

    >>> read_cost_origin("llama-3.1-8b/h100").in_short, read_cost_origin("instant").in_short
    ('data sheet', 'stated, error unknown')
    """
    if cost_model_named(name_or_path) is not None:
        return CostOrigin(DATA_SHEET if "/" in name_or_path else STATED)
    path = _found(name_or_path)
    return origin_in_file(str(path), read_json_object(path))


def _found(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if not _is_there(path):
        raise ConfigurationError(
            f"{name_or_path[:100]!r} is neither a cost model's name nor a file. Nearest names: "
            f"{', '.join(_nearest(name_or_path))}; `pagedkv presets` lists the usual ones"
        )
    return path


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # the name is too long for a path


def _nearest(name: str) -> list[str]:
    return get_close_matches(name[-100:].lower(), cost_model_names(), NUM_SUGGESTIONS, LEAST_LIKENESS) or ["instant"]


def _from_file(path: Path) -> CostModel:
    content = read_json_object(path)
    origin_in_file(str(path), content)
    values: Mapping[str, object] = {key: value for key, value in content.items() if key != CALIBRATION_KEY}
    names = [field.name for field in fields(CostModel)]
    unknown = sorted(set(values) - set(names))
    missing = [name for name in names if name not in values]
    if unknown:
        near = get_close_matches(unknown[0], missing or names, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigurationError(f"{path}: unknown key {unknown[0][:60]!r}. {hint}{EXAMPLE}")
    if missing:
        raise ConfigurationError(f"{path}: missing key {missing[0]!r}. Write 0 for what costs nothing; {EXAMPLE}")
    try:
        return CostModel(**values)  # type: ignore[arg-type] # CostModel checks each value itself
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}. Correct the value; times are in seconds") from error
