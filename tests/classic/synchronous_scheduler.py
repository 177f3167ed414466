"""A synchronous scheduler that preempts several victims a round, over the classic door or bare numbers of blocks."""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from pagedkv import AllocStatus, BlockSpaceManager, FullAttention, Sequence, SequenceGroup, SpaceConfig, StepPlan
from tests.classic.device import Device

__all__ = ["Classic", "FreedAtOnce", "Overlapped", "SynchronousScheduler", "served_through"]

BLOCK_SIZE: Final = 4
NUM_BLOCKS: Final = 24


@dataclass(eq=False)
class Request:
    """One sequence, and the length at which it is done."""

    seq: Sequence
    num_wanted: int

    @property
    def group(self) -> SequenceGroup:
        """The sequence as a group of its own."""
        return SequenceGroup(f"request {self.seq.seq_id}", [self.seq])


class Door(Protocol):
    """What the scheduler asks of a block manager, for one request at a time."""

    def can_admit(self, request: Request) -> bool:
        """Tell whether its prompt fits."""

    def admit(self, request: Request) -> None:
        """Give its prompt blocks."""

    def can_grow(self, request: Request) -> bool:
        """Tell whether its newest token fits."""

    def grow(self, request: Request) -> None:
        """Give its newest token a slot."""

    def preempt(self, request: Request) -> None:
        """Take its blocks away."""

    def can_resume(self, request: Request) -> bool:
        """Tell whether it fits again, its newest token included."""

    def resume(self, request: Request) -> None:
        """Bring it back, and give its newest token a slot."""

    def free(self, request: Request) -> None:
        """Give it up."""

    def end(self, running: list[Request]) -> None:
        """End the round, in which these have run."""


