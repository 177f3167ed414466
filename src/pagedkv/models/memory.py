"""Memory of a model, group by group: the result of this package, from which the groups of a block space are made.

A group's name is also the name of its block pool, so groups of one model never share a pool with blocks of different
sizes in bytes.

One recurrent layer of gated DeltaNet (Yang et al., 2024) takes for a sequence its state, in float32, and the last
inputs of its short convolution of ``k`` taps, in the model's own type. In elements, with ``values`` of all heads::

    values * k_dim + (2 * k_heads * k_dim + values) * k
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, assert_never

from pagedkv.contract.arguments import dtype_name
from pagedkv.contract.space_config import GIB
from pagedkv.contract.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.errors import ConfigurationError
from pagedkv.models.config import ModelConfig
from pagedkv.models.layer_rules import GroupKind, is_state

__all__ = [
    "GIB",
    "LayerGroup",
    "ModelMemory",
    "block_nbytes_of",
    "chosen_element_nbytes",
    "gated_delta_state_nbytes",
    "group_name",
    "groups_of",
    "kv_element_nbytes",
    "model_element_nbytes",
    "model_element_type",
    "weights_nbytes",
]
ELEMENT_NBYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})
"""By the names of ``torch_dtype``, with or without ``torch.`` before them."""
KV_DTYPE_NBYTES: Final[Mapping[str, int]] = MappingProxyType({"fp8": 1, **ELEMENT_NBYTES})
"""By the names that users type; short ones (bf16) are read too."""
AUTO: Final = "auto"
QUANTIZATION: Final = "quantization_config"


def model_element_type(config: ModelConfig) -> str:
    """Return the name of the model's own type, in which keys and values are computed.

    A quantised checkpoint that names none (gpt-oss) is computed in bfloat16.

    Raises:
        ConfigurationError: the config names no type, or an unknown one.
    """
    if config.present("dtype", "torch_dtype") is None and config.values.get(QUANTIZATION):
        return "bfloat16"
    return _named_type(config, "dtype", "torch_dtype")


def model_element_nbytes(config: ModelConfig) -> int:
    """Bytes of an element of the model's own type. Raises ConfigurationError as :func:`model_element_type`."""
    return ELEMENT_NBYTES[model_element_type(config)]


def kv_element_nbytes(config: ModelConfig, kv_dtype: str | None) -> int:
    """Bytes of an element of keys and values.

    Args:
        config: the config of the model.
        kv_dtype: the user's choice; None or "auto" is the model's own type.

    Raises:
        ConfigurationError: an unknown choice; or no choice for a checkpoint with a quantised cache.
    """
    chosen = chosen_element_nbytes(kv_dtype)
    if chosen is None:
        _refuse_quantised_cache(config)
    return chosen or model_element_nbytes(config)


def chosen_element_nbytes(kv_dtype: str | None) -> int | None:
    """Bytes of an element of keys and values of a chosen type; None where that is the model's own.

    Raises:
        ConfigurationError: an unknown choice.
    """
    if kv_dtype is None or kv_dtype == AUTO:
        return None
    if dtype_name(kv_dtype) not in KV_DTYPE_NBYTES:
        raise ConfigurationError(
            f"the KV cache's dtype must be one of {', '.join((AUTO, *KV_DTYPE_NBYTES))}, got {kv_dtype!r}"
        )
    return KV_DTYPE_NBYTES[dtype_name(kv_dtype)]


def _refuse_quantised_cache(config: ModelConfig) -> None:
    """Require the user's choice if a quantised checkpoint has a type for the cache: only some engines follow it."""
    quantization = config.values.get(QUANTIZATION)
    if not isinstance(quantization, dict):
        return
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if quantization.get(key):
            raise config.fault(
                f"quantization_config.{key}",
                "selects a quantised KV cache, whose size depends on the engine",
                f"Choose the KV cache's dtype: {', '.join(KV_DTYPE_NBYTES)}",
            )


def _named_type(config: ModelConfig, *keys: str) -> str:
    name = dtype_name(config.text(*keys))
    if name not in ELEMENT_NBYTES:
        raise config.fault(
            config.present(*keys) or keys[0],
            f"is {name[:40]!r}, but must be one of {', '.join(ELEMENT_NBYTES)}",
            "Write the type in which the model is served",
        )
    return name


def weights_nbytes(config: ModelConfig, num_parameters: int, num_in_experts: int = 0) -> int | None:
    """Size the weights; None where the size of their quantisation is not known.

    Args:
        config: the language model's part, with what it says of quantisation.
        num_parameters: all weights; num_in_experts: those of routed experts among them.
    """
    quantization = config.values.get(QUANTIZATION)
    if not quantization:
        return num_parameters * model_element_nbytes(config)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    in_experts = num_in_experts * 17 // 32  # in 4 bits, 32 elements have a scale of 8
    if method == "mxfp4":
        return in_experts + (num_parameters - num_in_experts) * model_element_nbytes(config)
    if method == "fp8":
        is_fp4 = config.values.get("expert_dtype") == "fp4"
        return in_experts + num_parameters - num_in_experts if is_fp4 else num_parameters
    return None


