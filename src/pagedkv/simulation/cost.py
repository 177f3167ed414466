"""The duration of one step of an engine, as a function of its work; GPUs, and models on them.

There is no clock here. A replay computes the seconds of a step, and advances its own clock by them.

The seconds are those of a roofline (Williams et al., 2009). A step does arithmetic and reads memory, and the two
overlap; the longer of them counts::

    step    = fixed_s + max(compute, memory) + num_sequences * sequence_s
            + several_s, if num_new_tokens > 1
            + chunk_s, if num_new_tokens > num_sequences
    compute = num_new_tokens * token_compute_s
            + num_attended_pairs                           * pair_compute_s
            + min(num_attended_pairs, num_new_tokens * window) * window_pair_compute_s
    memory  = weights_s + experts_s * (1 - (1 - expert_share) ** num_new_tokens)
            + num_context_tokens                           * context_token_s
            + min(num_context_tokens, num_sequences * window)  * window_token_s
            + num_sequences * sequence_state_s

A further token, of a sequence of the step or of another one, never shortens it. ``several_s`` and ``chunk_s`` are what
engines do once in such a step: products of matrices instead of a vector, and attention of prompts beside that of
decoding. The limit of a window or a chunk applies to the
sums. That is exact if all sequences are shorter than the window, or all longer, and too high in between. The experts'
term is the expected share of experts that at least one of the step's tokens uses, if tokens choose independently and
all experts are equally likely.

Ignored: writing the new keys and values (small against all weights), the bandwidth between GPUs (``fixed_s`` has only
the delay of each exchange), the imbalance of experts and of GPUs, and the lower efficiency of small batches.

Readers of figures need the source of the seconds to judge them. There are three kinds: computed from a GPU's data
sheet; fitted to measured steps (``pagedkv calibrate`` writes the error of the fit into its file); or stated by a file
or a name without a measurement. The origin is separate from the model, since models with equal parameters may have
different origins.

Published peak rates of GPUs are the manufacturer's, from the data sheets named beside each entry: *dense* BF16
operations (data sheets print twice as many, for weights of which half are zero), memory bandwidth, and the host link in
one direction (they print the sum of both). :class:`Assumptions` has the shares of them that programs reach.

A cost model, and the memory left for keys and values, follow from a model's memory and a GPU's published numbers. Work
and memory are assumed to be split evenly over the GPUs (tensor parallelism)::

    token_compute_s = 2 * active parameters / (compute * flops * num_gpus)
    pair_compute_s  = operations a pair     / (compute * flops * num_gpus)
    weights_s       = bytes                 / (memory * bandwidth * num_gpus)     likewise context tokens and states
    fixed_s         = step_s + 2 * layers * exchange_s                            the latter with several GPUs
    swap_token_s    = bytes a token         / (link * host link * num_gpus)

Two operations a parameter and token (Kaplan et al., 2020, section 2.1); two all-reduces a layer (Megatron-LM, 2019).
Not modelled: models whose keys cannot be split (fewer key heads than GPUs, latent attention) have copies on each GPU;
arithmetic in FP8 is counted at the BF16 rate.

Cost models have names: pairs of a model and the hardware that serves it, and two simple ones for trying things out. A
pair is written ``model/gpu`` or ``model/8xgpu``. Any model preset with any GPU of the table is a name; the pairs listed
here are those with published figures.

A file of a cost model has one JSON object with exactly the fields of :class:`CostModel`, and its calibration if there
is one. A missing or misspelt field is an error, since it would silently cost nothing. Every fault is a
ConfigurationError with the file, the key and a remedy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from reprlib import repr as short_repr
from types import MappingProxyType
from typing import Final

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError
from pagedkv.models import LayerGroup, ModelMemory, model_names, read_model
from pagedkv.models.config import read_json_object
from pagedkv.models.memory import GIB
from pagedkv.models.reader import LEAST_LIKENESS, NUM_SUGGESTIONS
from pagedkv.planner.results import Result

__all__ = [
    "Assumptions",
    "CostModel",
    "CostOrigin",
    "Gpu",
    "cost_model_names",
    "derive_cost_model",
    "find_gpu",
    "gpu_names",
    "kv_budget_nbytes",
    "read_cost_model",
    "read_cost_origin",
]
LONGEST_S: Final = 1e6
"""No part of a step takes days; larger numbers must be in another unit."""


@dataclass(frozen=True, slots=True)
class CostModel(Result):
    """The cost of everything that a step computes, reads or moves. All fields ending in ``_s`` are seconds.

    Args:
        fixed_s: every step: launching, exchanging between GPUs, scheduling.
        token_compute_s: arithmetic for one new token, except attention.
        pair_compute_s: arithmetic for one query attending to one key, in layers that see the whole context.
        weights_s: reading the weights that every step needs.
        experts_s: reading all routed experts of a mixture; 0 for a dense model.
        expert_share: share of the experts that one token uses, in (0, 1].
        context_token_s: reading one token's keys and values, in layers that see the whole context.
        window: tokens that windowed (or chunked) layers see; 0: there are none.
        window_pair_compute_s: as ``pair_compute_s``, in windowed layers.
        window_token_s: as ``context_token_s``, in windowed layers.
        sequence_state_s: reading and writing one sequence's recurrent state.
        sequence_s: sampling and bookkeeping for one sequence; not overlapped.
        several_s: a step of more than one token, once; not overlapped.
        chunk_s: a step that computes several tokens of a sequence, such as a prompt, once; not overlapped.
        swap_fixed_s: fixed time of moving blocks to or from host memory in a step.
        swap_token_s: moving one token's keys and values.

    Raises:
        ConfigurationError: a field is negative, not a number, or absurd.
    """

    fixed_s: float = 0.0
    token_compute_s: float = 0.0
    pair_compute_s: float = 0.0
    weights_s: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 1.0
    context_token_s: float = 0.0
    window: int = 0
    window_pair_compute_s: float = 0.0
    window_token_s: float = 0.0
    sequence_state_s: float = 0.0
    sequence_s: float = 0.0
    several_s: float = 0.0
    chunk_s: float = 0.0
    swap_fixed_s: float = 0.0
    swap_token_s: float = 0.0

    def __post_init__(self) -> None:
        """Check every field."""
        object.__setattr__(self, "window", as_count(self.window, "window"))
        for name in (field.name for field in fields(self) if field.name.endswith("_s")):
            object.__setattr__(self, name, _checked_seconds(name, getattr(self, name)))
        share = self.expert_share
        if not _is_number(share) or not 0 < share <= 1:
            raise ConfigurationError(f"expert_share must be over 0 and at most 1, got {short_repr(share)}")
        object.__setattr__(self, "expert_share", float(share))

    def step_s(
        self, num_new_tokens: int, num_attended_pairs: int, num_context_tokens: int, num_sequences: int
    ) -> float:
        """Return the seconds of one step. O(1). Counts must not be negative, which is not checked.

        Args:
            num_new_tokens: tokens computed in this step, over all sequences.
            num_attended_pairs: pairs of a new token and a token to which it may attend, including itself, as if there
                were no windows: for ``n`` new tokens after ``c`` computed ones ``n * c + n * (n + 1) / 2``.
            num_context_tokens: tokens whose keys and values are read: each sequence's length after the step.
            num_sequences: sequences with tokens in the step.
        """
        window_pairs = min(num_attended_pairs, num_new_tokens * self.window)
        compute_s = (
            num_new_tokens * self.token_compute_s
            + num_attended_pairs * self.pair_compute_s
            + window_pairs * self.window_pair_compute_s
        )
        share_of_experts = 1.0 - (1.0 - self.expert_share) ** num_new_tokens
        memory_s = (
            self.weights_s
            + share_of_experts * self.experts_s
            + num_context_tokens * self.context_token_s
            + min(num_context_tokens, num_sequences * self.window) * self.window_token_s
            + num_sequences * self.sequence_state_s
        )
        once_s = self.fixed_s + (self.several_s if num_new_tokens > 1 else 0.0)
        if num_new_tokens > num_sequences:
            once_s += self.chunk_s
        return once_s + max(compute_s, memory_s) + num_sequences * self.sequence_s

    def swap_s(self, num_tokens: float) -> float:
        """Return the seconds of moving keys and values to or from host memory in one step; 0 for no tokens."""
        return self.swap_fixed_s + num_tokens * self.swap_token_s if num_tokens > 0 else 0.0

    def scaled(self, factor: float) -> "CostModel":
        """Return a model by which everything takes ``factor`` times as long. Raises ConfigurationError if negative."""
        values = self.as_dict()
        return CostModel(**{name: factor * value if name.endswith("_s") else value for name, value in values.items()})


def _checked_seconds(name: str, value: object) -> float:
    # Compared before it is converted, since an integer of 400 digits does not fit a float. NaN fails both comparisons.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= LONGEST_S:
        raise ConfigurationError(
            f"{name} must be a number of seconds from 0 to {LONGEST_S:,.0f}, got {short_repr(value)}"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DATA_SHEET: Final = "data sheet"
CALIBRATED: Final = "calibrated"
STATED: Final = "stated"
CALIBRATION_KEY: Final = "calibration"
"""Key of the description of the fit in a cost model's file."""
BEYOND: Final = 1e15
NUMBERS: Final = ("num_steps", "median", "p90")
OF_SUMS: Final = "of_sums"


