"""BorrowedModel: a model whose attention is the engine's for the time of a pass, and whose it was before afterwards.

Which attention function a model calls is written in its configs, one word for every thread. Two engines in two threads
that each note the word, change it and restore it would restore each other's. So a pass holds a lock for each config
that it writes in, and the pass of another engine waits until it is over::

    engine 1   | sdpa -> pagedkv  ... pass ...  pagedkv -> sdpa |
    engine 2     waits                                           | sdpa -> pagedkv  ... pass ... |

Locks go by config, not by model, since two models may be made of one config. They cannot lie in a config, which is
copied and written to files; so they are listed here while an engine refers to them.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, final
from weakref import WeakValueDictionary

from pagedkv.engine import compat

__all__ = ["BorrowedModel"]


@final
class _ConfigLock:
    """The lock of one config. The config is kept alive, so that no other object gets its id."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.lock = threading.RLock()  # reentrant: a pass inside a pass restores what it found


_LISTING: Final = threading.Lock()
_LOCKS: Final[WeakValueDictionary[int, _ConfigLock]] = WeakValueDictionary()


@final
class BorrowedModel:
    """A model that may belong to others too; O(modules) to make.

    Args:
        model: the model, whose configs stay the same ones.
        others: models that are borrowed together with it.
    """

    def __init__(self, model: compat.Model, *others: compat.Model) -> None:
        self._model = model
        found = [config for each in (model, *others) for config in compat.attention_configs(each)]
        self._configs = tuple({id(config): config for config in found}.values())
        with _LISTING:
            locks = {id(config): _LOCKS.setdefault(id(config), _ConfigLock(config)) for config in self._configs}
        self._locks = [locks[key] for key in sorted(locks)]  # always taken in this order, which excludes deadlocks

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Set the attention function that the model calls, within a context; waits for other threads' passes."""
        with self.alone(), compat.implementation(self._configs, name):
            yield

    @contextmanager
    def dense(self, *, has_cap: bool) -> Iterator[None]:
        """Let the model answer by itself for a while, with or without soft caps; waits as :meth:`calling` does."""
        with self.alone(), self.calling(compat.dense_implementation(self._model, has_cap=has_cap)):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread borrows the model, and let none do so for a while."""
        with ExitStack() as stack:
            for each in self._locks:
                stack.enter_context(each.lock)
            yield
