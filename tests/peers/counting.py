"""What is resident, counted by hand from events of the peers' own classes."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

__all__ = ["Residents", "residents"]

Residents: TypeAlias = dict[str, set[tuple[int, object]]]


def residents(batches: Iterable[Any], cleared: frozenset[str] = frozenset({"GPU"})) -> Residents:
    """Give (group, hash) of what is there, by medium.

    Args:
        batches: decoded, in order.
        cleared: media that a clear empties.
    """
    copies: Counter[tuple[str, int, object]] = Counter()
    for event in (event for batch in batches for event in batch.events):
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            for key in [key for key in copies if key[0] in cleared]:
                del copies[key]
            continue
        for block_hash in event.block_hashes:
            key = (event.medium or "GPU", getattr(event, "group_idx", 0) or 0, block_hash)
            copies[key] += {"BlockStored": 1, "BlockRemoved": -1}[kind]
    there: Residents = {}
    for (medium, group, block_hash), num_copies in copies.items():
        if num_copies > 0:
            there.setdefault(medium, set()).add((group, block_hash))
    return there
