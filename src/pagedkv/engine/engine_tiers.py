"""EngineTiers: the tiers of one engine, as the engine's loop calls them, and what they hand over to other engines.

::

    scheduler.schedule()   begins_load(request)          a request waits for a load, or is admitted
                           admitted(request, hit)        what its hit owes to tiers
    a step                 before_step(), after_step()   loads end; queued content is copied and offered
    a prompt is computed   chunks_computed(), prompt_computed(request)   its blocks are queued for the tiers
    a request ends         ended(request)                so are those of its answers
    reset, new weights     reset(), renew()

All methods are called by the thread that drives the engine. Threads of the stores only set an event. Any failure of a
tier delays a request by its deadline at most, and the request then computes the tokens that were not loaded.

An engine may be garbage-collected without having been closed. The garbage collector runs a finalizer in whatever thread
it happens to run in, also in a thread of such a store, amid a change of that store. So the finalizer only puts a word
into a queue, and a thread of its own closes the stores.

A :class:`HandOff` tells where a prompt's blocks lie in shared tiers, for another engine, which goes on from there::

    engine A, which computes prompts           engine B, which decodes
    hand_over(prompt): flush, list    ----->   take_over(hand_off, prompt): compare the fingerprint, list
                                               generate(prompt): its blocks are loaded

The bytes go through a medium that both engines have: a folder, Redis, an object store. A hand-off has positions, the
fingerprint of the content and a digest of the prompt, and no tokens and no salt: the second engine computes the names
of the blocks from its own. With a link on both sides (:class:`~pagedkv.engine.prefix_file.NixlLink`) the bytes go from
memory to memory instead, and are in the second engine's cache when :func:`take_over_direct` returns.
"""

import atexit
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, final

from pagedkv.contract.answers import TierEvents
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.engine.content import StoredContent
from pagedkv.engine.prefix_file import NixlLink, bring_frames, cached_frames
from pagedkv.engine.request import EngineRequest
from pagedkv.errors import ConfigurationError, UnsupportedModelError
from pagedkv.scheduling import Batch, Request
from pagedkv.space import BlockSpace, PrefixHit, SpaceObserver
from pagedkv.tiers import BreakerState, HostMemory, Identity, RunChain, SharedStore, Tier, end_key_of
from pagedkv.tiers.entry_blocks import EntryLayout
from pagedkv.tiers.served import ComputeRate, LoadUnderWay, RequestLoads, ServedTier, TierCause, TierStatistics
from pagedkv.tiers.specs import BEFORE_EVICTION
from pagedkv.tiers.tier_events import MOST_TIER_EVENTS, TierEventLog, published_medium
from pagedkv.tiers.tier_loads import TierLoads
from pagedkv.tiers.tier_offers import TierOffers

