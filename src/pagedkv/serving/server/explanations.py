"""What a client gets of an explanation: where its prompt's hit ended and why, without other tenants' content."""

from typing import Any, Final

from pagedkv.memory.contract.miss_causes import Explanation, MissCause
from pagedkv.serving.server.access import Caller

__all__ = ["as_explanation"]

OTHERS: Final = frozenset(
    {MissCause.OTHER_SALT, MissCause.CHANGED_TOKENS, MissCause.OTHER_ADAPTER, MissCause.OTHER_MEDIA}
)
"""Causes that may rest on what another tenant has cached, where nothing of the prompt hits."""


def as_explanation(explanation: Explanation | None, caller: Caller) -> dict[str, Any] | None:
    """Return where a prompt's hit ended and why, without what another tenant's content would give away.

    Which token stands where a prompt differs is never told; where nothing hits, a cause that compares the prompt with
    other content is told as "never stored".
    """
    if explanation is None:
        return None
    cause = explanation.cause
    if not caller.is_alone and explanation.num_hit_tokens == 0 and cause in OTHERS:
        return {"num_prompt_tokens": explanation.num_tokens, "num_hit_tokens": 0, "cause": MissCause.NEVER_STORED.value}
    return {
        "num_prompt_tokens": explanation.num_tokens,
        "num_hit_tokens": explanation.num_hit_tokens,
        "cause": cause.value,
        "position": explanation.position,
    }
