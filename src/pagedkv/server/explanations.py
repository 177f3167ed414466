"""The explanation that a client gets: where its prompt's hit ended and why, without other tenants' content."""

from typing import Any, Final

from pagedkv.contract.miss_causes import Explanation, MissCause
from pagedkv.server.access import Caller

__all__ = ["as_explanation"]

REPORTED_AS_NEVER_STORED: Final = frozenset(
    {
        MissCause.OTHER_SALT,
        MissCause.CHANGED_TOKENS,
        MissCause.OTHER_ADAPTER,
        MissCause.OTHER_MEDIA,
        MissCause.NEVER_STORED,
        MissCause.UNKNOWN,
    }
)
"""Causes that may depend on other tenants' cached content, where no token of the prompt hits."""


def as_explanation(explanation: Explanation | None, caller: Caller) -> dict[str, Any] | None:
    """Return where a prompt's hit ended and why, without revealing other tenants' content.

    The answer never contains the cached token that differs from the prompt's. Where no token hits, all causes that
    compare the prompt with other content, and those of content without a record, are reported as "never stored" at
    position 0.
    """
    if explanation is None:
        return None
    cause = explanation.cause
    if not caller.has_no_tenant and explanation.num_hit_tokens == 0 and cause in REPORTED_AS_NEVER_STORED:
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