LONGEST_WAIT_S: Final = 0.005
"""Longest wait of a step without work for a load; short, since the engine's thread takes no commands meanwhile."""
AT_EXIT_S: Final = 10.0
"""Seconds for stores to finish their writes at the end of the process."""
WHEN_STUCK_S: Final = 0.5
"""The same where the last flush did not end in time."""
WHEN_DROPPED_S: Final = 1.0
"""The same for an engine that is garbage-collected without having been closed."""
LAST_CALLS_S: Final = 0.1
"""Seconds for the last calls of a store to end, when the time for writes is over."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """The entries of one prompt in shared tiers. Its fields are plain values, which JSON has too.

    Args:
        fingerprint: of layout, weights and versions, as hexadecimal digits: equal where keys and values are.
        num_tokens: leading tokens of the prompt that can be loaded.
        run_tokens: tokens of a run.
        runs: by name of the tier: numbers of the stored runs, and their bytes.
        ends: by name of the tier: positions, in tokens, of the stored ends, and their bytes.
        media: by name of the tier: its medium.
        direct: where the frames of the prompt are in the memory of its engine, for a
            :class:`~pagedkv.engine.NixlLink`; None: they are in tiers.
        prompt: digest of these tokens with their salt, as hexadecimal digits; empty: unknown.
    """

    fingerprint: str
    num_tokens: int
    run_tokens: int
    runs: Mapping[str, Sequence[tuple[int, int]]]
    ends: Mapping[str, Sequence[tuple[int, int]]]
    media: Mapping[str, str]
    direct: Mapping[str, Any] | None = None
    prompt: str = ""


@final
class EngineTiers:
    """The tiers of an engine.

    Args:
        specs: the tiers' specifications, the fastest first.
        content: of the engine's blocks.
        space: the block space.
        on_loaded: called with each request whose load has ended.

    Raises:
        ConfigurationError: a tier does not answer; the message states what was tried, and none stays open.
        MissingExtraError: a package that a tier needs is not installed.
        UnsupportedModelError: the model has hooks of its forward pass.
    """

    def __init__(
        self,
        specs: Sequence[Tier],
        content: StoredContent,
        space: BlockSpace,
        on_loaded: Callable[[Request], None],
    ) -> None:
        self._space = space
        self._content = content
        self._layout = EntryLayout(space.config.groups, content.nbytes)
        entry_nbytes = max(self._layout.run_nbytes, self._layout.end_nbytes)
        identity = self._identity()
        block_bytes, memories = content.open_memory(specs, entry_nbytes)
        self._bytes = block_bytes
        self._tiers: list[OpenTier] = []
        try:
            for spec, memory in zip(specs, memories, strict=True):
                opened = OpenTier(spec, identity, entry_nbytes, memory, records_events=space.config.events)
                self._tiers.append(opened)
        except BaseException:
            _close(self._tiers, time.monotonic())
            raise
        self._events = TierEventLog(self._layout.run_tokens if self._layout.has_runs else 0)
        self._rate = ComputeRate()
        self._records: dict[Request, RequestLoads] = {}
        self._arrived = threading.Event()
        self._is_stuck = False
        self._withdrawn: set[bytes] = set()
        self._offers = TierOffers(self._tiers, space, self._layout, block_bytes, self._withdrawn)
        self._loads = TierLoads(
            self._tiers,
            space,
            self._layout,
            block_bytes,
            rate=self._rate,
            of_request=self._record,
            on_arrival=self._arrived.set,
            on_loaded=on_loaded,
            withdrawn=self._withdrawn,
        )
        space.observe(_Withdrawals(weakref.WeakMethod(self.withdraw)))
        at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(at_exit)
        self._dropped = DroppedStores(partial(_close_dropped, self._tiers))
        self._drop = weakref.finalize(self, _drop, self._dropped, at_exit)
        self._drop.atexit = False

    def _identity(self) -> Identity:
        return self._content.identity(self._layout.blocks_per_run)

    def _record(self, request: Request) -> RequestLoads:
        if request not in self._records:
            self._records[request] = RequestLoads(self._layout.new_chain(request.keys))
        return self._records[request]

    # Loads: the scheduler's loader

    def begins_load(self, request: Request, token_ids: Int32Array, match: PrefixHit) -> bool:
        """Begin or join a load of the blocks after a request's hit; return whether the request must wait for it.

        What its blocks are about to evict is stored first.
        """
        self._offers.make_way(len(token_ids) - match.num_tokens)
        return self._loads.begins_load(request, token_ids, match)

    def give_way(self) -> bool:
        """End all loads under way, so that their blocks are free; return whether there were any."""
        return self._loads.end_all(TierCause.GAVE_WAY)

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads that are under way."""
        return self._loads.under_way()

    # Steps

    def before_step(self, *, none_running: bool) -> None:
        """End loads whose tiers have answered, before a step; ``none_running``: copies delay no request."""
        self._arrived.clear()
        self._loads.advance(none_running=none_running)

    def await_load(self) -> None:
        """Wait briefly for the answer of a tier, before a step that computes nothing."""
        if len(self._loads):
            self._arrived.wait(LONGEST_WAIT_S)

    def after_step(self, batch: Batch, seconds: float, *, is_idle: bool) -> None:
        """Note the speed of a step, by which loads are predicted, and copy and offer queued content.

        Args:
            batch: what was computed; seconds: how long it took.
            is_idle: no request waits or runs.
        """
        num_prefilled = sum(len(chunk.token_ids) for chunk in batch.prefilling)
        self._rate.note(num_prefilled, num_prefilled + len(batch.decoded_token_ids), seconds)
        self._offers.note_step(seconds)
        self._offers.advance(is_idle=is_idle)
        for tier in self._tiers:
            tier.log_outage()

    # Requests

    def admitted(self, request: EngineRequest, num_hit_tokens: int) -> None:
        """Note how many tokens of a request's hit tiers have brought for it."""
        own = self._end_life(request)
        if own is not None:
            own.admitted(num_hit_tokens)
        self._report(request)

    def chunks_computed(self, batch: Batch, requests: Mapping[Request, EngineRequest]) -> None:
        """Offer the chunks of prompts that a step computed, while their windows and states are still in blocks."""
        if self._layout.has_ends:
            for chunk in batch.prefilling:
                if not chunk.num_samples and not chunk.request.is_done and not chunk.request.num_generated:
                    prompt = requests[chunk.request].prompt_token_ids
                    self._offer(chunk.request, prompt[: chunk.stop + 1], chunk.stop)

    def prompt_computed(self, request: EngineRequest) -> None:
        """Count the hit of a request, since a step behind it was acknowledged, and offer its prompt."""
        own = self._records.get(request.scheduled)
        if own is not None:
            own.computed()
        self._report(request)
        self._offer(request.scheduled, request.prompt_token_ids, len(request.prompt_token_ids))

    def ended(self, request: EngineRequest) -> None:
        """Offer a request's answers with their prompt, unless they are of beams; forget the request.

        A load that only it waits for ends.
        """
        for sample in request.samples if request.beams is None and request.first_token is not None else ():
            tokens = request.tokens_of(sample)
            self._offer(request.scheduled, tokens, len(tokens) - 1)
        self._end_life(request)
        self._report(request)
        self._loads.leave(request.scheduled)
        self._records.pop(request.scheduled, None)

    def _offer(self, request: Request, token_ids: Int32Array, num_settled: int) -> None:
        """Queue the tokens of a request for the tiers; ``num_settled`` of them are computed.

        If epochs are counted and hits may rest on older ones, only what one epoch has computed leaves the process.
        """
        if self._space.config.max_epoch_lag and request.epochs != (self._space.weights_epoch,) * 2:
            return
        self._offers.add(token_ids, num_settled, request.keys, self._record(request).chain)

    def _end_life(self, request: EngineRequest) -> RequestLoads | None:
        """Count the hit of a life that is over, if the receipt has it, and return the request's loads."""
        own = self._records.get(request.scheduled)
        if own is not None and request.scheduled.receipt.num_hit > own.num_hit_before:
            own.num_hit_before = request.scheduled.receipt.num_hit
            own.computed()
        return own

    def _report(self, request: EngineRequest) -> None:
        """Set what a request's output tells of tiers."""
        own = self._records.get(request.scheduled)
        if own is not None:
            request.tier_notes, request.num_loaded_tokens = tuple(own.notes), dict(own.num_hit_tokens)

    # Hand-off to another engine

    def hand_over(self, token_ids: Int32Array, keys: RequestKeys, timeout_s: float) -> HandOff:
        """Store what is computed, and list the entries of a prompt in shared tiers."""
        self.flush(timeout_s)  # what was not stored is not listed
        chain = self._layout.new_chain(keys)
        chain.extend(token_ids)
        num_tokens = self._loads.num_loadable(chain, len(token_ids))
        return entries_of(self._tiers, self._layout, chain, self._identity().fingerprint, num_tokens)

    def take_over(self, hand_off: HandOff, token_ids: Int32Array, keys: RequestKeys) -> int:
        """List the entries of a hand-off; return how many leading tokens of the prompt can be loaded now."""
        chain = self._layout.new_chain(keys)
        chain.extend(token_ids)
        announce(hand_off, self._tiers, self._layout, chain, self._identity().fingerprint)
        return self._loads.num_loadable(chain, len(token_ids))

    # All of it

    def forget(self, token_ids: Int32Array, keys: RequestKeys, start: int) -> int:
        """Remove a prefix from position ``start`` on, and what continues it, from every tier; count the entries."""
        self._offers.drop_queued()
        self._loads.end_all(TierCause.WITHDRAWN)
        chain = self._layout.new_chain(keys)
        chain.extend(token_ids)
        size = self._layout.block_size
        runs = chain.runs[start // self._layout.run_tokens :]
        if self._layout.has_ends:
            runs += [chain.end(place) for place in range(start // size + 1, chain.num_blocks + 1)]
        return sum(tier.store.withdraw(runs) for tier in self._tiers) if runs else 0

    def withdraw(self, digests: frozenset[bytes] | None) -> None:
        """Remove content that turned out bad: blocks with these digests, and what continues them; None: all content.

        It is neither loaded nor stored again in the life of this engine. The space is in the middle of an operation:
        it publishes nothing of the loads of such content.
        """
        self._offers.drop_queued()
        if digests is None:
            self._offers.drop()
            for tier in self._tiers:
                tier.store.reset()
            return
        self._withdrawn |= digests
        keys = [*digests, *map(end_key_of, digests)]
        for tier in self._tiers:
            tier.store.withdraw_keys(keys)

    def reset(self) -> None:
        """Remove all content of every tier."""
        self._offers.drop()
        self._loads.end_all(TierCause.WITHDRAWN)
        for tier in self._tiers:
            tier.store.reset()

    def renew(self) -> None:
        """Begin stores for new weights; what is stored under the old ones stays where it is, and is not loaded.

        A tier that does not answer is left out from now on, with one line in the log; so are all if the model now has
        hooks.
        """
        self._offers.drop()
        self._loads.end_all(TierCause.WITHDRAWN)
        try:
            identity = self._identity()
        except UnsupportedModelError as problem:
            _close(self._tiers, time.monotonic())
            self._tiers.clear()
            self._offers.drop()  # its queues are those of the tiers
            LOG.warning("all tiers are left out after new weights: %s", problem)
            return
        for tier in list(self._tiers):
            try:
                tier.renew(identity)
            except ConfigurationError as problem:
                self._tiers.remove(tier)
                LOG.warning("tier %s is left out after new weights: %s", tier.name, problem)
        self._offers.drop()

    def flush(self, timeout_s: float) -> bool:
        """Copy and offer all that waits, also for its eviction, and wait until it is stored.

        Returns whether all was stored that tiers were to store since the last call: nothing was dropped, failed, or is
        late.
        """
        until = time.monotonic() + timeout_s
        is_quiet = True
        self._offers.queue_cached()
        while is_quiet:
            self._offers.advance(is_idle=True)
            is_quiet = all(tier.store.wait_until_quiet(max(0.0, until - time.monotonic())) for tier in self._tiers)
            if self._offers.is_empty and not self._offers.queue_cached():
                break
        self._is_stuck = not is_quiet
        return not sum(tier.take_num_lost() for tier in self._tiers) and is_quiet

    @property
    def is_stuck(self) -> bool:
        """Whether the last flush did not end in time, as where a medium hangs."""
        return self._is_stuck

    def drain_events(self) -> tuple[TierEvents, ...]:
        """Take the events of all entries since the last call, by medium; none unless ``EngineConfig.events``."""
        return self._events.drain([(tier.medium, tier.store) for tier in self._tiers])

    def entries(self) -> tuple[TierEvents, ...]:
        """Return all entries whose events were drained, by medium. O(entries)."""
        return self._events.entries()

    def weights(self) -> dict[str, float]:
        """Return for each medium with loads so far the measured saving: 1 less the time of loading over computing.

        Of several tiers of one medium the least; between 0 and 1.
        """
        weights: dict[str, float] = {}
        for tier in self._tiers:
            computing_s = self._rate.predict_s(tier.num_loaded_tokens)
            if tier.num_loaded_tokens and computing_s:
                medium = published_medium(tier.medium)
                saved = max(0.0, 1.0 - tier.loaded_s / computing_s)
                weights[medium] = min(saved, weights.get(medium, 1.0))
        return weights

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        return tuple(tier.statistics() for tier in self._tiers)

    def close(self, timeout_s: float) -> bool:
        """Flush, and end the stores, within so many seconds; return whether all was stored since the last flush."""
        until = time.monotonic() + timeout_s
        is_stored = self.flush(timeout_s)
        self._loads.end_all(TierCause.WITHDRAWN)
        self._drop.detach()
        self._dropped.forget()
        _close(self._tiers, until)
        self._bytes.close()
        return is_stored


class _Withdrawals(SpaceObserver):
    """Passes what a space withdraws on to an engine's tiers, as long as there are any."""

    def __init__(self, withdraw: "weakref.WeakMethod[Callable[[frozenset[bytes] | None], None]]") -> None:
        self._withdraw = withdraw

    def withdrawn(self, digests: frozenset[bytes] | None) -> None:
        """Content was declared bad."""
        withdraw = self._withdraw()
        if withdraw is not None:
            withdraw(digests)


def _close_at_exit(engine_tiers: "weakref.ref[EngineTiers]") -> None:
    """Store what the process has computed, before it ends."""
    tiers = engine_tiers()
    if tiers is not None:
        tiers.close(WHEN_STUCK_S if tiers.is_stuck else AT_EXIT_S)


@final
class DroppedStores:
    """Closes stores when asked to, in a thread of its own. Any thread may ask, also in a finalizer.

    Args:
        close: closes the stores; called at most once. It must not refer to what the finalizer is of.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # a put may run amid another put of it
        self._closed: SimpleQueue[None] = SimpleQueue()
        arguments = (self._asked, self._closed)
        threading.Thread(target=_close_when_asked, args=arguments, name="tiers-dropped", daemon=True).start()

    def close(self) -> None:
        """Close the stores. The main thread waits for it, since the process may end next; other threads do not."""
        self._asked.put(self._close)
        if threading.get_ident() == threading.main_thread().ident:
            try:
                self._closed.get(timeout=LONGEST_CLOSE_S)
            except Empty:
                return

    def forget(self) -> None:
        """End the thread without closing: the stores are being closed otherwise."""
        self._asked.put(None)


def _drop(dropped: DroppedStores, at_exit: Callable[[], None]) -> None:
    """Close the stores of an engine that was dropped and not closed."""
    atexit.unregister(at_exit)
    dropped.close()


@final
class OpenTier(ServedTier):
    """A tier and its counts. The driving thread changes it.

    Args:
        spec: as its user wrote it.
        identity: of the content.
        entry_nbytes: about the bytes of an entry.
        memory: host memory for what is read; None: plain memory.
        records_events: whether the store records events of its entries, to be drained.

    Attributes:
        store: the store of the present identity.

    Raises:
        ConfigurationError: the medium does not answer; the message states what was tried.
    """

    store: SharedStore

    def __init__(
        self,
        spec: Tier,
        identity: Identity,
        entry_nbytes: int,
        memory: HostMemory | None = None,
        *,
        records_events: bool = False,
    ) -> None:
        self.spec = spec
        self._memory = memory
        config = spec.store_config(entry_nbytes)
        most = min(2**31 - 1, config.max_entries + MOST_TIER_EVENTS)
        self._config = replace(config, max_events=most) if records_events else config
        super().__init__(
            f"{spec.name} through {spec.coding.name}" if spec.coding.is_lossy else spec.name,
            spec.medium,
            spec.loads,
            spec.deadline_s,
            self._opened(identity),
            stores_victims=spec.admission == BEFORE_EVICTION,
        )
        self._was_out = False
        self._num_lost = 0

    def _opened(self, identity: Identity) -> SharedStore:
        codec = self.spec.coding
        codec.require_packages()
        body = self.spec.open_body(codec.identity_of(identity).fingerprint, self._memory)
        try:
            rescan_s = self.spec.rescan_s or None
            return SharedStore(body, identity, self._config, secret=self.spec.secret, codec=codec, rescan_s=rescan_s)
        except BaseException:
            body.close()
            raise

    def renew(self, identity: Identity) -> None:
        """Exchange the store for one of another identity. Raises ConfigurationError; the old one is closed anyway."""
        self.store.close(RENEWED_WITHIN_S)
        self.num_dropped += self.store.num_lost
        self.store = self._opened(identity)

    def take_num_lost(self) -> int:
        """Return how much was to be stored since the last call and was not."""
        num_before, self._num_lost = self._num_lost, self.num_dropped + self.store.num_lost
        return self._num_lost - num_before

    def log_outage(self) -> None:
        """Log one line when the tier goes out of service, and one when it is back: when a call has succeeded."""
        breaker = self.store.breaker
        is_out = breaker is BreakerState.OPEN or (self._was_out and breaker is BreakerState.PROBING)
        if is_out != self._was_out:
            self._was_out = is_out
            if is_out:
                LOG.warning(
                    "tier %s is out of service, its content is computed instead: %s", self.name, self.store.last_problem
                )
            else:
                LOG.warning("tier %s is in service again", self.name)


def _close(tiers: Sequence[OpenTier], until: float) -> None:
    """Let stores write until a time, and end them."""
    for tier in tiers:
        tier.store.wait_until_quiet(max(0.0, until - time.monotonic()))
        tier.store.close(max(LAST_CALLS_S, until - time.monotonic()))


def _close_dropped(tiers: Sequence[OpenTier]) -> None:
    """End the stores of an engine that was dropped."""
    _close(tiers, time.monotonic() + WHEN_DROPPED_S)


LONGEST_CLOSE_S: Final = 10.0
"""Longest wait of the main thread that drops an engine, for its stores to be closed."""


def _close_when_asked(asked: "SimpleQueue[Callable[[], None] | None]", closed: "SimpleQueue[None]") -> None:
    close = asked.get()
    if close is not None:
        close()
        closed.put(None)


LOG: Final = logging.getLogger("pagedkv.tiers")
RENEWED_WITHIN_S: Final = 1.0
"""Longest wait for writes under the old weights, while the engine's thread waits for new stores."""
DOMAIN: Final = b"pagedkv prompt of a hand-off 1"
PRIVATE: Final = "host"
"""The medium that only its own process can read."""


def hand_over_direct(
    link: NixlLink, content: StoredContent, space: BlockSpace, token_ids: Int32Array, keys: RequestKeys
) -> HandOff:
    """Offer the frames of what is cached of a prompt by a link; return where they are."""
    layout = EntryLayout(space.config.groups, content.nbytes)
    num_tokens, frames = cached_frames(content, space, token_ids, keys)
    direct = link.offer(list(frames)) if num_tokens else None
    fingerprint = content.identity(layout.blocks_per_run).fingerprint.hex()
    return HandOff(fingerprint, num_tokens, layout.run_tokens, {}, {}, {}, direct)


def take_over_direct(
    hand_off: HandOff,
    link: NixlLink,
    timeout_s: float,
    content: StoredContent,
    space: BlockSpace,
    token_ids: Int32Array,
    keys: RequestKeys,
) -> int:
    """Bring a hand-off from the memory of its engine into the cache; return how many leading tokens it has.

    Raises:
        ConfigurationError: the content or the prompt is another one, or the frames cannot be read; nothing is changed.
    """
    layout = EntryLayout(space.config.groups, content.nbytes)
    _require_same(hand_off, content.identity(layout.blocks_per_run).fingerprint)
    if hand_off.direct is None:
        return 0  # nothing was cached
    return bring_frames("the hand-off", link.fetch(hand_off.direct, timeout_s), content, space, keys, prompt=token_ids)


def entries_of(
    tiers: Sequence[OpenTier], layout: EntryLayout, chain: RunChain, fingerprint: bytes, num_tokens: int
) -> HandOff:
    """List the entries of a chain in all tiers but those in host memory.

    Args:
        tiers: the engine's tiers; layout: of entries.
        chain: the runs and ends of the prompt.
        fingerprint: of the engine's content.
        num_tokens: leading tokens that can be loaded.
    """
    shared = [tier for tier in tiers if tier.medium != PRIVATE]
    numbers = range(num_tokens // layout.run_tokens) if layout.has_runs else range(0)
    places = range(1, num_tokens // layout.block_size + 1) if layout.has_ends else range(0)
    return HandOff(
        fingerprint.hex(),
        num_tokens,
        layout.run_tokens,
        {tier.name: _there(tier, numbers, [chain.runs[number].key for number in numbers]) for tier in shared},
        {
            tier.name: _there(tier, [place * layout.block_size for place in places], list(map(chain.end_key, places)))
            for tier in shared
        },
        {tier.name: tier.medium for tier in shared},
        prompt=_digest_of(chain, num_tokens // layout.block_size),
    )


def announce(
    hand_off: HandOff, tiers: Sequence[OpenTier], layout: EntryLayout, chain: RunChain, fingerprint: bytes
) -> None:
    """List the entries of a hand-off in the tiers of the same name, or else in the only one of the same medium.

    Nothing is listed for another prompt, or under another salt: those entries are not there.

    Args:
        hand_off: of the other engine.
        tiers, layout, chain, fingerprint: of this one, as in :func:`entries_of`.

    Raises:
        ConfigurationError: the content is another one, the prompt is shorter, or there is no such tier.
    """
    _require_same(hand_off, fingerprint)
    if hand_off.num_tokens > chain.num_blocks * layout.block_size:
        raise ConfigurationError(
            f"the hand-off has {hand_off.num_tokens} tokens of its prompt, and this prompt has "
            f"{chain.num_blocks * layout.block_size} in whole blocks: pass the prompt that was handed over"
        )
    if hand_off.prompt and hand_off.prompt != _digest_of(chain, hand_off.num_tokens // layout.block_size):
        return
    for name, medium in hand_off.media.items():
        tier = _same_tier(name, medium, tiers)
        keys = [chain.runs[number].key for number, _ in hand_off.runs[name]]
        keys += [chain.end_key(place // layout.block_size) for place, _ in hand_off.ends[name]]
        tier.store.announce(keys, [nbytes for _, nbytes in (*hand_off.runs[name], *hand_off.ends[name])])


def _digest_of(chain: RunChain, num_blocks: int) -> str:
    """Digest a prompt up to a block, so that its blocks' names cannot be told from it."""
    return hashlib.sha256(DOMAIN + chain.end_key(num_blocks)).hexdigest()


def _require_same(hand_off: HandOff, fingerprint: bytes) -> None:
    if hand_off.fingerprint != fingerprint.hex():
        raise ConfigurationError(
            f"the hand-off has content of fingerprint {hand_off.fingerprint:.12}..., this engine "
            f"{fingerprint.hex():.12}...: both need the same weights, dtype, block size and versions"
        )


def _there(tier: OpenTier, places: Sequence[int], keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the places whose keys a tier has, and the bytes of their entries."""
    return [(place, nbytes) for place, nbytes in zip(places, tier.store.sizes_of(keys), strict=True) if nbytes]


def _same_tier(name: str, medium: str, tiers: Sequence[OpenTier]) -> OpenTier:
    same = [tier for tier in tiers if tier.name == name] or [tier for tier in tiers if tier.medium == medium]
    if len(same) != 1:
        raise ConfigurationError(
            f"the hand-off is in the tier {name!r}, and this engine has {[tier.name for tier in tiers]}: configure "
            "that tier, or one of its medium"
        )
    return same[0]
