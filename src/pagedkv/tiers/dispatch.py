"""The actions of a store on their way: what is sent to the body, and what its ends mean.

Deletes are sent first, since they make room, then reads, since requests wait for them, then writes. The circuit breaker
decides whether anything is sent at all. An overdue action counts as one failure, and stays in flight until the driver
reports it.
"""

from collections import Counter
from typing import Final

from pagedkv.contract.errors import ConfigurationError
from pagedkv.tiers.actions import Action, Fault
from pagedkv.tiers.breaker import BreakerState, CircuitBreaker
from pagedkv.tiers.deadlines import Deadlines
from pagedkv.tiers.deletes import Deletes
from pagedkv.tiers.reads import Reads
from pagedkv.tiers.writes import Writes

__all__ = ["Dispatch"]

BREAKING: Final = frozenset({Fault.TIMEOUT, Fault.IO})


class Dispatch:
    """The actions of one store, out and in.

    Args:
        deadlines: numbers the actions, and has when each is due.
        breaker: counts failures, and stops sending while it is open.
        reads, writes, deletes: what is to be done, and what is in flight.
    """

    def __init__(
        self, deadlines: Deadlines, breaker: CircuitBreaker, reads: Reads, writes: Writes, deletes: Deletes
    ) -> None:
        self._deadlines = deadlines
        self._breaker = breaker
        self._reads = reads
        self._writes = writes
        self._deletes = deletes
        self._actions: list[Action] = []
        self.faults: Counter[str] = Counter()

    def take_actions(self) -> list[Action]:
        """Take the actions since the last call, to be carried out in any order."""
        actions, self._actions = self._actions, []
        return actions

    def send(self) -> None:
        """Send what may be sent: deletes, then reads, then writes."""
        self._send_deletes()
        self._send_reads()
        self._send_writes()

    def require_awaited(self, action: int) -> None:
        """Raise ConfigurationError unless the end of an action is still to be reported. Changes nothing."""
        if self._owner_of(action) is None:
            raise ConfigurationError(f"action {action} is not in flight: it was reported before, or is another store's")

    def complete(self, action: int, nbytes: int | None) -> None:
        """End an action that is done. A read that brought another frame than the index counts is corrupt."""
        self._breaker.note_success()
        fault = Fault.CORRUPT if self._reads.is_another_frame(action, nbytes) else None
        if fault is not None:
            self.faults[str(fault)] += 1
        self._end(action, fault)

    def fail(self, action: int, fault: Fault, now_s: float) -> None:
        """End an action that failed. What is overdue has counted as a failure of the body already."""
        self.faults[str(fault)] += 1
        owner = self._owner_of(action)
        if fault not in BREAKING:
            self._breaker.note_success()
        elif owner is not None and not owner.is_late(action):
            self._note_failure(now_s)
        self._end(action, fault)

    def expire(self, action: int, now_s: float) -> None:
        """Count an overdue action as failed, if it is in flight. It stays so until the driver reports it."""
        if self._reads.expire(action) or self._writes.expire(action) or self._deletes.expire(action):
            self.faults["overdue"] += 1
            self._note_failure(now_s)

    def _owner_of(self, action: int) -> Reads | Writes | Deletes | None:
        """Return what awaits the end of an action; None if nothing does."""
        owners = (self._reads, self._writes, self._deletes)
        return next((owner for owner in owners if owner.awaits(action)), None)

    def _end(self, action: int, fault: Fault | None) -> None:
        owner = self._owner_of(action)
        assert owner is not None, f"action {action} is not in flight"
        owner.end(action, fault)
        self.send()

    def _note_failure(self, now_s: float) -> None:
        """Count a failure of the body; if the breaker opens, what is queued is answered."""
        if self._breaker.note_failure(now_s):
            self._reads.drop_queue()
            self._writes.drop_queue()

    def _may_send(self) -> bool:
        if self._breaker.state is BreakerState.PROBING:
            return self._reads.num_prompt + self._writes.num_prompt + self._deletes.num_prompt == 0
        return self._breaker.state is BreakerState.CLOSED

    def _send_deletes(self) -> None:
        for key in self._deletes.due():
            if not self._may_send():
                return
            self._send(self._deletes.begin(self._deadlines.take_number(), key))

    def _send_reads(self) -> None:
        while self._reads.can_begin and self._may_send():
            self._send(self._reads.begin(self._deadlines.take_number()))

    def _send_writes(self) -> None:
        while self._writes.can_begin and self._may_send():
            if self._writes.drop_found():
                continue
            if not self._writes.make_share():
                self._writes.drop_for_room()
                continue
            if not self._writes.has_room:
                self._writes.make_room()
                self._send_deletes()
            if self._writes.has_room:
                self._send(self._writes.begin(self._deadlines.take_number()))
            elif self._writes.waits_for_deletes:
                return
            else:
                self._writes.drop_for_room()

    def _send(self, action: Action) -> None:
        self._deadlines.add(action.action, action.deadline_s)
        self._actions.append(action)
