"""Explanations: how much of a prompt hits, where the hit ends, and why.

Values only; :mod:`pagedkv.space.explaining` computes them. ``str`` of an explanation is one sentence.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["ORDER", "Explanation", "Miss", "MissCause", "number_of"]


class MissCause(Enum):
    """Why tokens do not hit.

    Content that was cached and is gone comes first, then cached content that differs, then content without a record.
    """

    # The prompt itself
    NOT_FULL = "block not full"
    """The rest of the prompt fills no block, or ends with the prompt's last token, which is always computed."""
    BOUNDED = "bounded by the caller"
    NOT_CACHING = "no prefix caching"

    # Not there yet
    BEING_COMPUTED = "being computed"
    """Not hit while the open step computes it: no other row could take that over."""
    LOADING = "being loaded"

    # It was cached, and is gone
    EVICTED = "evicted"
    """Allocated for other content, since the pool was full."""
    SUPERSEDED = "superseded"
    """Its sequence was freed as superseded by another one, so its blocks were evicted first."""
    WINDOW_GONE = "window gone"
    """The beginning is cached, but not the blocks that a window or a chunk reads before this place."""
    STATE_GONE = "state gone"
    ORPHANED = "orphaned"
    """Still cached, but its prefix was evicted and computed again: it can be hit once it is computed again too."""
    OTHER_DIGEST = "another digest"
    """Cached, but the digest given for it, or with which it was stored, is not that of its content."""
    OVERWRITTEN = "overwritten"
    """The sequence that held it was rolled back."""
    CALLED_OFF = "called off"
    """Never computed: the step failed, or every row that was to compute it was freed."""
    WITHDRAWN = "withdrawn"
    FORGOTTEN = "forgotten on request"
    RESET = "cache reset"
    INVALIDATED = "memory given back"
    OTHER_EPOCH = "another weights epoch"

    # Other content is cached
    OTHER_ADAPTER = "another adapter"
    OTHER_SALT = "another salt"
    OTHER_MEDIA = "another medium"
    CHANGED_TOKENS = "changed tokens"
    """Cached content has at least one token in common, and then continues differently."""

    # There is no record of it
    NEVER_STORED = "never stored"
    UNKNOWN = "unknown"
    """Never stored, or evicted so long ago that its ghost is gone."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Tokens ``[start, end)`` of a prompt that do not hit, and why.

    Tokens behind a gap do not hit because of the gap, even where they are cached.
    """

    start: int
    end: int
    cause: MissCause

    @property
    def num_tokens(self) -> int:
        """Count the tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a prompt's hit ended, and why.

    Args:
        num_tokens: tokens of the prompt.
        num_hit_tokens: leading tokens that hit.
        cause: why the hit ended there.
        position: the first token that the cause concerns: the beginning of the missing block, or, for changed tokens,
            the first one that differs.
        group: index of the group that lacks the block; None where no group does.
        token_id: for changed tokens, the cached token at that position, or None where there is none; else None.
        age: blocks that the pool has allocated since the content was lost; None if it was not lost or has no record.
        misses: all tokens that do not hit, from ``num_hit_tokens`` to ``num_tokens``, in runs of one cause; empty in a
            recorded explanation.
    """

    num_tokens: int
    num_hit_tokens: int
    cause: MissCause
    position: int
    group: int | None = None
    token_id: int | None = None
    age: int | None = None
    misses: tuple[Miss, ...] = ()

    def __str__(self) -> str:
        text = f"{self.num_hit_tokens:,} of {self.num_tokens:,} tokens hit; {self.cause.value} at {self.position:,}"
        if self.group is not None:
            text += f" in group {self.group}"
        if self.token_id is not None:
            text += f", where {self.token_id} is cached"
        if self.age is not None:
            text += f", {self.age:,} blocks ago"
        return text


ORDER: Final = tuple(MissCause)
"""Causes by number; records store the number."""


def number_of(cause: MissCause) -> int:
    """Return the number of a cause."""
    return ORDER.index(cause)
