"""Explanations: how much of a prompt hits, where that ends, and why.

Values alone; :mod:`pagedkv.memory.space.miss_analysis` finds them. ``str`` of an explanation is a sentence.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["ORDER", "Explanation", "Miss", "MissCause", "number_of"]


class MissCause(Enum):
    """Why tokens do not hit.

    What was cached, and is known to be gone, comes before what is cached and differs, that before what nobody has seen.
    """

    # The prompt itself
    NOT_FULL = "block not full"
    """What is left fills no block, or ends with the prompt's last token, which is always computed."""
    BOUNDED = "bounded by the caller"
    NOT_CACHING = "no prefix caching"

    # Not there yet
    BEING_COMPUTED = "being computed"
    """The open step computes it, and nobody else can take that over."""
    LOADING = "being loaded"

    # It was there, and went
    EVICTED = "evicted"
    """Handed out for other content, since the pool was full."""
    SUPERSEDED = "superseded"
    """Its sequence was freed as replaced by another one, and its blocks were the first to be handed out."""
    WINDOW_GONE = "window gone"
    """The beginning is known, but no longer what a window or a chunk reads before this place."""
    STATE_GONE = "state gone"
    ORPHANED = "orphaned"
    """Still cached, but what it continues was evicted and computed again: nobody finds it before it is computed too."""
    OTHER_DIGEST = "another digest"
    """Cached, but the digest that was brought for it, or with which it was stored, is not its own."""
    OVERWRITTEN = "overwritten"
    """The sequence that held it was rolled back."""
    CALLED_OFF = "called off"
    """Never computed: the step failed, or everybody left who was to compute it."""
    WITHDRAWN = "withdrawn"
    FORGOTTEN = "forgotten on request"
    RESET = "cache reset"
    INVALIDATED = "memory given back"
    OTHER_EPOCH = "another weights epoch"

    # Something else is there
    OTHER_ADAPTER = "another adapter"
    OTHER_SALT = "another salt"
    OTHER_MEDIA = "another medium"
    CHANGED_TOKENS = "changed tokens"
    """What is cached goes on otherwise, after at least one token in common."""

    # Nothing is known of it
    NEVER_STORED = "never stored"
    UNKNOWN = "unknown"
    """Never stored, or so long ago that it is forgotten."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Tokens ``[start, end)`` of a prompt that do not hit, and why.

    Tokens behind a gap that are cached themselves do not hit because of the gap.
    """

    start: int
    end: int
    cause: MissCause

    @property
    def num_tokens(self) -> int:
        """Count them."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a prompt's hit ended, and why.

    Args:
        num_tokens: tokens of the prompt.
        num_hit_tokens: leading tokens that hit.
        cause: why no more did.
        position: the first token that the cause concerns: where the block begins that is missing, and for changed
            tokens the first one that differs.
        group: index of the group that lacks it; None where no group does.
        token_id: for changed tokens what stands at that position in the cache, None where nothing does; else None.
        age: blocks that the pool has handed out since the content went; None where it did not go, or nobody knows.
        misses: all that does not hit, from ``num_hit_tokens`` to ``num_tokens``, in runs of one cause; empty in an
            explanation that was recorded.
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
"""Causes by number, as records keep them."""


def number_of(cause: MissCause) -> int:
    """Tell a cause's number."""
    return ORDER.index(cause)
