"""The actions of a store on their way: what is sent to the body, and what its ends mean.

Deletes are sent first, since they make room, then reads, since requests wait for them, then writes. The circuit breaker
decides whether anything is sent at all. An overdue action counts as one failure, and stays in flight until the driver
reports it; its end tells nothing of the body. Nor does a delete that succeeds: where all is gone, deletes do.
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
        self._note_success(action)
        fault = Fault.CORRUPT if self._reads.is_another_frame(action, nbytes) else None
        if fault is not None:
            self.faults[str(fault)] += 1
        self._end(action, fault)

    def fail(self, action: int, fault: Fault, now_s: float) -> None:
        """End an action that failed. What is overdue has counted as a failure of the body already."""
        self.faults[str(fault)] += 1
        if fault not in BREAKING:
            self._note_success(action)
        elif not self._awaiting(action).is_late(action):
            self._note_failure(action, now_s, hangs=fault is Fault.TIMEOUT)
        self._end(action, fault)

    def expire(self, action: int, now_s: float) -> None:
        """Count an overdue action as failed, if it is in flight. It stays so until the driver reports it."""
        if self._owner_of(action) is not None:
            self.faults["overdue"] += 1
            self._note_failure(action, now_s, hangs=True)
        for owner in (self._reads, self._writes, self._deletes):
            owner.expire(action)

    def _owner_of(self, action: int) -> Reads | Writes | Deletes | None:
        """Return what awaits the end of an action; None if nothing does."""
        owners = (self._reads, self._writes, self._deletes)
        return next((owner for owner in owners if owner.awaits(action)), None)

    def _awaiting(self, action: int) -> Reads | Writes | Deletes:
        owner = self._owner_of(action)
        assert owner is not None, f"action {action} is not in flight"
        return owner

    def _end(self, action: int, fault: Fault | None) -> None:
        self._awaiting(action).end(action, fault)
        self.send()

    def _note_success(self, action: int) -> None:
        """Count what the body did in time, if it tells that the body works."""
        owner = self._awaiting(action)
        if owner is self._deletes or owner.is_late(action):
            return
        self._breaker.note_success(self._reads.seconds_of(action) if owner is self._reads else None)

    def _note_failure(self, action: int, now_s: float, *, hangs: bool) -> None:
        """Count a failure of the body; if the breaker opens, what is queued is answered."""
        owner = self._awaiting(action)
        if owner is self._deletes and self._breaker.state is BreakerState.PROBING:
            return  # content that cannot be deleted would keep the tier out of service
        read_s = self._reads.seconds_of(action) if hangs and owner is self._reads else None
        if self._breaker.note_failure((type(owner).__name__, owner.key_of(action)), now_s, read_s):
            self._reads.drop_queue()
            self._writes.drop_queue()

    def _may_send(self) -> bool:
        if self._breaker.state is BreakerState.PROBING:
            return self._reads.num_prompt + self._writes.num_prompt == 0
        return self._breaker.state is BreakerState.CLOSED

    def _may_delete(self) -> bool:
        if self._breaker.state is BreakerState.PROBING:
            return self._deletes.num_prompt == 0
        return self._breaker.state is BreakerState.CLOSED

    def _send_deletes(self) -> None:
        for key in self._deletes.due():
            if not self._may_delete():
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
