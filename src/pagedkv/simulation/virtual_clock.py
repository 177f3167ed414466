"""The virtual clock: requests arrive, steps take the time of the cost model, and meters are notified.

The loop over steps is here. The meters decide what is measured, and the caller supplies the space. For very many runs,
a caller can supply meters that measure little.

If steps overlap, a step is scheduled when the previous one begins, and begins when the previous one ends::

    clock       0              a              b
    steps       | step 1       | step 2       | step 3
    scheduled   1, 2           3              4             each but the first without the tokens of the step before it
    finished                   1              2

Under more load than a machine can serve, its queue grows as long as the trace. Scheduling depends only on the head of
the queue. So the rest is written to a private temporary file, and read in its turn.

A sampler of known tokens replaces a model: it returns the outputs of the trace, and draws the parent of each beam.
Tokens of requests that decode together are laid out for many steps ahead, so that a step takes one row of an array.
"""

import os
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Final, Protocol, final

import numpy as np

from pagedkv import scheduling
from pagedkv.contract.answers import TierEvents
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.errors import TraceError
from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.planner.traces.token_blocks import tokenize
from pagedkv.scheduling import Batch, Decoding, Progress, Request as ScheduledRequest
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import RunningRows, StepWork, rows_of, work_of
from pagedkv.simulation.tiers import SimulatedTiers
from pagedkv.space import BlockSpace

MOST_WAITING: Final = 4096
"""Requests that wait in the scheduler, some 2 KiB each, before further ones wait in the file; or the number that may
run."""


class StepMeters(Protocol):
    """The methods that a clock calls. Requests come in the order of their numbers, steps in that of time."""

    @property
    def uses_rows(self) -> bool:
        """Whether the running rows are used; gathering them takes a tenth of the time."""

    @property
    def num_requests(self) -> int:
        """Number of requests that have arrived."""

    def arrived(
        self, request: ScheduledRequest, arrival_s: float, *, has_content: bool, tenant: str | None = None
    ) -> None:
        """Record a request, whether its content is known, and its tenant."""

    def rejected(self, request: ScheduledRequest) -> None:
        """Record that a request cannot be served."""

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Record admitted, preempted and rejected requests."""

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        """Record the work of a step."""

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:
        """Record that the present state lasts for this duration."""

    def stepped(self, step_s: float) -> None:
        """Record the seconds of the last planned step."""

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record requests that got their first token, or all tokens."""