@dataclass(frozen=True, slots=True)
class CostOrigin:
    """Source of the seconds of a cost model.

    Args:
        kind: "data sheet", "calibrated" or "stated".
        num_steps: steps to which a calibrated model was fitted; else None.
        median, p90: relative errors of a calibrated model on steps left out of the fit, without sign; else None.
        of_sums: the same of the seconds of many steps together; None: not stated.
    """

    kind: str
    num_steps: int | None = None
    median: float | None = None
    p90: float | None = None
    of_sums: float | None = None

    @property
    def error(self) -> float | None:
        """The relative error of a load: that of sums, since a load is decided by many steps, else the median."""
        return self.median if self.of_sums is None else self.of_sums

    @property
    def in_short(self) -> str:
        """The kind, and the error if it is known: "data sheet", "calibrated, error 12.7%"."""
        if self.kind == CALIBRATED:
            return f"{CALIBRATED}, error {self.median:.1%}"
        return self.kind if self.kind == DATA_SHEET else "stated, error unknown"

    @property
    def sentence(self) -> str:
        """Explain the consequence for figures in seconds."""
        if self.kind == CALIBRATED:
            sums = "" if self.of_sums is None else f", and of {self.of_sums:.1%} on the sum of many"
            return (
                f"calibrated on {self.num_steps:,} measured steps, with an error of {self.median:.1%} in the median "
                f"and {self.p90:.1%} at p90 on steps left out of the fit{sums}"
            )
        if self.kind == DATA_SHEET:
            return "computed from the GPU's data sheet and not measured: pagedkv calibrate fits them to measured steps"
        return "stated, with an unknown error: pagedkv validate measures it on measured steps"


def origin_in_file(where: str, values: Mapping[str, object]) -> CostOrigin:
    """Read the calibration from a cost model's file; the seconds of a file without one are "stated".

    Raises:
        ConfigurationError: the calibration cannot be read.
    """
    calibration = values.get(CALIBRATION_KEY)
    if calibration is None:
        return CostOrigin(STATED)
    stated: Mapping[str, object] = calibration if isinstance(calibration, Mapping) else {}
    numbers = [*(stated.get(name) for name in NUMBERS), stated.get(OF_SUMS, 0)]
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < BEYOND for each in numbers):
        raise ConfigurationError(
            f"{where}: {CALIBRATION_KEY!r} must have the numbers {', '.join(NUMBERS)}. Write the file again with "
            "pagedkv calibrate, or leave the key out"
        )
    num_steps, median, p90, of_sums = (float(each) for each in numbers if isinstance(each, int | float))
    return CostOrigin(CALIBRATED, int(num_steps), median, p90, of_sums if OF_SUMS in stated else None)


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
