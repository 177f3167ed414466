"""Promises: the blocks that routed prompts will store, as long as no event has confirmed them.

When a prompt is routed to a replica, its blocks count as promised there. So further requests of the same prefix are
routed to the same replica, before the events of the first one arrive. A promise ends with the event of its block, or
after its time: then the block was not stored, since the request was rejected, or it was evicted before its event
arrived.

Promises are kept in two generations, and the older one is dropped whole, so they last for one to two periods.
"""

from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from pagedkv.blocks.digests import words_of_digests
from pagedkv.contract.events import CacheEvents, TierEvents
from pagedkv.routing.prompts import HashedPrompt
from pagedkv.routing.residency import Residency

__all__ = ["Promises"]


@final
class Promises:
    """Promised blocks of all replicas.

    Args:
        cached_groups: number, block size and pool of each cached group.
        period_s: promises last for one to two periods.
    """

    def __init__(self, cached_groups: Sequence[tuple[int, int, str]], period_s: float) -> None:
        self._groups = [(number, size) for number, size, _ in cached_groups]
        self._period_s = period_s
        self._began_s = 0.0
        self._young, self._old = Residency(), Residency()

    def advance(self, now_s: float) -> None:
        """Drop promises whose time is over."""
        if now_s >= self._began_s + self._period_s:
            is_long = now_s >= self._began_s + 2 * self._period_s
            self._old, self._young = (
                self._young,
                self._old,
            )  # the table is cleared and used again, which is faster than allocating a new one
            self._young.empty()
            if is_long:
                self._old.empty()
            self._began_s = now_s

    @property
    def generations(self) -> tuple[Residency, Residency]:
        """The younger and the older promises."""
        return self._young, self._old

    def promise(self, prompt: HashedPrompt, replica: int, num_confirmed_tokens: int = 0) -> None:
        """Promise a prompt's blocks after the confirmed tokens to a replica, by its number. O(blocks)."""
        for number, size in self._groups:
            digests = prompt.digests[size][num_confirmed_tokens // size :]
            self._young.add(digests, np.full(len(digests), number, np.int32), replica)

    def withdraw(self, prompt: HashedPrompt, replica: int, num_hit_tokens: int) -> None:
        """End the promises that a prompt made to a replica beyond the tokens that hit there before. O(blocks)."""
        for number, size in self._groups:
            digests = prompt.digests[size][num_hit_tokens // size :]
            groups = np.full(len(digests), number, np.int32)
            for generation in (self._young, self._old):
                generation.remove(digests, groups, replica)

    def settle(self, events: Iterable[CacheEvents | TierEvents], replica: int) -> None:
        """End the promises of blocks whose events arrived; promises are of the device alone. O(events)."""
        for each in events:
            if isinstance(each, TierEvents):
                continue
            words = words_of_digests(each.digests, len(each.kinds))
            is_block = each.groups >= 0
            for generation in (self._young, self._old):
                generation.remove(words[is_block], each.groups[is_block], replica)

    def clear(self, replica: int) -> None:
        """Drop the promises of a replica, when it is removed."""
        self._young.clear(replica)
        self._old.clear(replica)