class VirtualClock:
    """Serves requests on a virtual clock.

    Args:
        config: the pools and the rules.
        costs: duration of steps.
        space: the block space, configured by ``config``.
        meters: notified of every event; of a request that waits in the file, only when it leaves the file.
        uses_queue_file: whether requests far back in the queue wait in a file. This does not change their service, but
            those that cannot be served are reported later.
    """

    def __init__(
        self,
        config: ServingConfig,
        costs: CostModel,
        space: BlockSpace,
        meters: StepMeters,
        *,
        uses_queue_file: bool = True,
    ) -> None:
        self._config = config
        self._costs = costs
        self._tokens_per_block = config.tokens_per_block
        self._space = space
        self._meters = meters
        self._tiers = self._open_tiers()
        self._scheduler = scheduling.Scheduler(config.scheduling_config(), space, self._tiers)
        self._sampler = ScriptedSampler(config.seed, has_beams=config.beam_width is not None)
        self._rows = rows_of([])
        self._num_changes = 0
        self._now_s = 0.0
        self._num_scheduled = 0
        self._peak_live = dict.fromkeys(config.space_config(is_watched=False).blocks_by_pool(), 0)
        self._last_arrival_s = 0.0
        self._flight: tuple[Batch, float] | None = None  # the step that runs, and its seconds
        self._queue_file = QueueFile()
        self._uses_queue_file = (
            uses_queue_file and not config.tenants
        )  # requests of other tenants overtake a tenant at its cap
        self._most_waiting = max(MOST_WAITING, config.max_sequences)  # no step admits more
        self._priority: int | None = None
        self._intents: dict[str | None, scheduling.CacheIntent] = {
            name: scheduling.CacheIntent(tenant=name) for name in config.tenants or ()
        }

    def drain_tier_events(self) -> tuple[TierEvents, ...]:
        """Take the events of tiers' entries since the last call, by medium."""
        return () if self._tiers is None else self._tiers.drain_events()

    def tier_entries(self) -> tuple[TierEvents, ...]:
        """Return all entries of tiers whose events were drained, by medium."""
        return () if self._tiers is None else self._tiers.entries()

    def _open_tiers(self) -> SimulatedTiers | None:
        """Open the tiers of the configuration; None: there are none."""
        tiers = [each for each in self._config.tiers if each.nbytes]
        if not tiers:
            return None
        nbytes = self._config.entry_block_nbytes
        return SimulatedTiers(tiers, self._space, nbytes, self._loaded)

    def _loaded(self, request: scheduling.Request) -> None:
        """Return a request whose load has ended to the queue for admission."""
        self._scheduler.loaded(request)

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._now_s

    @property
    def space(self) -> BlockSpace:
        """The block space. Only the clock changes it."""
        return self._space

    @property
    def scheduler(self) -> scheduling.Scheduler:
        """The scheduler. Only the clock calls what changes it."""
        return self._scheduler

    @property
    def tiers(self) -> SimulatedTiers | None:
        """The tiers; None without any. Only the clock calls what changes them."""
        return self._tiers

    @property
    def num_requests(self) -> int:
        """Number of requests offered so far."""
        return self._meters.num_requests + len(self._queue_file)

    def offer(self, request: Request | TokenizedRequest) -> None:
        """Add the next request, after running all steps that begin before its arrival.

        Raises:
            TraceError: it arrives before the previous request.
        """
        if request.arrival_s < self._last_arrival_s:
            raise TraceError(
                "the trace",
                None,
                f"request {self.num_requests + 1} arrives at {request.arrival_s} s, the one before it at "
                f"{self._last_arrival_s} s",
                "Sort it: `sorted_by_arrival`",
            )
        self._last_arrival_s = request.arrival_s
        arrival_s = request.arrival_s / self._config.load
        self._run_until(arrival_s)
        if self._now_s < arrival_s:
            self._hold(arrival_s - self._now_s)
            self._now_s = arrival_s
        self._enqueue(request)

    def finish(self) -> None:
        """Run until all requests are served."""
        self._run_until(float("inf"))

    # The queue

    def _enqueue(self, request: Request | TokenizedRequest) -> None:
        """Queue a request: in the file if the queue is long and all priorities are equal, else in the scheduler."""
        if self._priority not in {None, request.priority}:
            self._uses_queue_file = False
            self._refill_from_file(len(self._queue_file))
        self._priority = request.priority
        if self._uses_queue_file and (len(self._queue_file) or self._scheduler.num_waiting >= self._most_waiting):
            self._queue_file.push(request)
        else:
            self._add(request)

    def _refill_from_file(self, most: int) -> None:
        """Move at most ``most`` of the file's first requests to the scheduler's queue."""
        for _ in range(min(most, len(self._queue_file))):
            self._add(self._queue_file.pop())

    def _add(self, request: Request | TokenizedRequest) -> None:
        scheduled = self._scheduled_request(request)
        arrival_s = request.arrival_s / self._config.load
        self._meters.arrived(scheduled, arrival_s, has_content=request.has_content, tenant=request.tenant)
        if not self._scheduler.add(scheduled):
            self._meters.rejected(scheduled)

    def _scheduled_request(self, request: Request | TokenizedRequest) -> scheduling.Request:
        number = self._meters.num_requests
        config = self._config
        load = partial(tokenize, request, number) if isinstance(request, Request) else lambda: request
        return scheduling.Request(
            number=number,
            num_prompt_tokens=request.input_length,
            max_new_tokens=request.output_length,
            load=self._sampler.loader(number, load),
            num_sequences=config.beam_width or config.num_samples or request.num_samples,
            priority=request.priority,
            keys=NO_KEYS if request.salt is None else RequestKeys(salt=request.salt.encode()),
            runs_ahead=config.beam_width is None,
            intent=self._intents.get(request.tenant or "", scheduling.NO_INTENT),
        )

    # The clock

    def run_step(self, before_s: float) -> bool:
        """Run the next step if it begins before ``before_s``, in seconds; return whether a step was run."""
        if self.is_idle or self._now_s >= before_s:
            return False
        self._run_step(before_s)
        return True

    @property
    def num_scheduled(self) -> int:
        """Steps scheduled so far, those among them for which there was nothing to compute."""
        return self._num_scheduled

    @property
    def peak_live(self) -> dict[str, int]:
        """Most blocks in tables after a step was scheduled, by pool."""
        return dict(self._peak_live)

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running."""
        return self._scheduler.is_idle and self._flight is None

    def _run_until(self, end_s: float) -> None:
        """Run the steps that begin before ``end_s``."""
        while self._now_s < end_s and not self.is_idle:
            self._run_step(end_s)

    def _run_step(self, before_s: float) -> None:
        """Run a step; if all requests wait for loads, advance to the next event of a tier, at most to ``before_s``."""
        if self._config.overlap:
            self._run_overlapped(before_s)
            return
        batch, work, step_s = self._schedule()
        if self._waits_for_load(work):
            self._finish_step(batch, 0.0)
            self._await_load(before_s)
            return
        self._meters.planned(batch, self._running_rows(), work)
        self._hold(step_s)
        self._meters.stepped(step_s)
        self._now_s += step_s
        self._finish_step(batch, step_s)

    def _run_overlapped(self, before_s: float) -> None:
        """Schedule the next step, then end the running one."""
        before, self._flight = self._flight, None
        waits = False
        if not self._scheduler.is_idle:
            batch, work, step_s = self._schedule()
            self._flight = batch, 0.0
            waits = self._waits_for_load(work)
            if work.num_new_tokens or work.num_swapped_tokens:  # else nothing could be scheduled without tokens
                self._meters.planned(batch, self._running_rows(), work)
                self._meters.stepped(step_s)
                self._flight = batch, step_s
        if before is not None:
            batch, step_s = before
            self._hold(step_s)
            self._now_s += step_s
            self._finish_step(batch, step_s)
            waits = waits and not step_s
        if waits:
            self._await_load(before_s)

    def _waits_for_load(self, work: StepWork) -> bool:
        """Whether a step has no work while prefixes are loaded."""
        has_loads = self._tiers is not None and self._tiers.num_loads > 0
        return has_loads and not (work.num_new_tokens or work.num_swapped_tokens)

    def _await_load(self, before_s: float) -> None:
        """Advance the time to the next event of a tier, at most to ``before_s``."""
        assert self._tiers is not None, "loads without tiers"
        event_s = self._tiers.next_event_s(self._now_s)
        assert event_s is not None, "a load under way has no next event"
        until_s = max(self._now_s, min(event_s, before_s))
        self._hold(until_s - self._now_s)
        self._now_s = until_s

    def _schedule(self) -> tuple[Batch, StepWork, float]:
        """Schedule a step; return it, its work, and its seconds."""
        self._num_scheduled += 1
        self._space.advance(self._now_s)
        if self._tiers is not None:
            self._tiers.before_step(self._now_s, none_running=not self._scheduler.running)
        batch = self._scheduler.schedule()
        self._meters.scheduled(batch, self._now_s)
        for pool, peak in self._peak_live.items():
            self._peak_live[pool] = max(peak, self._space.num_live_blocks(pool))
        if self._tiers is not None:
            for admission in batch.admitted:
                self._tiers.admitted(admission.request, admission.num_hit_tokens)
        for preempted in batch.preempted:
            if preempted.kind == "recompute":
                self._sampler.forget(preempted.request)
        work = work_of(batch.plan, self._tokens_per_block)
        return batch, work, self._step_s(work)

    def _finish_step(self, batch: scheduling.Batch, step_s: float) -> None:
        self._space.advance(self._now_s)
        token_ids, parents = self._sampler.sample(batch), self._sampler.parents(batch)
        progress = self._scheduler.finish(batch, token_ids, parents=parents)
        self._meters.progressed(progress, self._now_s)
        if self._tiers is not None:
            self._tiers.progressed(batch, progress, self._answers, self._now_s)
            self._tiers.after_step(batch, step_s)
        for request in (*progress.finished, *batch.rejected):
            self._sampler.forget(request)
        while len(self._queue_file) and (num_more := self._most_waiting - self._scheduler.num_waiting) > 0:
            self._refill_from_file(num_more)

    def _answers(self, request: scheduling.Request) -> Sequence[Int32Array]:
        """Return what each sequence of a finished request has generated; beams are not offered to tiers."""
        return [] if self._config.beam_width is not None else self._sampler.answers(request)

    def _step_s(self, work: StepWork) -> float:
        seconds = self._costs.step_s(
            work.num_new_tokens, work.num_attended_pairs, work.num_context_tokens, work.num_sequences
        )
        return seconds + self._costs.swap_s(work.num_swapped_tokens)

    def _hold(self, duration_s: float) -> None:
        scheduler = self._scheduler
        num_waiting = scheduler.num_waiting + len(self._queue_file)
        self._meters.hold(duration_s, self._running_rows(), num_waiting, scheduler.num_swapped)

    def _running_rows(self) -> RunningRows:
        """Return the running rows, rebuilt only when they have changed."""
        if self._meters.uses_rows and self._num_changes != self._scheduler.num_changes:
            self._num_changes = self._scheduler.num_changes
            self._rows = rows_of(self._scheduler.running)
        return self._rows


class QueueFile:
    """A first-in, first-out queue in a file, which exists while the queue is not empty. O(size of a request).

    >>> queue_file = QueueFile()
    >>> for seconds in (1.0, 2.0):
    ...     queue_file.push(Request(seconds, 8, 1))
    >>> len(queue_file), queue_file.pop().arrival_s, queue_file.pop().arrival_s, len(queue_file)
    (2, 1.0, 2.0, 0)
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._read_to = 0
        self._num_requests = 0

    def __len__(self) -> int:
        """Return the number of requests."""
        return self._num_requests

    def push(self, request: Request | TokenizedRequest) -> None:
        """Append a request."""
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 - open as long as a request waits
            weakref.finalize(self, self._file.close)
            self._read_to = 0
        self._file.seek(0, os.SEEK_END)
        pickle.dump(request, self._file, pickle.HIGHEST_PROTOCOL)
        self._num_requests += 1

    def pop(self) -> Request | TokenizedRequest:
        """Remove and return the first request. Removing the last one closes the file. Raises IndexError."""
        if self._file is None:
            raise IndexError("the queue is empty")
        self._file.seek(self._read_to)
        request: Request | TokenizedRequest = pickle.load(self._file)  # noqa: S301 - written by this process
        self._read_to = self._file.tell()
        self._num_requests -= 1
        if not self._num_requests:
            self._file.close()
            self._file = None
        return request


