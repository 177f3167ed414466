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

__version__ = "0.1.0"  # written here alone: a checkout that was never installed knows it, too


def _find(name: str) -> object:
    """Import all public names when one is first asked for: :mod:`pagedkv.public` lists them, and says why so late.

    Raises:
        AttributeError: there is none such.
    """
    names = vars(importlib.import_module("pagedkv.public"))
    here = globals()  # where they are found from now on, beside the packages that they come from
    here.update({each: names[each] for each in ("__all__", *names.get("__all__", ())) if each in names})
    if name not in here:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return here[name]


def __dir__() -> list[str]:
    """List what is here, the public names too. Imports them."""
    _find("__all__")
    return sorted(globals())


if typing.TYPE_CHECKING:
    from pagedkv.public import *  # noqa: F403 - each name that public names again, known to checkers
    from pagedkv.public import __all__ as __all__
else:
    __getattr__ = _find  # checkers would take it for leave to use any name
