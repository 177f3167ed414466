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

import importlib
import typing

__version__ = "0.1.0"  # the only place of the version, so that a checkout without metadata has it too


def _find(name: str) -> object:
    """Import all public names from :mod:`pagedkv.public` when one is first used; return the named one.

    Raises:
        AttributeError: there is no such name.
    """
    names = vars(importlib.import_module("pagedkv.public"))
    here = globals()  # later uses find the names here
    here.update({each: names[each] for each in ("__all__", *names.get("__all__", ())) if each in names})
    if name not in here:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return here[name]


def __dir__() -> list[str]:
    """List all names, with the public ones, which it imports."""
    _find("__all__")
    return sorted(globals())


if typing.TYPE_CHECKING:
    from pagedkv.public import *  # noqa: F403 - so that type checkers see each name
    from pagedkv.public import __all__ as __all__
else:
    __getattr__ = _find  # hidden from type checkers, which would otherwise accept any name