@final
class MeterPair:
    """Notifies two meters of each event.

    Args:
        first: also numbers the requests; second: notified after it.
    """

    def __init__(self, first: StepMeters, second: StepMeters) -> None:
        self._first = first
        self._second = second

    @property
    def uses_rows(self) -> bool:
        """Whether either of them uses the running rows."""
        return self._first.uses_rows or self._second.uses_rows

    @property
    def num_requests(self) -> int:
        """Number of requests that have arrived."""
        return self._first.num_requests

    def arrived(
        self, request: ScheduledRequest, arrival_s: float, *, has_content: bool, tenant: str | None = None
    ) -> None:
        """Record a request."""
        self._first.arrived(request, arrival_s, has_content=has_content, tenant=tenant)
        self._second.arrived(request, arrival_s, has_content=has_content, tenant=tenant)

    def rejected(self, request: ScheduledRequest) -> None:
        """Record that a request cannot be served."""
        self._first.rejected(request)
        self._second.rejected(request)

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Record admitted, preempted and rejected requests."""
        self._first.scheduled(batch, now_s)
        self._second.scheduled(batch, now_s)

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        """Record the work of a step."""
        self._first.planned(batch, running, work)
        self._second.planned(batch, running, work)

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:
        """Record that the present state lasts for this duration."""
        self._first.hold(duration_s, running, num_waiting, num_swapped)
        self._second.hold(duration_s, running, num_waiting, num_swapped)

    def stepped(self, step_s: float) -> None:
        """Record the seconds of the last planned step."""
        self._first.stepped(step_s)
        self._second.stepped(step_s)

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record requests that got their first token, or all tokens."""
        self._first.progressed(progress, end_s)
        self._second.progressed(progress, end_s)


