"""A store on threads: it carries the actions of a core out on a body, and verifies what it reads.

Offers and loads return at once. Reads, writes and deletes have threads of their own, as many as the core sends actions,
so each action begins when it is sent; reads of a body in this process's memory need none. One more thread sets the
time, so that a deadline is kept whatever the body does: a call that hangs occupies its thread and no request. Buffers
that are offered are read until their answer. The answer to a late write comes when the write has ended.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigurationError
from pagedkv.tiers.body import Body, fault_of
from pagedkv.tiers.codecs import NO_CODEC, Codec
from pagedkv.tiers.core import StoreCore, StoreStatistics
from pagedkv.tiers.frame import (
    Buffer,
    OpenFrame,
    Refusal,
    RefusalReason,
    frame_nbytes,
    frame_pieces,
    open_frame,
    require_secret,
)
from pagedkv.tiers.identity import Identity, Run
from pagedkv.tiers.timing import BreakerState
from pagedkv.tiers.words import (
    Action,
    Delete,
    Fault,
    Loaded,
    LoadEnd,
    Read,
    StoreConfig,
    StoreEvents,
    StoreOutcome,
    Write,
    array_of,
)


@dataclass(frozen=True, slots=True)
class LoadedRuns:
    """The answer to a load: the leading runs, verified.

    Args:
        parts: for each run, the bytes of each group's blocks.
        cause: why the next run was not loaded; NONE if all were.
        nbytes: bytes of their frames.
        wait_s: seconds from the call to the answer.
    """

    parts: tuple[tuple[memoryview, ...], ...]
    cause: LoadEnd
    nbytes: int
    wait_s: float

    @property
    def num_runs(self) -> int:
        """How many leading runs came."""
        return len(self.parts)


@dataclass(slots=True, eq=False)
class Load:
    """A load under way.

    Args:
        runs: the runs to be loaded.
        on_done: called once it has an answer, from any thread; it must not block and not call the store.
        result: the answer; None until there is one.
    """

    runs: tuple[Run, ...]
    on_done: Callable[[], None] | None = None
    result: LoadedRuns | None = None
    ticket: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    frames: dict[bytes, OpenFrame] = field(default_factory=dict)
    run_of: dict[bytes, Run] = field(init=False)

    def __post_init__(self) -> None:
        self.run_of = {run.key: run for run in self.runs}

    def wait(self, timeout_s: float | None = None) -> LoadedRuns:
        """Wait for the answer, which comes by the load's deadline.

        Raises:
            TimeoutError: it did not come within ``timeout_s``.
        """
        if not self.done.wait(timeout_s):
            raise TimeoutError(f"the load of {len(self.runs)} runs has no answer within {timeout_s} s")
        assert self.result is not None
        return self.result


MEASURE_EVERY_S: Final = 60.0
LONGEST_WAIT_S: Final = 1.0
TIMER_GRAIN_S: Final = 1e-4
NUM_DELETE_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class _Result:
    """How an action ended."""

    fault: Fault | None = None
    problem: object = None
    opened: OpenFrame | None = None
    nbytes: int | None = None


@dataclass(slots=True, eq=False)
class _Offer:
    runs: tuple[Run, ...]
    parts: list[Sequence[Buffer] | None]
    on_answer: Callable[[int, StoreOutcome], None] | None
    num_open: int


class TierStore:
    """Cached content of one identity on one body.

    Args:
        body: where bytes are kept. The store closes it.
        identity: layout and model.
        config: caps, deadlines, admission.
        secret: 32 bytes for keyed checks, where other tenants can write to the body; None for xxh3-128.
        codec: how frames are written. The body is that of ``codec.identity_of(identity)``, which is compared.
        clock: seconds.

    Raises:
        ConfigurationError: the body cannot be scanned, or a secret that is not 32 bytes.
    """

    def __init__(  # noqa: PLR0913 - a body, what is kept there, and how
        self,
        body: Body,
        identity: Identity,
        config: StoreConfig,
        *,
        secret: bytes | None = None,
        codec: Codec = NO_CODEC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_secret(secret)
        self.body = body
        self.identity = codec.identity_of(identity)
        self._codec = codec
        self._is_immediate = body.is_immediate and codec == NO_CODEC  # else a read takes a thread's time
        self.refusals: dict[str, int] = {}
        self.last_problem = ""
        self._secret = None if body.is_trusted else secret
        self._clock = clock
        self._core = StoreCore(config, clock())
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._timer = threading.Condition(lock)
        self._wakes_s = clock()
        self._longest_wait_s = min(
            LONGEST_WAIT_S, config.read_timeout_s / 4, config.write_timeout_s / 4, config.breaker_pause_s / 4
        )
        self._loads: dict[int, Load] = {}
        self._waiting_for: dict[bytes, set[int]] = {}
        self._offers: dict[int, _Offer] = {}
        self._being_read: set[tuple[int, int]] = set()
        self._late: dict[tuple[int, int], StoreOutcome] = {}
        self._callbacks: list[tuple[Callable[[int, StoreOutcome], None], int, StoreOutcome]] = []
        self._is_closed = False
        self._measured_s = clock()
        self._queues: dict[type, SimpleQueue[Action | None]] = {kind: SimpleQueue() for kind in (Read, Write, Delete)}
        self._restore()
        self._threads = [
            threading.Thread(target=self._work, args=(self._queues[kind],), name=f"tier-{body.medium}", daemon=True)
            for kind, number in self._num_threads().items()
            for _ in range(number)
        ]
        self._threads.append(threading.Thread(target=self._keep_time, name=f"tier-{body.medium}-time", daemon=True))
        for thread in self._threads:
            thread.start()

    def look_up(self, runs: Sequence[Run]) -> int:
        """Count the leading runs that can be loaded. Changes nothing."""
        with self._changed:
            return self._core.look_up(array_of([run.key for run in runs]))

    @property
    def is_out_of_service(self) -> bool:
        """Whether the circuit breaker is open."""
        with self._changed:
            return self._core.breaker is BreakerState.OPEN

    @property
    def breaker(self) -> BreakerState:
        """State of the circuit breaker."""
        with self._changed:
            return self._core.breaker

    @property
    def num_lost(self) -> int:
        """Offered runs that were to be stored and were not: the medium failed, was full or slow, or was left alone."""
        with self._changed:
            return self._core.num_lost

    @property
    def room_nbytes(self) -> int:
        """Bytes that can be offered now before offers are dropped."""
        with self._changed:
            return self._core.queue_room_nbytes

    def predict_s(self, num_runs: int, nbytes: int) -> float | None:
        """Predict the seconds to load so many runs of ``nbytes`` in all; None before the first load."""
        with self._changed:
            return self._core.predict_s(nbytes, num_runs)

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return, for each key, whether its entry can be loaded. O(keys). Changes nothing."""
        with self._changed:
            return self._core.contains(array_of(keys))

    def select_for_offer(self, runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
        """Note runs that could be offered; return for each whether to offer it now, before any is copied.

        Stored runs count as used. :meth:`offer` with ``is_noted`` follows for the selected ones.
        """
        with self._changed:
            salt = runs[0].salt if runs else b""
            return self._core.select_for_offer(array_of([run.key for run in runs]), self._clock(), salt)

    def cancel(self, load: Load) -> None:
        """End a load that no request waits for any more; it is answered with the runs read so far."""
        with self._changed:
            if load.ticket in self._loads:
                self._core.cancel(load.ticket)
                self._pass_on()
        self._call_back()

    def load(self, runs: Sequence[Run], deadline_s: float, on_done: Callable[[], None] | None = None) -> Load:
        """Begin to load the runs of a prompt, head first. Never blocks on the body.

        Args:
            runs: consecutive runs from the first one that is missing on.
            deadline_s: seconds after which the load is answered with the runs read by then.
            on_done: called once it has an answer, from any thread; it must not block and not call the store.
        """
        load = Load(tuple(runs), on_done)
        with self._changed:
            self._require_open()
            ticket = load.ticket = self._core.load(array_of([run.key for run in runs]), self._clock(), deadline_s)
            self._loads[ticket] = load
            for key in load.run_of:
                self._waiting_for.setdefault(key, set()).add(ticket)
            self._pass_on()
            if self._clock() + deadline_s < self._wakes_s:
                self._timer.notify()
        self._call_back()
        return load

    def offer(
        self,
        runs: Sequence[Run],
        parts: Sequence[Sequence[Buffer]],
        on_answer: Callable[[int, StoreOutcome], None] | None = None,
        *,
        is_noted: bool = False,
    ) -> None:
        """Offer the content of consecutive runs, head first. Never blocks on the body.

        Args:
            runs: the runs.
            parts: for each run, the bytes of each group's blocks. They are read, not copied, until the run's answer.
            on_answer: called once a run with its index and its outcome, from any thread, without a lock.
            is_noted: :meth:`select_for_offer` has returned True for these runs, so this counts as no further offer.
        """
        if len(runs) != len(parts):
            raise ConfigurationError(f"{len(runs)} runs need the parts of as many, got {len(parts)}")
        sizes = [
            self._codec.most_nbytes(frame_nbytes(self.identity, run, self._part_sizes(own)))
            for run, own in zip(runs, parts, strict=True)
        ]
        parent, salt = (runs[0].parent, runs[0].salt) if runs else (bytes(32), b"")
        keys = array_of([run.key for run in runs])
        with self._changed:
            self._require_open()
            offer = self._core.offer(keys, sizes, self._clock(), parent, is_noted=is_noted, salt=salt)
            self._offers[offer] = _Offer(tuple(runs), list(parts), on_answer, len(runs))
            self._pass_on()
        self._call_back()

    def withdraw(self, runs: Sequence[Run]) -> int:
        """Remove content that turned out bad, and all that continues it; return the number of entries."""
        return self.withdraw_keys([run.key for run in runs])

    def withdraw_keys(self, keys: Sequence[bytes]) -> int:
        """Remove content as :meth:`withdraw` does, by the keys of its entries."""
        with self._changed:
            removed = self._core.withdraw(array_of(keys), self._clock())
            self._pass_on()
        self._call_back()
        return removed

    def reset(self) -> int:
        """Remove all entries; returns how many."""
        with self._changed:
            removed = self._core.reset(self._clock())
            self._pass_on()
        self._call_back()
        return removed

    def statistics(self) -> StoreStatistics:
        """Take a snapshot."""
        with self._changed:
            return self._core.statistics()

    def drain_events(self) -> StoreEvents:
        """Take the events since the last call."""
        with self._changed:
            return self._core.drain_events()

    def wait_until_quiet(self, timeout_s: float) -> bool:
        """Wait until no action is in flight and no content is queued; return False after the time limit."""

        def is_quiet() -> bool:
            seen = self._core.statistics()
            return not (seen.num_reads + seen.num_writes + seen.num_deletes + seen.num_queued)

        with self._changed:
            return self._changed.wait_for(is_quiet, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all threads and close the body. What is still queued is dropped; calls under way have so many seconds."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for ticket in list(self._loads):
                self._core.cancel(ticket)
            self._core.drop_queue(self._clock())
            self._pass_on()
            self._timer.notify()
        self._call_back()
        for kind, number in self._num_threads().items():
            for _ in range(number):
                self._queues[kind].put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.body.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _num_threads(self) -> dict[type, int]:
        config = self._core.config
        num_reads = 0 if self._is_immediate else config.max_reads
        return {Read: num_reads, Write: config.max_writes, Delete: NUM_DELETE_THREADS}

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError(f"the {self.body.medium} tier is closed")

    def _restore(self) -> None:
        """Enter what the body has, the least recently used first."""
        try:
            found = sorted(self.body.scan(), key=lambda each: each.used_s)
            usage = self.body.usage()
        except OSError as problem:
            raise ConfigurationError(f"the {self.body.medium} tier cannot be scanned: {problem}") from problem
        self._core.restore(array_of([each.key for each in found]), [each.nbytes for each in found], self._clock())
        self._core.measured(usage.nbytes, usage.free_nbytes, self._clock())

    def _keep_time(self) -> None:
        """Set the time when a deadline is due, and measure the body now and then."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                self._core.tick(self._clock())
                self._pass_on()
                due_s = self._core.next_deadline_s()
                wait_s = self._longest_wait_s if due_s is None else min(self._longest_wait_s, due_s + TIMER_GRAIN_S)
                self._wakes_s = self._clock() + wait_s
                if not self._callbacks:
                    self._timer.wait(wait_s)
            self._call_back()

    def _work(self, queue: "SimpleQueue[Action | None]") -> None:
        """Carry out actions, one at a time."""
        while (action := queue.get()) is not None:
            result = self._result_of(action)
            with self._changed:
                self._report(action, result)
                self._pass_on()
            self._call_back()
            if isinstance(action, Delete):
                self._measure_if_due()

    def _result_of(self, action: Action) -> "_Result":
        """Carry an action out; any error is a fault of the body."""
        try:
            return self._carry_out(action)
        except OSError as problem:
            return _Result(fault_of(problem), problem)
        except Exception as problem:  # noqa: BLE001 - a body is others' code: its faults are the tier's, not ours
            return _Result(Fault.IO, problem)

    def _carry_out(self, action: Action) -> "_Result":
        """Call the body, and verify what it reads; without the lock, unless the body is immediate."""
        if isinstance(action, Read):
            stored = self.body.read(action.key, action.nbytes, self._core.config.read_timeout_s)
            if stored is None:
                return _Result(Fault.GONE)
            opened = self._opened(stored, action.key)
            if isinstance(opened, Refusal):
                return _Result(Fault.CORRUPT, opened)
            return _Result(None, None, opened, memoryview(stored).nbytes)
        if isinstance(action, Delete):
            self.body.delete(action.key, self._core.config.write_timeout_s)
            return _Result()
        with self._changed:
            offer = self._offers[action.offer]
        parts = offer.parts[action.place]
        assert parts is not None, "content was released before it was written"
        run = offer.runs[action.place]
        coded = [self._codec.encode(group, part) for group, part in zip(self.identity.groups, parts, strict=True)]
        pieces = frame_pieces(self.identity, run, coded, self._secret, checked=not self.body.is_trusted)
        sealed = self._codec.seal(pieces, action.key)
        self.body.write(action.key, sealed, self._core.config.write_timeout_s)
        return _Result(nbytes=sum(memoryview(piece).nbytes for piece in sealed))

    def _part_sizes(self, parts: Sequence[Buffer]) -> list[int]:
        """Return the bytes of parts in a frame."""
        sizes = [memoryview(part).nbytes for part in parts]
        groups = self.identity.groups
        if len(sizes) != len(groups):
            return sizes  # refused when it is written
        return [self._codec.part_nbytes(group, nbytes) for group, nbytes in zip(groups, sizes, strict=True)]

    def _opened(self, stored: Buffer, key: bytes) -> OpenFrame | Refusal:
        """Verify what was read, and decode its parts."""
        frame = self._codec.unseal(stored, key)
        if isinstance(frame, Refusal):
            return frame
        opened = open_frame(frame, self._secret, trusted=self.body.is_trusted)
        if isinstance(opened, Refusal) or len(opened.parts) != len(self.identity.groups):
            return opened  # the number of parts is compared with all else
        coded = zip(self.identity.groups, opened.parts, strict=True)
        parts = [self._codec.decode(group, part) for group, part in coded]
        if any(part is None for part in parts):
            return Refusal(RefusalReason.LENGTHS, "a part has not the bytes of whole blocks")
        return replace(opened, parts=tuple(part for part in parts if part is not None))

    def _measure_if_due(self) -> None:
        """Measure the body if it is due; an error is ignored, since the next read or write meets it too."""
        if self._clock() >= self._measured_s + MEASURE_EVERY_S:
            with contextlib.suppress(OSError):
                self._measure()

    def _measure(self) -> None:
        """Measure the body. Raises OSError."""
        self._measured_s = self._clock()
        usage = self.body.usage()
        with self._changed:
            self._core.measured(usage.nbytes, usage.free_nbytes, self._clock())
            self._pass_on()

    def _report(self, action: Action, result: "_Result") -> None:
        """Report the end of an action to the core, after a comparison of what was read with what is expected."""
        if isinstance(action, Read) and result.opened is not None:
            result = self._deliver(action.key, result, result.opened)
        if result.problem is not None:
            self.last_problem = f"{type(action).__name__.lower()}: {result.problem}"
        if isinstance(result.problem, Refusal):
            reason = str(result.problem.reason)
            self.refusals[reason] = self.refusals.get(reason, 0) + 1
        if result.fault is None:
            self._core.completed(action.action, self._clock(), result.nbytes)
        else:
            self._core.failed(action.action, result.fault, self._clock())
        if isinstance(action, Write):
            place = (action.offer, action.place)
            self._being_read.discard(place)
            if place in self._late:
                self._release(*place, self._late.pop(place))

    def _deliver(self, key: bytes, result: "_Result", opened: OpenFrame) -> "_Result":
        """Give a frame to the loads that wait for it, if it is what each expects. O(tokens) a load."""
        for ticket in self._waiting_for.get(key, ()):
            load = self._loads[ticket]
            refusal = opened.compare(self.identity, load.run_of[key])
            if refusal is not None:
                return _Result(Fault.CORRUPT, refusal)
            load.frames[key] = opened
        return result

    def _pass_on(self) -> None:
        """Pass actions to the threads, and answers to callers. Reads of an immediate body are made at once."""
        while actions := self._core.take_actions():
            for action in actions:
                if isinstance(action, Read) and self._is_immediate:
                    self._report(action, self._result_of(action))
                    continue
                if isinstance(action, Write):
                    self._being_read.add((action.offer, action.place))
                self._queues[type(action)].put(action)
        for answer in self._core.take_answers():
            if isinstance(answer, Loaded):
                self._end_load(answer)
            elif (answer.offer, answer.place) in self._being_read and answer.outcome is StoreOutcome.LATE:
                self._late[answer.offer, answer.place] = answer.outcome
            else:
                self._release(answer.offer, answer.place, answer.outcome)
        self._changed.notify_all()

    def _release(self, number: int, place: int, outcome: StoreOutcome) -> None:
        """Let go of offered content."""
        offer = self._offers[number]
        offer.parts[place] = None
        offer.num_open -= 1
        if offer.on_answer is not None:
            self._callbacks.append((offer.on_answer, place, outcome))
        if not offer.num_open:
            del self._offers[number]

    def _end_load(self, answer: Loaded) -> None:
        """Answer a load with the leading runs."""
        load = self._loads.pop(answer.ticket)
        for key in load.run_of:
            waiting = self._waiting_for[key]
            waiting.discard(answer.ticket)
            if not waiting:
                del self._waiting_for[key]
        parts = tuple(load.frames[run.key].parts for run in load.runs[: answer.num_entries])
        load.frames.clear()
        load.result = LoadedRuns(parts, answer.cause, answer.nbytes, answer.wait_s)
        load.done.set()
        if load.on_done is not None:
            load.on_done()

    def _call_back(self) -> None:
        """Call callers back, without the lock."""
        with self._changed:
            callbacks, self._callbacks = self._callbacks, []
        for on_answer, place, outcome in callbacks:
            on_answer(place, outcome)