@dataclass(eq=False)
class FreedAtOnce:
    """The simplest block manager: numbers of blocks, which are free as soon as a request is preempted."""

    num_free: int = NUM_BLOCKS
    held: dict[Request, int] = field(default_factory=dict)

    def _num_missing(self, request: Request) -> int:
        return -(-len(request.seq.token_ids) // BLOCK_SIZE) - self.held.get(request, 0)

    def can_admit(self, request: Request) -> bool:
        """Compare two numbers."""
        return self._num_missing(request) <= self.num_free

    def admit(self, request: Request) -> None:
        """Take what it does not hold yet."""
        missing = self._num_missing(request)
        self.num_free -= missing
        self.held[request] = self.held.get(request, 0) + missing

    can_grow = can_resume = can_admit
    grow = resume = admit

    def preempt(self, request: Request) -> None:
        """Take its blocks away, at once."""
        self.num_free += self.held.pop(request)

    free = preempt

    def end(self, running: list[Request]) -> None:
        """Nothing waits for the end of a round."""


class Classic:
    """The classic door over a device, with rounds that are closed for each victim, or only at their end."""

    def __init__(self, *, closes_for_victims: bool, num_blocks: int = NUM_BLOCKS, in_order: bool = False) -> None:
        """Build a space as large as the numbers above."""
        # No prefix caching, so that a resumed request needs as many blocks as the simple manager counts.
        config = SpaceConfig(
            (FullAttention(BLOCK_SIZE),),
            num_blocks + 1,
            200,
            max_sequences=64,
            max_tokens=64,
            watermark=0,
            prefix_caching=False,
            in_order=in_order,
        )
        self.manager = BlockSpaceManager(config)
        self.device = Device(config)
        self.served: list[Sequence] = []
        self.closes_for_victims = closes_for_victims

    def can_admit(self, request: Request) -> bool:
        """Ask can_allocate."""
        return self.manager.can_allocate(request.group) is AllocStatus.OK

    def admit(self, request: Request) -> None:
        """Allocate."""
        self.served.append(request.seq)
        self.manager.allocate(request.group)

    def can_grow(self, request: Request) -> bool:
        """Ask can_append_slots."""
        return self.manager.can_append_slots(request.group)

    def grow(self, request: Request) -> None:
        """Append slots."""
        self.manager.append_slots(request.seq)

    def preempt(self, request: Request) -> None:
        """Swap out, and close the round so that the blocks are free."""
        assert self.manager.can_swap_out(request.group)
        self.manager.swap_out(request.group)
        if self.closes_for_victims:
            self._end_round()

    def can_resume(self, request: Request) -> bool:
        """Ask can_swap_in, which counts the newest token."""
        return self.manager.can_swap_in(request.group) is AllocStatus.OK

    def resume(self, request: Request) -> None:
        """Swap in and append slots."""
        self.manager.swap_in(request.group)
        self.manager.append_slots(request.seq)

    def free(self, request: Request) -> None:
        """Free."""
        self.manager.free(request.seq)
        self.served.remove(request.seq)

    def end(self, running: list[Request]) -> None:
        """End the round, and read back what each running request would attend to."""
        self._end_round()
        for request in running:
            tokens = request.seq.token_ids
            assert self.device.read(self.manager.row_of(request.seq), len(tokens)) == tokens

    def _end_round(self) -> None:
        self.manager.end_round(lambda plan: self.device.run(plan, self._tokens()))

    def _tokens(self) -> dict[int, list[int]]:
        """What each row of those served holds now."""
        alive = [seq for seq in self.served if self.manager.is_allocated(seq)]
        return {self.manager.row_of(seq): list(seq.token_ids) for seq in alive}


class Overlapped(Classic):
    """The classic door with one round in flight: it has not run yet while the next one is scheduled.

    Whoever is preempted is freed, and computed again when it is resumed.
    """

    def __init__(self, *, num_blocks: int, in_order: bool) -> None:
        """Build a space that the device works for in order, or not."""
        super().__init__(closes_for_victims=False, num_blocks=num_blocks, in_order=in_order)
        self.in_flight: tuple[StepPlan, dict[int, list[int]]] | None = None

    def preempt(self, request: Request) -> None:
        """Free."""
        self.free(request)

    can_resume = Classic.can_admit
    resume = Classic.admit

    def end(self, running: list[Request]) -> None:
        """Plan the round, then let the one before run and end it."""
        assert all(self.manager.is_allocated(request.seq) for request in running)
        before, self.in_flight = self.in_flight, (self.manager.space.plan_step(), self._tokens())
        if before:
            plan, tokens = before
            self.device.run(plan, tokens)
            self.manager.space.acknowledge(plan.step_id)
        self.manager.space.check()


class SynchronousScheduler:
    """First come, first served; the latest arrivals are preempted until the earlier ones can grow.

    Attributes:
        num_preemptions: requests preempted so far; num_rounds: rounds so far.
    """

    def __init__(self, door: Door, requests: list[Request]) -> None:
        """Let all requests wait, in this order."""
        self._door = door
        self._waiting = deque(requests)
        self._running: list[Request] = []
        self._preempted: list[Request] = []
        self.num_preemptions = self.num_rounds = 0

    def serve_all(self) -> None:
        """Serve every request to its end."""
        while self._waiting or self._running or self._preempted:
            self._serve_round()
            self.num_rounds += 1
            assert self.num_rounds < 5000, "the scheduler makes no progress"

    def _serve_round(self) -> None:
        num_preemptions = self.num_preemptions
        self._grow()
        if self.num_preemptions == num_preemptions:
            self._resume()
            self._admit()
        self._door.end(self._running)
        for request in list(self._running):
            request.seq.token_ids.append(1000 * request.seq.seq_id + len(request.seq.token_ids))
            if len(request.seq.token_ids) == request.num_wanted:
                self._door.free(request)
                self._running.remove(request)

    def _grow(self) -> None:
        queue, grown = deque(self._running), list[Request]()
        while queue:
            request = queue.popleft()
            while not self._door.can_grow(request):
                victim = queue.pop() if queue else request
                self._preempt(victim)
                if victim is request:
                    break
            else:
                self._door.grow(request)
                grown.append(request)
        self._running = grown

    def _preempt(self, victim: Request) -> None:
        self._door.preempt(victim)
        self._preempted.append(victim)
        self._preempted.sort(key=lambda request: request.seq.seq_id)
        self.num_preemptions += 1

    def _resume(self) -> None:
        while self._preempted and self._door.can_resume(self._preempted[0]):
            self._door.resume(self._preempted[0])
            self._running.append(self._preempted.pop(0))

    def _admit(self) -> None:
        while self._waiting and not self._preempted and self._door.can_admit(self._waiting[0]):
            self._door.admit(self._waiting[0])
            self._running.append(self._waiting.popleft())


def served_through(door: Door, seed: int) -> SynchronousScheduler:
    """Serve forty requests of random lengths through a door, to the end."""
    random = Random(seed)
    requests = [
        Request(Sequence(number, [1000 * number + at for at in range(random.randint(3, 12))]), random.randint(20, 60))
        for number in range(40)
    ]
    scheduler = SynchronousScheduler(door, requests)
    scheduler.serve_all()
    return scheduler
