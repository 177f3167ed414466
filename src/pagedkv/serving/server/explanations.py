"""What a client gets of an explanation: where its prompt's hit ended and why, without other tenants' content."""

from typing import Any, Final

from pagedkv.memory.contract.miss_causes import Explanation, MissCause
from pagedkv.serving.server.access import Caller

__all__ = ["as_explanation"]

TOLD_ALIKE: Final = frozenset(
    {
        MissCause.OTHER_SALT,
        MissCause.CHANGED_TOKENS,
        MissCause.OTHER_ADAPTER,
        MissCause.OTHER_MEDIA,
        MissCause.NEVER_STORED,
        MissCause.UNKNOWN,
    }
)
"""Causes whose difference may rest on what another tenant has cached, where nothing of the prompt hits."""


def as_explanation(explanation: Explanation | None, caller: Caller) -> dict[str, Any] | None:
    """Return where a prompt's hit ended and why, without what another tenant's content would give away.

    Which token stands where a prompt differs is never told. Where nothing hits, causes that compare the prompt with
    other content, and those of content without a record, are all told as "never stored" at position 0.
    """
    if explanation is None:
        return None
    cause = explanation.cause
    if not caller.is_alone and explanation.num_hit_tokens == 0 and cause in TOLD_ALIKE:
        return {
            "num_prompt_tokens": explanation.num_tokens,
            "num_hit_tokens": 0,
            "cause": MissCause.NEVER_STORED.value,
            "position": 0,
        }
    return {
        "num_prompt_tokens": explanation.num_tokens,
        "num_hit_tokens": explanation.num_hit_tokens,
        "cause": cause.value,
        "position": explanation.position,
    }
