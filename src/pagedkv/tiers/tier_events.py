"""TierEventLog: the events of an engine's tiers, by medium, for a publisher; and all entries, for a snapshot.

Stores list entries by key and record events of keys. Two tiers of one medium are one medium for consumers, so a key is
announced as stored when the first of them has it, and as removed when none has it any more.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, final

import numpy as np

from pagedkv.contract.answers import CLEARED, GAP, REMOVED, STORED, TierEvents
from pagedkv.tiers.words import StoreEvents, array_of

HOST: Final = "host"
MOST_TIER_EVENTS: Final = 2**20
"""Most events of a store between two drains, beside one for each of its entries."""


class _EventStore(Protocol):
    def drain_events(self) -> StoreEvents: ...


def published_medium(medium: str) -> str:
    """Return the name of a medium in published events: CPU for host memory, as in vLLM's; others in capitals.

    >>> published_medium("host"), published_medium("redis")
    ('CPU', 'REDIS')
    """
    return "CPU" if medium == HOST else medium.upper()


@final
class TierEventLog:
    """The entries that were announced, by medium.

    Args:
        run_tokens: tokens of a run of the model; 0 if its entries are ends alone.
    """

    def __init__(self, run_tokens: int) -> None:
        self._run_tokens = run_tokens
        self._of_store: dict[int, tuple[str, set[bytes]]] = {}
        self._counts: dict[str, Counter[bytes]] = {}

    def drain(self, stores: Sequence[tuple[str, _EventStore]]) -> tuple[TierEvents, ...]:
        """Take the events of all stores since the last call. O(events).

        Entries of a store that is not among them any more are announced as removed. A store that lost events begins
        anew: its earlier entries are announced as removed, so that no consumer counts what is not there.

        Args:
            stores: the media, by their names in tiers, and the stores.
        """
        changed: dict[str, list[tuple[int, bytes]]] = {}
        present = {id(store) for _, store in stores}
        for gone in [number for number in self._of_store if number not in present]:
            medium, keys = self._of_store.pop(gone)
            self._remove(changed, medium, keys)
        for name, store in stores:
            medium = published_medium(name)
            _, held = self._of_store.setdefault(id(store), (medium, set()))
            events = store.drain_events()
            for kind, row in zip(events.kinds.tolist(), events.keys, strict=True):
                key = row.tobytes()
                if kind in {CLEARED, GAP}:
                    self._remove(changed, medium, held)
                    held.clear()
                elif kind == STORED and key not in held:
                    held.add(key)
                    self._add(changed, medium, key)
                elif kind == REMOVED and key in held:
                    held.discard(key)
                    self._remove(changed, medium, (key,))
        return tuple(self._events(medium, pairs) for medium, pairs in changed.items() if pairs)

    def entries(self) -> tuple[TierEvents, ...]:
        """Return all announced entries by medium, as stored ones. O(entries)."""
        return tuple(
            self._events(medium, [(STORED, key) for key in counts]) for medium, counts in self._counts.items() if counts
        )

    def _add(self, changed: dict[str, list[tuple[int, bytes]]], medium: str, key: bytes) -> None:
        counts = self._counts.setdefault(medium, Counter())
        counts[key] += 1
        if counts[key] == 1:
            changed.setdefault(medium, []).append((STORED, key))

    def _remove(self, changed: dict[str, list[tuple[int, bytes]]], medium: str, keys: Iterable[bytes]) -> None:
        counts = self._counts.setdefault(medium, Counter())
        for key in keys:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
                changed.setdefault(medium, []).append((REMOVED, key))

    def _events(self, medium: str, pairs: Sequence[tuple[int, bytes]]) -> TierEvents:
        kinds = np.array([kind for kind, _ in pairs], np.int32)
        return TierEvents(medium, self._run_tokens, kinds, array_of([key for _, key in pairs]))