MAX_SIZE: Final = 2**24
SCAN_NBYTES: Final = 4


def gated_delta_state_nbytes(config: ModelConfig) -> int:
    """Bytes of a gated DeltaNet layer (Qwen3-Next). Raises ConfigurationError."""
    key_dim = _count(config, "linear_key_head_dim")
    values = _count(config, "linear_num_value_heads") * _count(config, "linear_value_head_dim")
    num_inputs = 2 * _count(config, "linear_num_key_heads") * key_dim + values
    inputs = num_inputs * _count(config, "linear_conv_kernel_dim")
    return values * key_dim * SCAN_NBYTES + inputs * model_element_nbytes(config)


def _count(config: ModelConfig, *keys: str) -> int:
    return config.count(*keys, most=MAX_SIZE)


def group_name(kind: GroupKind, extent: int) -> str:
    """Return the name of the group of a model's layers with one rule: "full", "window_1024", "chunk_8192", "state"."""
    match kind:
        case "full":
            return "full"
        case "recurrent":
            return "state"
        case "window" | "chunk":
            return f"{kind}_{extent}"
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of a model that share one retention rule, and so one block table.

    Args:
        name: unique within the model, and the name of the pool: "full", "window_1024", "chunk_8192" or "state".
        kind: the rule, as in :mod:`pagedkv.contract.spec`.
        extent: tokens of the window or the chunk; 0 for the other kinds.
        num_layers: layers with a cache of their own; layers that share an earlier layer's keys are not counted.
        token_nbytes: bytes of keys and values of a token, over all of these layers; 0 for a state.
        state_nbytes: bytes of a sequence's state, over all of these layers; 0 for keys and values.
        pair_flops: floating-point operations for one query attending to one key, over all of these layers.
    """

    name: str
    kind: GroupKind
    extent: int
    num_layers: int
    token_nbytes: int
    state_nbytes: int
    pair_flops: int

    def block_nbytes(self, block_size: int) -> int:
        """Return the bytes of a block of ``block_size`` tokens, or of one state, whatever the block size."""
        return self.state_nbytes if is_state(self.kind) else block_size * self.token_nbytes

    def spec(self, block_size: int) -> GroupSpec:
        """Return the group's rule for a block space, in a pool of the group's own name.

        Args:
            block_size: tokens of a block; for a state, tokens between checkpoints.

        Raises:
            ConfigurationError: the block size is not positive.
        """
        match self.kind:
            case "full":
                return FullAttention(block_size, pool=self.name)
            case "window":
                return SlidingWindow(self.extent, block_size, pool=self.name)
            case "chunk":
                return ChunkedLocal(self.extent, block_size, pool=self.name)
            case "recurrent":
                return RecurrentState(block_size, pool=self.name)
            case _:
                assert_never(self.kind)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of a model; for a multimodal model, that of its language model.

    Args:
        name: the preset or the file.
        num_parameters: weights: a preset's published number, or counted from the config where that is exact
            (:mod:`pagedkv.models.reader`); None if neither is known.
        num_active_parameters: weights that one token is multiplied with; None if unknown.
        expert_share: share of a layer's routed experts that a token uses; 1 without experts.
        weights_nbytes: bytes of the weights, quantised as published; None where unknown.
        dtype_nbytes: bytes of an element of the model's own type.
        max_context: longest sequence in tokens; None where the config does not state it.
        num_layers: layers of all kinds, including those without a cache.
        groups: groups of the layers with a cache; full attention first, then windows, chunks and the state.
    """

    name: str
    num_parameters: int | None
    num_active_parameters: int | None
    expert_share: float
    weights_nbytes: int | None
    dtype_nbytes: int
    max_context: int | None
    num_layers: int
    groups: tuple[LayerGroup, ...]

    @property
    def token_nbytes(self) -> int:
        """Bytes of keys and values of one token in all groups, while every group still keeps it."""
        return sum(group.token_nbytes for group in self.groups)

    @property
    def state_nbytes(self) -> int:
        """Bytes of one sequence's recurrent state."""
        return sum(group.state_nbytes for group in self.groups)

    def specs(self, block_size: int) -> tuple[GroupSpec, ...]:
        """Return the rules of all groups at one block size. Raises ConfigurationError as :meth:`LayerGroup.spec`."""
        return tuple(group.spec(block_size) for group in self.groups)


CHECKPOINT_INTERVAL: Final = 1024
"""Least tokens between checkpoints of a recurrent state, since a state takes as much memory as hundreds of tokens."""


def groups_of(model: ModelMemory, block_size: int) -> tuple[GroupSpec, ...]:
    """Return the groups of a model. States are kept every 1,024 tokens, or every block if that is more.

    Raises:
        ConfigurationError: the block size is not positive.
    """
    interval = -(-CHECKPOINT_INTERVAL // max(1, block_size)) * block_size
    return tuple(
        RecurrentState(interval, pool=group.name) if is_state(group.kind) else group.spec(block_size)
        for group in model.groups
    )


def block_nbytes_of(model: ModelMemory, block_size: int) -> dict[str, int]:
    """Return the bytes of a block of each pool."""
    return {group.name: group.block_nbytes(block_size) for group in model.groups}
