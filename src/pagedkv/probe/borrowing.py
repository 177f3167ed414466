"""A model that others may own too, for the time of a pass: whose attention it calls, and for which pass.

The pass that is under way, for the attention function that a model calls by name.

Models do not pass every keyword on, so the pass cannot be an argument of the call. It is kept in a context variable, so
that engines in different threads have different passes.

BorrowedModel: a model whose attention is the engine's for the time of a pass, and whose it was before afterwards.

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
from contextvars import ContextVar
from typing import Any, Final, Protocol, final
from weakref import WeakValueDictionary

import torch

from pagedkv.errors import EngineError
from pagedkv.probe import compat

__all__ = ["IMPLEMENTATION", "PROBE", "AttentionListener", "BorrowedModel", "current_pass", "listening"]
IMPLEMENTATION: Final = "pagedkv"
PROBE: Final = "pagedkv_probe"


class AttentionListener(Protocol):
    """Computes the attention calls of a forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Compute one: query, key, value ``[batch, heads, tokens, dim]`` -> ``[batch, tokens, heads, value_dim]``."""

    def make_mask(self, options: dict[str, Any]) -> object:
        """Return the mask for a call of the mask function."""


_CURRENT: Final[ContextVar[AttentionListener | None]] = ContextVar("pagedkv pass", default=None)


@contextmanager
def listening(listener: AttentionListener) -> Iterator[None]:
    """Make a listener compute the calls of this context."""
    token = _CURRENT.set(listener)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: Any,  # noqa: ANN401 - each model's own
) -> tuple[torch.Tensor, None]:
    return current_pass().attend(module, query, key, value, attention_mask, options), None


def _mask(**options: Any) -> object:  # noqa: ANN401 - as transformers calls it
    return current_pass().make_mask(options)


def current_pass() -> AttentionListener:
    """Return the pass that is under way in this context. Raises EngineError: there is none."""
    listener = _CURRENT.get()
    if listener is None:
        raise EngineError(
            f"the attention {IMPLEMENTATION!r} was called outside of an engine's step: either an engine computes with "
            "this model in another thread, then call it between steps, or a copy of it (copy.deepcopy); or it was "
            "given this implementation for good, then give it another one (model.set_attn_implementation)"
        )
    return listener


compat.register(IMPLEMENTATION, _attention)  # no mask function: models make no masks, then
compat.register(PROBE, _attention, _mask)


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
