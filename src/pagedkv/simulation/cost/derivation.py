"""A cost model, and the memory left for keys and values, from a model's memory and a GPU's published numbers.

The formulas are here. The peaks are in :mod:`~pagedkv.simulation.cost.gpus`, the bytes in
:mod:`pagedkv.models`. Work and memory are assumed to be split evenly over the GPUs (tensor parallelism)::

    token_compute_s = 2 * active parameters / (compute * flops * num_gpus)
    pair_compute_s  = operations a pair     / (compute * flops * num_gpus)
    weights_s       = bytes                 / (memory * bandwidth * num_gpus)     likewise context tokens and states
    fixed_s         = step_s + 2 * layers * exchange_s                            the latter with several GPUs
    swap_token_s    = bytes a token         / (link * host link * num_gpus)

Two operations a parameter and token (Kaplan et al., 2020, section 2.1); two all-reduces a layer (Megatron-LM, 2019).
Not modelled: models whose keys cannot be split (fewer key heads than GPUs, latent attention) have copies on each GPU;
arithmetic in FP8 is counted at the BF16 rate.
"""

from dataclasses import dataclass
from math import ceil
from typing import Final

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError
from pagedkv.models import LayerGroup, ModelMemory
from pagedkv.simulation.cost.cost_model import CostModel
from pagedkv.simulation.cost.gpus import Gpu

__all__ = ["Assumptions", "derive_cost_model", "kv_budget_nbytes"]

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
