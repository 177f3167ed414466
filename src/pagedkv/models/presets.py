"""Well-known models: what their classes in transformers keep, recorded, so that sizing one needs no torch.

The file ``presets.json`` beside this one has, for each, the fields of a :class:`~pagedkv.models.ModelMemory` and the
repository on the Hugging Face hub whose ``config.json`` they are of. It is written by a tool that asks the classes
(:mod:`pagedkv.probe.sizing`), and held against them by a test.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from pagedkv.models.memory import LayerGroup, ModelMemory, chosen_element_nbytes

FILE: Final = Path(__file__).with_name("presets.json")


@cache
def _file() -> dict[str, dict[str, Any]]:
    """Read the file once: a part of the package, which does not change."""
    recorded: dict[str, dict[str, Any]] = json.loads(FILE.read_bytes())
    return recorded


def model_names() -> tuple[str, ...]:
    """Return the names of all presets, in alphabetical order."""
    return tuple(sorted(_file()))


def source_of(name: str) -> str:
    """Return the repository of a preset's config."""
    return str(_file()[name]["source"])


def preset(name: str, kv_dtype: str | None = None) -> ModelMemory:
    """Return the memory of a preset.

    Args:
        name: one of :func:`model_names`.
        kv_dtype: type of keys and values, as :func:`pagedkv.models.read_model` takes it.

    Raises:
        ConfigurationError: there is no such type.
    """
    fields = {key: value for key, value in _file()[name].items() if key not in {"source", "groups"}}
    groups = tuple(LayerGroup(**group) for group in _file()[name]["groups"])
    nbytes = chosen_element_nbytes(kv_dtype) or fields["dtype_nbytes"]
    scaled = (replace(group, token_nbytes=group.token_nbytes * nbytes // fields["dtype_nbytes"]) for group in groups)
    return ModelMemory(**fields, groups=tuple(scaled))
