"""Bytes of one element, by the names of types in configs and in user options."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.models.config import ModelConfig

__all__ = ["kv_element_nbytes", "model_element_nbytes", "state_element_nbytes"]

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
