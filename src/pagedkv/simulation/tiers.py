"""Tiers of a simulation: the production store core, on media with a bandwidth and a latency, on the virtual clock.

Which entries are loaded, computed and offered is decided by :mod:`pagedkv.tiers`, as in an engine::

    scheduler.schedule()   begins_load(request)       a request waits for a load, or is admitted
    before a step          before_step(now)           actions of the media end, and loads whose answers have come
    after a step           after_step(...)            prompts and answers are offered
    nothing to compute     next_event_s()             the clock advances to the next end of an action

A tier has a size and the speed of its medium. Defaults of a host tier are those of pinned memory behind one GPU on PCIe
5: ``benchmarks/engine/tier_copies.py`` copied entries of eight 2 MiB blocks at 52.8 GB/s to an H100 and at 54.9 GB/s
from it. Those of a disk are round figures of a data-centre disk on PCIe 3 with four lanes, whose bus carries 3.94 GB/s;
the data sheet of Samsung's PM983 has 85 us for a random read. No disk was measured for them.

Reads and writes of a medium run one after the other in each direction, and deletes take no time::

    reads    | read 1 | read 2 |   ..latency      a read ends its latency after its last byte
    writes   | write 1     | write 2 | ..latency  at the same time as reads, as on PCIe

An entry has no content: it is a key and a number of bytes, and one byte represents a block. :class:`VirtualStore`
replaces an engine's :class:`~pagedkv.tiers.TierStore`, whose threads carry actions out. Here the medium computes the
time at which an action ends, and :meth:`VirtualStore.advance` reports the ends up to a time, in their order.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.answers import TierEvents
from pagedkv.contract.arguments import as_choice, as_count, as_number
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.capacity.curve import MEDIA
from pagedkv.scheduling import Batch, Progress, Request
from pagedkv.space import BlockSpace, PrefixHit
from pagedkv.tiers import (
    Action,
    Admission,
    BreakerState,
    Delete,
    HostTier,
    Load,
    Loaded,
    LoadedRuns,
    LoadRule,
    Read,
    Run,
    StoreConfig,
    StoreCore,
    StoreEvents,
    StoreOutcome,
    StoreStatistics,
    Write,
    array_of,
)
from pagedkv.tiers.entry_blocks import CopyEnd, EntryLayout, HostBlocks, Rows
from pagedkv.tiers.served import ComputeRate, LoadUnderWay, RequestLoads, ServedTier, TierCause, TierStatistics
from pagedkv.tiers.specs import BEFORE_EVICTION
from pagedkv.tiers.tier_events import MOST_TIER_EVENTS, TierEventLog
from pagedkv.tiers.tier_loads import TierLoads
from pagedkv.tiers.tier_offers import TierOffers
from pagedkv.tiers.words import MOST_NBYTES

MediumName: TypeAlias = Literal["host", "disk"]
HOST_BANDWIDTH: Final = 50e9
HOST_LATENCY_S: Final = 0.0
DISK_BANDWIDTH: Final = 3e9
DISK_LATENCY_S: Final = 1e-4
TOKEN_NBYTES: Final = 2**18
"""Bytes of a token without a model: those of the default cost model's, Qwen3 32B in 16 bits (64 layers, 8 KV heads of
128)."""
HOST_READS: Final = 1
"""Reads of host memory in flight: a copy engine makes one copy at a time, so each takes its own time alone."""


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """A tier on the virtual clock; its store has the settings that an engine's would have.

    Args:
        medium: "host" or "disk".
        nbytes: most bytes of entries; 0: there is no such tier.
        bandwidth: bytes a second of all reads together, and of all writes together.
        latency_s: seconds of each read and write in addition to its bytes; latencies of several in flight overlap.
        admission: "always" writes every offered entry; "second-offer" an entry that is offered for the second time;
            "before-eviction" an entry that is about to be evicted from the device.
        loads: "if-faster" loads entries if that is predicted to be faster than computing; "always" loads all entries.
        deadline_s: longest time that a request waits for a load.

    Raises:
        ConfigurationError: a value out of range.
    """

    medium: MediumName
    nbytes: int
    bandwidth: float
    latency_s: float = 0.0
    admission: Admission = "always"
    loads: LoadRule = "if-faster"
    deadline_s: float = 2.0

    def __post_init__(self) -> None:
        """Check every field."""
        as_choice(self.medium, MEDIA, "medium")
        as_count(self.nbytes, f"the size of a {self.medium} tier", most=MOST_NBYTES)
        for name, value in (("bandwidth", self.bandwidth), ("latency_s", self.latency_s)):
            _require_seconds(f"the {name} of a {self.medium} tier", value)
        if not self.bandwidth > 0:
            raise ConfigurationError(f"the bandwidth of a {self.medium} tier must be above 0, got {self.bandwidth}")
        if self.nbytes:
            self._host_tier()

    def store_config(self, entry_nbytes: int) -> StoreConfig:
        """Return the settings of its store, for entries of about ``entry_nbytes``. Raises ConfigurationError."""
        return self._host_tier().store_config(entry_nbytes)

    def as_dict(self) -> dict[str, object]:
        """Return the tier for JSON, without the name of its medium."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "medium"}

    def _host_tier(self) -> HostTier:
        settings = {"max_reads": HOST_READS} if self.medium == "host" else {}
        return HostTier(
            self.nbytes, admission=self.admission, loads=self.loads, deadline_s=self.deadline_s, settings=settings
        )