LEAST_ROOM: Final = 4096


class OutputStore:
    """Outputs by numbers of requests. It takes at most twice the memory of its outputs at their largest.

    >>> store = OutputStore()
    >>> store.put(7, np.array([1, 2, 3], np.int32))
    >>> store.put(8, np.array([4, 5, 6], np.int32))
    >>> store.of(8, 1, 2).tolist(), store.together([8, 7], np.array([0, 1]), 2).tolist()
    ([5, 6], [[4, 2], [5, 3]])
    """

    def __init__(self) -> None:
        self._tokens = np.empty(LEAST_ROOM, np.int32)
        self._num_used = 0
        self._spans: dict[int, tuple[int, int]] = {}

    def put(self, number: int, token_ids: Int32Array) -> None:
        """Store an output, in place of an earlier one of this number. O(tokens), and now and then O(all tokens)."""
        self.drop(number)
        if self._num_used + len(token_ids) > len(self._tokens):
            self._move(len(token_ids))
        start, stop = self._num_used, self._num_used + len(token_ids)
        self._tokens[start:stop] = token_ids
        self._spans[number] = start, stop
        self._num_used = stop

    def drop(self, number: int) -> None:
        """Drop an output, if there is one."""
        self._spans.pop(number, None)

    def of(self, number: int, first: int, count: int) -> Int32Array:
        """Return some tokens of an output, fewer where it ends: int32 ``[count]``. Raises KeyError."""
        start, stop = self._spans[number]
        return self._tokens[start + first : min(start + first + count, stop)].copy()

    def together(self, numbers: Sequence[int], firsts: Int64Array, count: int) -> Int32Array:
        """Return equally many tokens of several outputs: int32 ``[count, outputs]``. Raises KeyError.

        Args:
            numbers: numbers of the outputs.
            firsts: int64 ``[outputs]``, place of the first token in each.
            count: tokens of each; no output may end earlier.
        """
        spans = self._spans
        places = np.array([spans[number][0] for number in numbers], np.int64) + firsts
        tokens: Int32Array = self._tokens[places + np.arange(count)[:, np.newaxis]]
        return tokens

    def _move(self, num_more: int) -> None:
        """Move the outputs into a new array of twice their size."""
        num_held = sum(stop - start for start, stop in self._spans.values())
        moved = np.empty(max(LEAST_ROOM, 2 * (num_held + num_more)), np.int32)
        self._num_used = 0
        for number, (start, stop) in self._spans.items():
            end = self._num_used + stop - start
            moved[self._num_used : end] = self._tokens[start:stop]
            self._spans[number] = self._num_used, end
            self._num_used = end
        self._tokens = moved


