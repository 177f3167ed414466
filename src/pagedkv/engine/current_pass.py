"""The pass that is under way, for the attention function that a model calls by name.

Models do not pass every keyword on, so the pass cannot be an argument of the call. It is kept in a context variable, so
that engines in different threads have different passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch

from pagedkv.engine import compat
from pagedkv.errors import EngineError

__all__ = ["IMPLEMENTATION", "PROBE", "AttentionListener", "current_pass", "listening"]

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