def require_distinct(tiers: tuple[SimulatedTier, ...]) -> None:
    """Refuse anything but a tuple of tiers of different media. Raises ConfigurationError."""
    if not isinstance(tiers, tuple) or not all(isinstance(each, SimulatedTier) for each in tiers):
        raise ConfigurationError(f"tiers must be a tuple of SimulatedTier, got {tiers!r}")
    media = [each.medium for each in tiers]
    if len(set(media)) < len(media):
        raise ConfigurationError(f"each medium may have one tier, got {', '.join(media)}")


def _require_seconds(what: str, value: object) -> None:
    """Refuse anything but a number from 0 on, or infinity. Raises ConfigurationError."""
    if isinstance(value, float) and value == float("inf"):
        return
    if as_number(value, what) < 0:
        raise ConfigurationError(f"{what} must not be negative, got {value}")


@final
class Medium:
    """One medium.

    Args:
        bandwidth: bytes a second, in each direction.
        latency_s: seconds of a read or write in addition to its bytes.
    """

    def __init__(self, bandwidth: float, latency_s: float) -> None:
        self._bandwidth = bandwidth
        self._latency_s = latency_s
        self._free_s: dict[type[Read | Write], float] = {Read: 0.0, Write: 0.0}

    def begin(self, action: Action, now_s: float) -> float:
        """Queue an action; return the time at which it ends."""
        if isinstance(action, Delete):
            return now_s
        kind = type(action)
        free_s = max(self._free_s[kind], now_s) + action.nbytes / self._bandwidth
        self._free_s[kind] = free_s
        return free_s + self._latency_s


UNLIMITED: Final = 2**62


@final
class Ended:
    """The end of copies, which take no time of their own: only the medium takes time."""

    event = None

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


