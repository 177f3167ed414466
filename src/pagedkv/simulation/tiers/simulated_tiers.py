"""The tiers of a simulation, for the virtual clock. The code of an engine decides about loads and offers.

::

    scheduler.schedule()   begins_load(request)       a request waits for a load, or is admitted
    before a step          before_step(now)           actions of the media end, and loads whose answers have come
    after a step           after_step(...)            prompts and answers are offered
    nothing to compute     next_event_s()             the clock advances to the next end of an action
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.events import TierEvents
from pagedkv.scheduling import Batch, Progress, Request
from pagedkv.simulation.tiers.config import SimulatedTier
from pagedkv.simulation.tiers.medium import Medium
from pagedkv.simulation.tiers.no_bytes import NoBytes
from pagedkv.simulation.tiers.virtual_store import VirtualStore
from pagedkv.space import BlockSpace, PrefixHit
from pagedkv.tiers import StoreConfig
from pagedkv.tiers.entry_blocks import EntryLayout
from pagedkv.tiers.served import ComputeRate, LoadUnderWay, RequestLoads, ServedTier, TierCause, TierStatistics
from pagedkv.tiers.tier_events import MOST_TIER_EVENTS, TierEventLog
from pagedkv.tiers.tier_loads import TierLoads
from pagedkv.tiers.tier_offers import TierOffers

__all__ = ["SimulatedTiers"]


@final
class SimulatedTiers:
    """Tiers on the virtual clock; a scheduler's loader.

    Args:
        tiers: the tiers, the fastest first.
        space: the block space.
        block_nbytes: bytes of a block of each group.
        on_loaded: called with each request whose load has ended.

    Attributes:
        num_hit_tokens: hit tokens at first admissions that were loaded from a tier for the request, by medium.

    Raises:
        ConfigurationError: an entry is too large for a store.
    """

    def __init__(
        self,
        tiers: Sequence[SimulatedTier],
        space: BlockSpace,
        block_nbytes: Sequence[int],
        on_loaded: Callable[[Request], None],
    ) -> None:
        layout = EntryLayout(space.config.groups, block_nbytes)
        entry_nbytes = max(layout.run_nbytes, layout.end_nbytes)
        self._layout = layout
        self._stores = [
            VirtualStore(_store_config(each, entry_nbytes, space), Medium(each.bandwidth, each.latency_s), block_nbytes)
            for each in tiers
        ]
        self._tiers = [
            ServedTier(each.medium, each.medium, each.loads, each.deadline_s, store)
            for each, store in zip(tiers, self._stores, strict=True)
        ]
        self._events = TierEventLog(layout.run_tokens if layout.has_runs else 0)
        self._rate = ComputeRate()
        self._records: dict[Request, RequestLoads] = {}
        self._tokens: dict[Request, Int32Array] = {}
        block_bytes = NoBytes()
        self._offers = TierOffers(self._tiers, space, layout, block_bytes)
        self._loads = TierLoads(
            self._tiers,
            space,
            layout,
            block_bytes,
            rate=self._rate,
            of_request=self._record,
            on_arrival=_ignore_arrival,
            on_loaded=on_loaded,
        )
        self.num_hit_tokens: dict[str, int] = dict.fromkeys((each.medium for each in tiers), 0)

    @property
    def tiers(self) -> Sequence[ServedTier]:
        """The tiers with their counts, the fastest first."""
        return self._tiers

    def drain_events(self) -> tuple[TierEvents, ...]:
        """Take the events of entries since the last call, by medium; none unless ``SpaceConfig.events``."""
        return self._events.drain([(tier.medium, store) for tier, store in zip(self._tiers, self._stores, strict=True)])

    def entries(self) -> tuple[TierEvents, ...]:
        """Return all entries whose events were drained, by medium. O(entries)."""
        return self._events.entries()

    def _record(self, request: Request) -> RequestLoads:
        if request not in self._records:
            self._records[request] = RequestLoads(self._layout.new_chain(request.keys))
        return self._records[request]

    # Loads: the scheduler's loader

    def begins_load(self, request: Request, token_ids: Int32Array, match: PrefixHit) -> bool:
        """Begin or join a load of the blocks after a request's hit; return whether the request must wait for it."""
        self._tokens[request] = token_ids
        return self._loads.begins_load(request, token_ids, match)

    def give_way(self) -> bool:
        """End all loads under way, so that their blocks are free; return whether there were any."""
        return self._loads.end_all(TierCause.GAVE_WAY)

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads under way, one value for each tier of a load. O(loads)."""
        return self._loads.under_way()

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        return tuple(tier.statistics() for tier in self._tiers)

    # The clock

    def before_step(self, now_s: float, *, none_running: bool) -> None:
        """Report the actions that end until now, and end the loads whose answers have come."""
        for store in self._stores:
            store.advance(now_s)
        self._loads.advance(none_running=none_running)

    def next_event_s(self, now_s: float) -> float | None:
        """Return the time of the next event: now, if a load has its answers; None if no event is due."""
        if self._loads.has_answered:
            return now_s
        times = [each for each in (store.next_event_s() for store in self._stores) if each is not None]
        return min(times) if times else None

    def admitted(self, request: Request, num_hit_tokens: int) -> None:
        """Count the tokens of a request's hit that tiers have loaded for it."""
        own = self._records.get(request)
        if own is None:
            return
        own.admitted(num_hit_tokens)
        own.computed()
        if not request.num_preemptions:
            for medium, num_tokens in own.num_hit_tokens.items():
                self.num_hit_tokens[medium] += num_tokens

    def progressed(
        self, batch: Batch, progress: Progress, answers: Callable[[Request], Sequence[Int32Array]], now_s: float
    ) -> None:
        """Offer the prompts and answers that a step has computed; forget requests that have ended.

        Args:
            batch: the step.
            progress: its results.
            answers: returns the generated tokens of each sequence of a request; none where they are not offered.
            now_s: the virtual time.
        """
        for store in self._stores:
            store.advance(now_s)
        for request in progress.first_tokens:
            if not request.is_done:
                prompt = self._tokens[request][: request.num_prompt_tokens]
                self._offer(request, prompt, len(prompt))
        for request in progress.finished:
            prompt = self._tokens[request][: request.num_prompt_tokens]
            for answer in answers(request):
                tokens = np.concatenate((prompt, answer))
                self._offer(request, tokens, len(tokens) - 1)
            self.ended(request)
        if self._layout.has_ends:
            self._offer_chunks(batch)

    def after_step(self, batch: Batch, seconds: float) -> None:
        """Record the duration of a step, and make the waiting offers."""
        num_prefilled = sum(len(chunk.token_ids) for chunk in batch.prefilling)
        self._rate.note(num_prefilled, num_prefilled + len(batch.decoded_token_ids), seconds)
        self._offers.advance(is_idle=False)

    def ended(self, request: Request) -> None:
        """Forget a request; a load that only it waits for ends."""
        self._loads.leave(request)
        self._records.pop(request, None)
        self._tokens.pop(request, None)

    def check(self) -> None:
        """Check every invariant of the stores. Raises AssertionError. O(entries)."""
        for store in self._stores:
            store.check()

    def _offer(self, request: Request, token_ids: Int32Array, num_settled: int) -> None:
        self._offers.add(token_ids, num_settled, request.keys, self._record(request).chain)

    def _offer_chunks(self, batch: Batch) -> None:
        """Offer the computed chunks of prompts, since windows and states at their ends are dropped a step later."""
        for chunk in batch.prefilling:
            if not chunk.num_samples and not chunk.request.is_done and not chunk.request.num_generated:
                prompt = self._tokens[chunk.request][: chunk.request.num_prompt_tokens]
                self._offer(chunk.request, prompt[: chunk.stop + 1], chunk.stop)


def _ignore_arrival() -> None:
    """Do nothing: the clock polls for answers."""


def _store_config(tier: SimulatedTier, entry_nbytes: int, space: BlockSpace) -> StoreConfig:
    """Return the settings of a tier's store, with a log of events if the space has one."""
    config = tier.store_config(entry_nbytes)
    return replace(config, max_events=config.max_entries + MOST_TIER_EVENTS) if space.config.events else config
