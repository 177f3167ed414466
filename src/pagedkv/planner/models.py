"""read_model(): the memory of the model that a plan is made for, by its own class where that can be asked.

A preset is recorded. A ``config.json`` is given to the model's own class, without weights, where torch and transformers
are installed; otherwise the table of :mod:`pagedkv.models` knows the twenty most used types.
"""

import json
from functools import cache
from importlib.util import find_spec

from pagedkv.models import ModelMemory, read_model as read_by_table
from pagedkv.models.config import ModelConfig
from pagedkv.models.reader import is_preset, read_config


def asks_class(name_or_path: str) -> bool:
    """Return whether :func:`read_model` asks a model's class, which takes seconds, rather than look something up."""
    return not is_preset(name_or_path) and all(map(find_spec, ("torch", "transformers")))


def read_model(name_or_path: str, kv_dtype: str | None = None) -> ModelMemory:
    """Read the memory of a model.

    Args:
        name_or_path: a preset's name, the path of a ``config.json``, or a folder with one.
        kv_dtype: type of keys and values, as :func:`pagedkv.models.read_model` takes it.

    Raises:
        ConfigurationError: there is no such preset or file; no class for it; a layer keeps what cannot be sized.

    Cost: for a config's class the import of transformers, and up to ten seconds; the same config again costs nothing.
    """
    if not asks_class(name_or_path):
        return read_by_table(name_or_path, kv_dtype)
    config = read_config(name_or_path)
    return _by_class(name_or_path, config.source, json.dumps(config.values), kv_dtype)


@cache
def _by_class(name: str, source: str, config: str, kv_dtype: str | None) -> ModelMemory:
    """Ask a class once for each content of a config: a plan asks for every point."""
    from pagedkv.probe.sizing import memory_of  # noqa: PLC0415 - imports torch

    return memory_of(name, ModelConfig(source, json.loads(config)), kv_dtype)