@final
class NoBytes:
    """Copies that move nothing. See :class:`~pagedkv.tiers.entry_blocks.BlockBytes`.

    A step may read any number of bytes, since the queue of a store limits them. Groups have no bytes to be filled.
    """

    read_nbytes_a_step = UNLIMITED
    read_nbytes_a_second = 0
    read_nbytes_at_once = UNLIMITED
    filled_nbytes_a_step: int | None = None
    filled_nbytes_at_once = UNLIMITED
    nbytes: Sequence[int] = ()
    room_nbytes: int | None = None

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Return a byte for each block."""
        del group
        return HostBlocks(np.zeros((len(block_ids), 1), np.uint8), Ended())

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyEnd:
        """Do nothing."""
        del group, block_ids, rows
        return Ended()

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


GRAIN_S: Final = 1e-6
"""Delay after a deadline at which it is noticed, since sums of seconds are rounded."""


@final
class VirtualStore:
    """A store; see :class:`~pagedkv.tiers.served.RunStore`.

    Args:
        config: its settings.
        medium: durations of actions.
        block_nbytes: bytes of a block of each group.
    """

    def __init__(self, config: StoreConfig, medium: Medium, block_nbytes: Sequence[int]) -> None:
        self._core = StoreCore(config)
        self._medium = medium
        self._block_nbytes = block_nbytes
        self._now_s = 0.0
        self._ends: list[tuple[float, int]] = []
        self._loads: dict[int, Load] = {}

    # Time

    def advance(self, now_s: float) -> None:
        """Report all actions and deadlines until now, in order."""
        while (next_s := self.next_event_s()) is not None and next_s <= now_s:
            self._set_time(next_s)
        self._set_time(now_s)

    def next_event_s(self) -> float | None:
        """Return the time of the next event: an action's end or a load's deadline; None if no event is due."""
        times = [self._ends[0][0]] if self._ends else []
        if self._loads and (due_s := self._core.next_deadline_s()) is not None:
            times.append(self._now_s + due_s + GRAIN_S)
        return min(times) if times else None

    def _set_time(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self._core.tick(self._now_s)
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass actions to the medium, and answers to the loads; actions that end at once are reported at once."""
        while True:
            for action in self._core.take_actions():
                heapq.heappush(self._ends, (self._medium.begin(action, self._now_s), action.action))
            if not self._ends or self._ends[0][0] > self._now_s:
                break
            self._core.completed(heapq.heappop(self._ends)[1], self._now_s)
        for answer in self._core.take_answers():
            if isinstance(answer, Loaded):
                load = self._loads.pop(answer.ticket)
                load.result = LoadedRuns(((),) * answer.num_entries, answer.cause, answer.nbytes, answer.wait_s)

    # For loads and offers

    @property
    def is_out_of_service(self) -> bool:
        """Whether the circuit breaker is open."""
        return self._core.breaker is BreakerState.OPEN

    @property
    def room_nbytes(self) -> int:
        """Bytes that can be offered now before offers are dropped."""
        return self._core.queue_room_nbytes

    def look_up(self, runs: Sequence[Run]) -> int:
        """Count the leading runs that can be loaded."""
        return self._core.look_up(_keys_of(runs))

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return, for each key, whether its entry can be loaded."""
        return self._core.contains(array_of(keys))

    def predict_s(self, num_runs: int, nbytes: int) -> float | None:
        """Predict the seconds to load ``num_runs`` runs of ``nbytes`` in all; None before the first load."""
        return self._core.predict_s(nbytes, num_runs)

    def load(self, runs: Sequence[Run], deadline_s: float, on_done: Callable[[], None] | None = None) -> Load:
        """Begin to load the runs of a prompt, head first."""
        load = Load(tuple(runs), on_done)
        load.ticket = self._core.load(_keys_of(runs), self._now_s, deadline_s)
        self._loads[load.ticket] = load
        self._pass_on()
        return load

    def cancel(self, load: Load) -> None:
        """End a load that no request waits for any more."""
        if load.ticket in self._loads:
            self._core.cancel(load.ticket)
            self._pass_on()

    def select_for_offer(self, runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
        """Record that runs could be offered; return for each whether to offer it: bool ``[runs]``."""
        wanted = self._core.select_for_offer(_keys_of(runs), self._now_s, runs[0].salt if runs else b"")
        self._pass_on()
        return wanted

    def offer(self, runs: Sequence[Run], parts: Sequence[Sequence[memoryview]], *, is_noted: bool = False) -> None:
        """Offer consecutive runs, head first. A part has one byte for each block of its group."""
        sizes = [
            sum(part.nbytes * nbytes for part, nbytes in zip(own, self._block_nbytes, strict=True)) for own in parts
        ]
        first = runs[0]
        self._core.offer(_keys_of(runs), sizes, self._now_s, first.parent, is_noted=is_noted, salt=first.salt)
        self._pass_on()

    def withdraw_keys(self, keys: Sequence[bytes]) -> int:
        """Remove content that turned out bad, and what continues it; returns how many entries."""
        removed = self._core.withdraw(array_of(keys), self._now_s)
        self._pass_on()
        return removed

    def drain_events(self) -> StoreEvents:
        """Take the events of entries since the last call."""
        return self._core.drain_events()

    def statistics(self) -> StoreStatistics:
        """Take a snapshot."""
        return self._core.statistics()

    def check(self) -> None:
        """Check every invariant of the core. Raises AssertionError. O(entries)."""
        self._core.check()


def _keys_of(runs: Sequence[Run]) -> npt.NDArray[np.uint8]:
    return array_of([run.key for run in runs])


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
            ServedTier(
                each.medium,
                each.medium,
                each.loads,
                each.deadline_s,
                store,
                stores_victims=each.admission == BEFORE_EVICTION,
            )
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


DEVICE = "device"


def tier_figures(tiers: SimulatedTiers, num_hit_tokens: int, num_prompt_tokens: int) -> dict[str, Any]:
    """Sum up the counts of all tiers.

    Args:
        tiers: the tiers.
        num_hit_tokens: hit tokens of all first admissions, including those that tiers loaded.
        num_prompt_tokens: prompt tokens of these admissions.

    Returns:
        ``hits``: by medium, hit tokens of first admissions and their share of the prompt tokens. A tier's are those
        that were loaded from it for the request, the device's all others. ``media``: each tier's counts.
    """
    loaded = tiers.num_hit_tokens
    by_medium = {DEVICE: num_hit_tokens - sum(loaded.values()), **loaded}
    return {
        "hits": {
            medium: {"num_tokens": count, "share": count / num_prompt_tokens if num_prompt_tokens else 0.0}
            for medium, count in by_medium.items()
        },
        "media": {tier.medium: _counts(tier) for tier in tiers.tiers},
    }


def _counts(tier: ServedTier) -> dict[str, Any]:
    store = tier.store.statistics()
    return {
        "num_loads": tier.num_loads,
        "num_loaded_tokens": tier.num_loaded_tokens,
        "mean_load_s": tier.loaded_s / tier.num_loads_that_came if tier.num_loads_that_came else None,
        "num_computed_instead": tier.num_refused_loads,
        "num_tokens_computed_instead": tier.not_loaded[TierCause.FASTER],
        "not_loaded": {str(cause): count for cause, count in sorted(tier.not_loaded.items()) if count},
        "read_nbytes": store.read_nbytes,
        "written_nbytes": store.written_nbytes,
        "num_stored": store.offers.get(StoreOutcome.STORED, 0),
        "num_evicted": store.num_evicted,
        "num_entries": store.num_entries,
        "nbytes": store.nbytes,
    }