FIRST_STEPS_AHEAD: Final = 4
MOST_STEPS_AHEAD: Final = 64
"""Most steps whose tokens are laid out ahead. The number is small after each change of the running requests, since
changes are frequent, and grows fourfold each time without a change."""
TOKEN_MASK: Final = 2**31 - 1
SEQUENCE_STRIDE: Final = 0x61C88647
"""Odd, so that its first ``TOKEN_MASK`` multiples differ."""


class ScriptedSampler:
    """Samples the tokens of every batch.

    Args:
        seed: seed of the whole replay.
        has_beams: whether the sequences of a request are beams.
    """

    def __init__(self, seed: int, *, has_beams: bool) -> None:
        self._parents = BeamParents(seed) if has_beams else None
        self._outputs = OutputStore()
        self._decoding: Decoding | None = None
        self._tokens = np.zeros((0, 0), np.int32)
        self._num_taken = 0

    def loader(self, number: int, load: Callable[[], TokenizedRequest]) -> Callable[[int], Int32Array]:
        """Make the function that returns a request's known tokens, from the one that makes all of its tokens."""
        return partial(self._load, number, load)

    def _load(self, number: int, load: Callable[[], TokenizedRequest], num_generated: int) -> Int32Array:
        request = load()
        self._outputs.put(number, request.output_token_ids)
        return np.concatenate((request.prompt_token_ids, request.output_token_ids[:num_generated]))

    def forget(self, request: ScheduledRequest) -> None:
        """Drop the state of a request that is preempted or has ended."""
        self._outputs.drop(request.number)
        if self._parents is not None:
            self._parents.forget(request)

    def answers(self, request: ScheduledRequest) -> list[Int32Array]:
        """Return all tokens that each sequence of a request generates; before :meth:`forget`. Empty without any."""
        if not request.max_new_tokens:
            return []
        return np.split(self._next_tokens(request, 0, request.max_new_tokens), request.num_sequences)

    def sample(self, batch: Batch) -> Int32Array:
        """Return the tokens that follow a batch: int32 ``[batch.num_samples]``."""
        decoded = self._next_decoded(batch.decoding) if batch.decoding is not None else batch.decoded_token_ids
        first = [
            self._next_tokens(chunk.request, chunk.request.num_generated, 1)
            for chunk in batch.prefilling
            if chunk.num_samples
        ]
        return np.concatenate((decoded, *first)) if first else decoded

    def _next_tokens(self, request: ScheduledRequest, num_generated: int, num_tokens: int) -> Int32Array:
        """Return the next tokens of a request: int32 ``[num_sequences * num_tokens]``, sequence by sequence."""
        token_ids = self._outputs.of(request.number, num_generated, num_tokens)
        if request.num_sequences == 1:
            return token_ids
        return sequence_tokens(token_ids, request.num_sequences, request.number)

    def _next_decoded(self, decoding: Decoding) -> Int32Array:
        if self._decoding is not decoding:
            self._decoding, self._num_taken = decoding, 0
            self._tokens = self._ahead(decoding, FIRST_STEPS_AHEAD)
        elif self._num_taken == len(self._tokens):
            self._num_taken = 0
            self._tokens = self._ahead(decoding, min(4 * len(self._tokens), MOST_STEPS_AHEAD))
        self._num_taken += 1
        tokens: Int32Array = self._tokens[self._num_taken - 1]
        return tokens

    def _ahead(self, decoding: Decoding, num_wanted: int) -> Int32Array:
        """Lay out the next tokens of requests that decode together: int32 ``[steps, sequences]``."""
        num_ahead = min(num_wanted, decoding.num_steps_left)
        if len(decoding.rows) == len(decoding.requests):
            numbers = [request.number for request in decoding.requests]
            return self._outputs.together(numbers, np.array(decoding.num_before) + decoding.num_steps, num_ahead)
        by_sequence = np.concatenate(
            [
                self._next_tokens(request, num_before + decoding.num_steps, num_ahead)
                for request, num_before in zip(decoding.requests, decoding.num_before, strict=True)
            ]
        )
        return np.ascontiguousarray(by_sequence.reshape(len(decoding.rows), num_ahead).T)

    def parents(self, batch: Batch) -> Mapping[ScheduledRequest, list[int]]:
        """Return the parent of each beam, for every request of a batch that has decoded beams."""
        if self._parents is None or batch.decoding is None:
            return {}
        return {request: self._parents.draw(request) for request in batch.decoding.requests}


