"""Prompt tokens that did not hit, by cause."""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from pagedkv.contract.miss_causes import Miss, MissCause

__all__ = ["MISS_KINDS", "MISS_LABELS", "MissMeter"]

_KINDS: Final = {
    "capacity": {
        MissCause.EVICTED,
        MissCause.ORPHANED,
        MissCause.SUPERSEDED,
        MissCause.WINDOW_GONE,
        MissCause.STATE_GONE,
    },
    "changed": {MissCause.CHANGED_TOKENS},
    "keys": {MissCause.OTHER_SALT, MissCause.OTHER_ADAPTER, MissCause.OTHER_MEDIA, MissCause.OTHER_EPOCH},
    "short": {MissCause.NOT_FULL},
    "new": {MissCause.NEVER_STORED},
    "being_computed": {MissCause.BEING_COMPUTED, MissCause.LOADING},
    "unknown": {MissCause.UNKNOWN},
}
OTHER: Final = "other"
MISS_KINDS: Final = (*_KINDS, OTHER)
"""Kinds of causes. Every cause has one of them."""

MISS_LABELS: Final = MappingProxyType(
    {
        "capacity": "evicted, or dropped with a window",
        "changed": "differs from the cached text",
        "keys": "another salt, adapter, medium or epoch",
        "short": "no full block, or the last token",
        "new": "never stored",
        "being_computed": "being computed",
        "unknown": "never stored, or no longer known",
        "other": "other causes",
    }
)
"""The kinds in words, in the order of tables and pages."""

KIND_OF: Final = {cause: kind for kind, causes in _KINDS.items() for cause in causes}


class MissMeter:
    """Counts tokens by kind of cause.

    Attributes:
        num_tokens: the tokens of each kind.
    """

    def __init__(self) -> None:
        self.num_tokens = dict.fromkeys(MISS_KINDS, 0)

    def note(self, misses: Iterable[Miss]) -> None:
        """Count the missed tokens of one prompt."""
        for miss in misses:
            self.num_tokens[KIND_OF.get(miss.cause, OTHER)] += miss.num_tokens

    def as_dict(self) -> dict[str, object]:
        """Return the counts for JSON."""
        return {"num_tokens": sum(self.num_tokens.values()), "by_cause": dict(self.num_tokens)}
