"""Memory of a model, group by group: the result of this package, from which the groups of a block space are made.

A group's name is also the name of its block pool, so groups of one model never share a pool with blocks of different
sizes in bytes.

One recurrent layer takes for a sequence its state, and the last inputs of its short convolution. In elements, with a
convolution of ``k`` taps that remembers ``k - 1`` inputs (transformers' own cache keeps ``k``)::

    Mamba (Gu & Dao, 2023)               channels * d_state + channels * (k - 1)
    Mamba-2 (Dao & Gu, 2024)             channels * d_state + (channels + 2 * groups * d_state) * (k - 1)
    gated DeltaNet (Yang et al., 2024)   values * k_dim     + (2 * k_heads * k_dim + values) * (k - 1)

where ``channels`` is the inner width of Mamba over all heads, and ``values`` that of DeltaNet's value heads. The
convolution's inputs have the model's own type. So has the state, unless the config names another for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, assert_never

from pagedkv.contract.space_config import GIB
from pagedkv.contract.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.errors import ConfigurationError
from pagedkv.models.config import COMPARE, ModelConfig
from pagedkv.models.layer_rules import GroupKind, is_state

__all__ = [
    "GIB",
    "LayerGroup",
    "ModelMemory",
    "block_nbytes_of",
    "gated_delta_state_nbytes",
    "groups_of",
    "kv_element_nbytes",
    "mamba2_state_nbytes",
    "mamba_state_nbytes",
    "model_element_nbytes",
    "nemotron_state_nbytes",
    "state_element_nbytes",
]
ELEMENT_NBYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})
"""By the names of ``torch_dtype``, with or without ``torch.`` before them."""
KV_DTYPE_NBYTES: Final[Mapping[str, int]] = MappingProxyType({"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4})
"""By the names that users type."""
AUTO: Final = "auto"


def model_element_nbytes(config: ModelConfig) -> int:
    """Bytes of an element of the model's own type.

    Raises:
        ConfigurationError: the config names no type, or an unknown one.
    """
    return _named_element(config, "dtype", "torch_dtype")


def state_element_nbytes(config: ModelConfig) -> int:
    """Bytes of an element of a recurrent state; the model's own type unless the config names another.

    Raises:
        ConfigurationError: as :func:`model_element_nbytes`.
    """
    # Qwen3.5's name, and Nemotron-H's.
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if config.has(key):
            return _named_element(config, key)
    return model_element_nbytes(config)


def kv_element_nbytes(config: ModelConfig, kv_dtype: str | None) -> int:
    """Bytes of an element of keys and values.

    Args:
        config: the config of the model.
        kv_dtype: the user's choice; None or "auto" is the model's own type.

    Raises:
        ConfigurationError: an unknown choice; or no choice for a checkpoint with a quantised cache.
    """
    if kv_dtype is None or kv_dtype == AUTO:
        _refuse_quantised_cache(config)
        return model_element_nbytes(config)
    if kv_dtype not in KV_DTYPE_NBYTES:
        raise ConfigurationError(
            f"the KV cache's dtype must be one of {', '.join((AUTO, *KV_DTYPE_NBYTES))}, got {kv_dtype!r}"
        )
    return KV_DTYPE_NBYTES[kv_dtype]


def _refuse_quantised_cache(config: ModelConfig) -> None:
    """Require the user's choice if a quantised checkpoint has a type for the cache: only some engines follow it."""
    quantization = config.values.get("quantization_config")
    if not isinstance(quantization, dict):
        return
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if quantization.get(key):
            raise config.fault(
                f"quantization_config.{key}",
                "selects a quantised KV cache, whose size depends on the engine",
                f"Choose the KV cache's dtype: {', '.join(KV_DTYPE_NBYTES)}",
            )


def _named_element(config: ModelConfig, *keys: str) -> int:
    name = config.text(*keys).removeprefix("torch.")
    if name not in ELEMENT_NBYTES:
        raise config.fault(
            config.present(*keys) or keys[0],
            f"is {name[:40]!r}, but must be one of {', '.join(ELEMENT_NBYTES)}",
            "Write the type in which the model is served",
        )
    return ELEMENT_NBYTES[name]


MAX_SIZE: Final = 2**24
CHOSEN_BY_THE_LIBRARY: Final = "auto"


def mamba_state_nbytes(config: ModelConfig) -> int:
    """Bytes of a Mamba layer (Jamba's names of keys). Raises ConfigurationError."""
    channels = _count(config, "mamba_expand") * _count(config, "hidden_size")
    return _nbytes(config, channels * _count(config, "mamba_d_state"), channels, _count(config, "mamba_d_conv"))


def mamba2_state_nbytes(config: ModelConfig) -> int:
    """Bytes of a Mamba-2 layer (Bamba's and Granite's names of keys). Raises ConfigurationError."""
    num_heads = _count(config, "mamba_n_heads")
    channels = _count(config, "mamba_expand") * _count(config, "hidden_size")
    if config.values.get("mamba_d_head") not in (None, CHOSEN_BY_THE_LIBRARY):
        head_dim = _count(config, "mamba_d_head")
        if num_heads * head_dim != channels:
            raise config.fault(
                "mamba_d_head", f"is {head_dim}, but {num_heads} heads of it are not the {channels} channels", COMPARE
            )
    d_state = _count(config, "mamba_d_state")
    num_inputs = channels + 2 * _count(config, "mamba_n_groups") * d_state
    return _nbytes(config, channels * d_state, num_inputs, _count(config, "mamba_d_conv"))


def nemotron_state_nbytes(config: ModelConfig) -> int:
    """Bytes of a Mamba-2 layer (Nemotron-H's names of keys). Raises ConfigurationError."""
    channels = _count(config, "mamba_num_heads") * _count(config, "mamba_head_dim")
    d_state = _count(config, "ssm_state_size")
    num_inputs = channels + 2 * _count(config, "n_groups", "mamba_n_groups") * d_state
    return _nbytes(config, channels * d_state, num_inputs, _count(config, "conv_kernel", "mamba_d_conv"))


def gated_delta_state_nbytes(config: ModelConfig) -> int:
    """Bytes of a gated DeltaNet layer (Qwen3-Next). Raises ConfigurationError."""
    key_dim = _count(config, "linear_key_head_dim")
    values = _count(config, "linear_num_value_heads") * _count(config, "linear_value_head_dim")
    num_inputs = 2 * _count(config, "linear_num_key_heads") * key_dim + values
    return _nbytes(config, values * key_dim, num_inputs, _count(config, "linear_conv_kernel_dim"))


def _nbytes(config: ModelConfig, state_numel: int, num_inputs: int, num_taps: int) -> int:
    remembered_numel = num_inputs * (num_taps - 1)
    return state_numel * state_element_nbytes(config) + remembered_numel * model_element_nbytes(config)


def _count(config: ModelConfig, *keys: str) -> int:
    return config.count(*keys, most=MAX_SIZE)


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