class BeamParents:
    """Draws the parent of each new beam: independently, each beam with equal probability.

    In population genetics this is the Wright-Fisher process (Fisher 1930; Wright 1931): going back in time, any two
    of k beams have a common ancestor a mean of k tokens ago. Each request has its own generator.

    Args:
        seed: seed of the whole replay.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[int, np.random.Generator] = {}

    def draw(self, request: ScheduledRequest) -> list[int]:
        """Draw the parent of each new beam, as positions among the old ones."""
        generator = self._generators.get(request.number)
        if generator is None:
            generator = self._generators[request.number] = np.random.default_rng((self._seed, request.number))
        parents: list[int] = generator.integers(request.num_sequences, size=request.num_sequences).tolist()
        return parents

    def forget(self, request: ScheduledRequest) -> None:
        """Drop the generator of a request that has ended, or restarts."""
        self._generators.pop(request.number, None)


def sequence_tokens(token_ids: Int32Array, num_sequences: int, number: int) -> Int32Array:
    """Make the tokens of samples or beams from those of the first: different at each position, and in each request.

    Requests and sequences are numbered together by Cantor's pairing, so that no two of the first 65,000 requests get
    equal tokens, even if the trace has equal outputs for them.

    Args:
        token_ids: int32 ``[n]``, none negative.
        num_sequences: number of sequences.
        number: number of the request.

    Returns:
        int32 ``[num_sequences * n]``, sequence by sequence, none negative.
    """
    sequences = np.arange(num_sequences, dtype=np.int64)
    diagonals = number + sequences
    pairs = diagonals * (diagonals + 1) // 2 + sequences
    offsets = np.where(sequences > 0, (pairs & TOKEN_MASK) * SEQUENCE_STRIDE, 0)
    return ((token_ids + offsets[:, np.newaxis]) & TOKEN_MASK).astype(np.int32).ravel()
