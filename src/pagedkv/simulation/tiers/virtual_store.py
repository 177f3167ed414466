"""VirtualStore: a store core and a medium on the virtual clock. An entry is a key and a number of bytes.

It replaces an engine's :class:`~pagedkv.tiers.TierStore`, whose threads carry actions out. Here the medium computes the
time at which an action ends, and :meth:`VirtualStore.advance` reports the ends up to a time, in their order.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np
import numpy.typing as npt

from pagedkv.simulation.tiers.medium import Medium
from pagedkv.tiers import (
    BreakerState,
    Load,
    Loaded,
    LoadedRuns,
    Run,
    StoreConfig,
    StoreCore,
    StoreEvents,
    StoreStatistics,
    array_of,
)

__all__ = ["VirtualStore"]

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
