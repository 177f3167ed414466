"""Memory of one recurrent layer for a sequence: its state, and the last inputs of its short convolution.

In elements, with a convolution of ``k`` taps that remembers ``k - 1`` inputs (transformers' own cache keeps ``k``)::

    Mamba (Gu & Dao, 2023)               channels * d_state + channels * (k - 1)
    Mamba-2 (Dao & Gu, 2024)             channels * d_state + (channels + 2 * groups * d_state) * (k - 1)
    gated DeltaNet (Yang et al., 2024)   values * k_dim     + (2 * k_heads * k_dim + values) * (k - 1)

where ``channels`` is the inner width of Mamba over all heads, and ``values`` that of DeltaNet's value heads. The
convolution's inputs have the model's own type. So has the state, unless the config names another for it.
"""

from typing import Final

from pagedkv.models.config import COMPARE, ModelConfig
from pagedkv.models.dtypes import model_element_nbytes, state_element_nbytes

__all__ = ["gated_delta_state_nbytes", "mamba2_state_nbytes", "mamba_state_nbytes", "nemotron_state_nbytes"]

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
