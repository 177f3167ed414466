"""pagedkv: the KV-cache memory system of an LLM serving engine, as a library.

>>> import numpy as np
>>> from pagedkv import BlockSpace, FullAttention, SpaceConfig
>>> space = BlockSpace(SpaceConfig((FullAttention(block_size=16),), num_blocks=1000))
>>> first = space.allocate(np.arange(100))
>>> plan = space.plan_step()
>>> space.acknowledge(plan.step_id)
>>> space.allocate(np.arange(100)).num_hit_tokens
96
"""

import typing as _typing
from importlib import import_module as _import_module

__version__ = "0.1.0"  # the only place of the version, so that a checkout without metadata has it too

_ROOMS: _typing.Final = (
    *("attention", "cluster", "device", "engine", "errors", "events", "fingerprint", "models", "plan_buffer", "report"),
    *("routing", "scheduling", "server", "simulation", "space", "tiers", "warming"),
)
"""The modules that users import, which the reference documents; some need extras."""


def _find(name: str) -> object:
    """Import all public names from :mod:`pagedkv.public`, or a module, when one is first used; return the named one.

    Raises:
        AttributeError: there is no such name, or what a module needs is not installed.
    """
    if name in _ROOMS:
        try:
            return _import_module(f"pagedkv.{name}")
        except ImportError as problem:  # ``from pagedkv import`` then imports the module itself, and tells it all
            raise AttributeError(f"module {__name__!r} cannot give {name!r}: {problem}") from problem
    names = vars(_import_module("pagedkv.public"))
    here = globals()  # later uses find the names here
    here.update({each: names[each] for each in ("__all__", *names.get("__all__", ())) if each in names})
    if name not in here:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return here[name]


def __dir__() -> list[str]:
    """List what users use: the public names, which it imports, and the modules, which it does not."""
    _find("__all__")
    ours = globals()
    return sorted({*ours["__all__"], *_ROOMS, *(name for name in ours if name.startswith("__"))})


if _typing.TYPE_CHECKING:
    from pagedkv.public import *  # noqa: F403 - so that type checkers see each name
    from pagedkv.public import __all__ as __all__
else:
    __getattr__ = _find  # hidden from type checkers, which would otherwise accept any name
