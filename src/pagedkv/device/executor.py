"""PlanExecutor: executes whole plans on a device, in their documented order, and reports which steps are done.

A launch returns at once, and the step runs on the device after earlier ones; the host does not wait here. The work of
a step in the stream of the steps, and in that of the swaps::

    steps   | tables, batch, slots | zero new blocks | wait for what is swapped in | copies | forward pass | event
    swaps   | swaps out | swaps in |

Blocks that are swapped out are read concurrently with the forward pass. If the forward pass writes to a block that is
still being read, it waits. The core reuses no block of a swap before the step is acknowledged, and a step is done only
when its swaps are done.

``SpaceConfig.in_order`` selects one of two modes. In order: every step must be launched in the stream of the first one,
since the core reuses blocks that earlier steps may still access. Fenced: each step may have a stream of its own, and
waits for the previous one by an event.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar, final

import numpy as np
import torch

from pagedkv.contract.answers import AbortedSteps
from pagedkv.contract.arguments import as_flag, require_instance
from pagedkv.contract.plan import BlockMoves, StepPlan
from pagedkv.contract.spec import StepId
from pagedkv.device.block_tables import BlockTables, StepInputs, require_fingerprint
from pagedkv.device.storage import KVStorage
from pagedkv.device.table_arrays import HostTables, SpaceTables
from pagedkv.device.transfers import CopyTicket, Transfers, block_array, require_pairs
from pagedkv.errors import (
    ConfigurationError,
    DeviceLostError,
    NoHostPoolError,
    PlanError,
    StepError,
    StorageError,
    TensorError,
)
from pagedkv.fingerprint import difference, fingerprint

Result = TypeVar("Result")


class _State(Enum):
    RUNNING = "running"
    FAILED = "a step failed and is to be aborted"
    ENDED = "the device is lost"


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A step that was launched."""

    step_id: StepId
    event: "torch.cuda.Event | None"
    tickets: tuple[CopyTicket, ...]

    def is_done(self) -> bool:
        return (self.event is None or self.event.query()) and all(ticket.is_done() for ticket in self.tickets)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        for ticket in self.tickets:
            ticket.wait()

    def __repr__(self) -> str:
        return f"step {self.step_id}"


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Blocks of a pool that a swap out reads."""

    pool: str
    block_ids: frozenset[int]
    ticket: CopyTicket


@final
class PlanExecutor:
    """Executes the plans of one space.

    Args:
        storage: the memory of blocks.
        tables: the block tables, of the same configuration and on the same device.
        transfers: transfers in that storage; None: new ones.
        zero_new_blocks: whether to zero blocks that a plan allocates without content, so that no stale content is
            read. Loaded content must then be written after the launch of that plan.

    Raises:
        TensorError: storage and tables are on different devices.
        ConfigurationError: storage and tables are built from configurations with different fingerprints
            (:mod:`pagedkv.fingerprint`), or the transfers are of another storage.
    """

    def __init__(
        self,
        storage: KVStorage,
        tables: BlockTables,
        *,
        transfers: Transfers | None = None,
        zero_new_blocks: bool = True,
    ) -> None:
        require_instance(storage, KVStorage, "storage")
        require_instance(tables, BlockTables, "tables")
        if storage.device != tables.device:
            raise TensorError(f"the storage is on {storage.device}, but the tables are on {tables.device}")
        differences = difference(storage.config, tables.config)
        if differences:
            raise ConfigurationError(
                f"storage and tables must be built from the space's configuration, but they differ: {differences}"
            )
        if transfers is not None:
            require_instance(transfers, Transfers, "transfers")
            if transfers.storage is not storage:
                raise ConfigurationError("transfers must move blocks of the executor's storage, got those of another")
        self.storage = storage
        self.tables = tables
        self.transfers = Transfers(storage) if transfers is None else transfers
        self.zero_new_blocks = as_flag(zero_new_blocks, "zero_new_blocks")
        self.in_order = storage.config.in_order
        self._fingerprint = fingerprint(storage.config)
        self._state = _State.RUNNING
        self._next_step: int | None = None
        self._aborted: set[int] = set()
        self._last_done = StepId(0)
        self._launched: deque[_Launched] = deque()
        self._begun: list[CopyTicket] = []  # swaps of the step that is being launched, or whose launch failed
        self._stream: torch.cuda.Stream | None = None
        self._last_event: torch.cuda.Event | None = None
        self._reading: list[_Reading] = []
        self._host_tables = HostTables(SpaceTables.of(storage.config), tables.max_rows)
        self._swaps = any(storage.config.host_blocks_by_pool().values())

    # Steps

    def launch(self, plan: StepPlan, forward: Callable[[StepInputs], Result]) -> Result:
        """Execute a plan in the current stream; ``forward`` launches the model's kernels after the plan's own work.

        Args:
            plan: the space's next plan; the first may have any number.
            forward: called once, with the step's inputs; its result is returned.

        Raises:
            PlanError, TensorError, BlockError, NoHostPoolError: the plan is of a space with another configuration, or
                does not fit storage and tables.
            ConfigurationError: ``forward`` is not callable.
            StepError: the plan is not the next one, or an earlier step failed and was not aborted.
            StorageError: the storage is asleep.
            DeviceLostError: the device failed; no further plan is executed.

        If any of these except the last is raised, no part of the plan was executed. Exceptions of ``forward`` propagate
        unchanged. After any exception call ``space.abort(plan.step_id)``, and :meth:`abort` with its result.
        """
        if self._state is not _State.RUNNING:
            self._require_alive()
            raise StepError(f"step {self._next_step} failed: abort it in the space, and pass the result to abort()")
        if not callable(forward):
            raise ConfigurationError(f"forward must be callable as forward(inputs), got {forward!r}")
        device = self.storage.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # asked once, since it takes 4 us
        self._require_next(plan, stream)
        require_fingerprint(plan.buffer, self._fingerprint)
        if not self.storage.is_awake:
            raise StorageError("the storage is asleep: wake it before plans are executed")
        self._require_moves(plan)
        try:
            if stream is not None and self._last_event is not None and not self.in_order:
                stream.wait_event(self._last_event)
            inputs = self.tables.stage(plan)
            self._state = _State.FAILED  # until everything is launched
            self._next_step = plan.step_id
            result = self._carry_out(plan, inputs, forward, stream)
        except Exception as problem:
            self._end_if_lost(problem)
            raise
        self._state = _State.RUNNING
        self._next_step = plan.step_id + 1
        if self._aborted:
            self._skip_aborted()
        return result

    def done(self) -> tuple[StepId, ...]:
        """Return the steps that ended since the last call, oldest first, without waiting. Acknowledge them in order.

        Raises:
            DeviceLostError: the device failed; the error lists the steps that had ended before.
        """
        self._require_alive()
        over = []
        try:
            while self._launched and self._launched[0].is_done():
                over.append(self._launched.popleft().step_id)
        except Exception as problem:
            self._last_done = over[-1] if over else self._last_done
            self._end_if_lost(problem, tuple(over))
            raise
        self._last_done = over[-1] if over else self._last_done
        return tuple(over)

    def wait(self) -> tuple[StepId, ...]:
        """Wait for all steps in flight; returns and raises as :meth:`done`."""
        self._require_alive()
        try:
            for launched in self._launched:
                launched.wait()
        except Exception as problem:
            self._end_if_lost(problem)
            raise
        return self.done()

    def abort(self, aborted: AbortedSteps) -> None:
        """Drop steps that the space has aborted, after waiting for those that run on the device.

        Args:
            aborted: the result of ``space.abort``.

        Raises:
            StepError: :meth:`done` has returned one of them already.
            DeviceLostError: the device failed.
        """
        self._require_alive()
        require_instance(aborted, AbortedSteps, "what was aborted", StepError)
        if not aborted.step_ids:
            return
        first = min(aborted.step_ids)
        if first <= self._last_done:
            raise StepError(f"step {first} cannot be aborted: done() has returned the steps up to {self._last_done}")
        try:
            for ticket in self._begun:
                ticket.wait()
            if self._state is _State.FAILED and not self.in_order and self.storage.device.type == "cuda":
                torch.cuda.synchronize(self.storage.device)  # the next step may be launched in another stream
            for launched in self._launched:
                if launched.step_id >= first:
                    launched.wait()
        except Exception as problem:
            self._end_if_lost(problem)
            raise
        self._begun = []
        self._launched = deque(each for each in self._launched if each.step_id < first)
        self.tables.forget_steps(first)
        following = self._next_step or 0
        self._aborted.update(step_id for step_id in aborted.step_ids if step_id >= following)
        if self._next_step in aborted.step_ids:
            self._state = _State.RUNNING
        self._skip_aborted()

    def _skip_aborted(self) -> None:
        """Skip the numbers of steps that were aborted before they were launched."""
        while self._next_step in self._aborted:
            self._aborted.remove(self._next_step)
            self._next_step += 1

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and that :meth:`done` has not returned yet."""
        return len(self._launched)

    # Checks

    def _require_alive(self) -> None:
        if self._state is _State.ENDED:
            raise self._lost("it failed before")

    def _require_next(self, plan: StepPlan, stream: "torch.cuda.Stream | None") -> None:
        if not isinstance(plan, StepPlan):
            raise PlanError(f"a step is a StepPlan (StepPlan.from_buffer restores one), got {type(plan).__name__}")
        if plan.step_id in self._aborted or self._next_step not in {None, plan.step_id}:
            raise StepError(
                f"step {plan.step_id} cannot be executed: step {self._next_step} is next; each step runs once, in "
                "order, and not after it was aborted"
            )
        if self.in_order and stream is not None:
            if self._stream is not None and stream != self._stream:
                raise StepError(
                    "this space's steps run in order, on one stream: launch them on the stream of the first one, or "
                    "build the space with in_order=False"
                )
            self._stream = stream

    def _require_moves(self, plan: StepPlan) -> None:
        for kind, parts in (("swaps out", plan.swaps_out), ("swaps in", plan.swaps_in), ("copies", plan.copies)):
            for moves in parts:
                self._require_pair(kind, moves)
        for new in plan.new_blocks:
            pool = self.storage.pools.get(new.pool)
            if pool is None:
                raise PlanError(f"the plan names pool {new.pool!r}; there are {list(self.storage.pools)}")
            block_array(new.block_ids, f"new blocks of pool {new.pool!r}", pool.num_blocks)

    def _require_pair(self, kind: str, moves: BlockMoves) -> None:
        pool = self.storage.pools.get(moves.pool)
        if pool is None:
            raise PlanError(f"the plan names pool {moves.pool!r}; there are {list(self.storage.pools)}")
        if kind != "copies" and not pool.num_host_blocks:
            raise NoHostPoolError(f"the plan {kind} of pool {moves.pool!r}, which has no host pool")
        most_src = pool.num_host_blocks if kind == "swaps in" else pool.num_blocks
        most_dst = pool.num_host_blocks if kind == "swaps out" else pool.num_blocks
        sources = block_array(moves.src_ids, f"sources of {kind} in pool {moves.pool!r}", most_src)
        destinations = block_array(moves.dst_ids, f"destinations of {kind} in pool {moves.pool!r}", most_dst)
        require_pairs(sources, destinations, moves.pool)

    # Carrying out

    def _carry_out(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        forward: Callable[[StepInputs], Result],
        stream: "torch.cuda.Stream | None",
    ) -> Result:
        if self._swaps:
            self._host_tables.note(plan)
        tickets = self._begun = []
        if plan.swaps_out or plan.swaps_in:
            self._swap(plan, tickets)
        self.tables.launch()
        self.tables.fence(stream)
        if self.zero_new_blocks:
            for new in plan.new_blocks:
                self.transfers.zero(new.pool, new.block_ids)
        for ticket in tickets[len(plan.swaps_out) :]:
            _wait_on_device(ticket, stream)
        for moves in plan.copies:
            self.transfers.copy(moves.pool, moves.src_ids, moves.dst_ids)
        if self._reading:
            self._wait_for_readers(plan, stream)
        result = forward(inputs)
        event = None
        if stream is not None:
            event = torch.cuda.Event()
            event.record(stream)
        self._last_event = event
        launched = _Launched(plan.step_id, event, tuple(tickets))
        self._begun = []
        self._launched.append(launched)
        if event is not None or tickets:  # else the step has ended by now
            self.storage.began(launched)
        return result

    def _swap(self, plan: StepPlan, tickets: list[CopyTicket]) -> None:
        """Begin the plan's swaps after earlier steps; swaps out first, since they must read before anything writes."""
        for moves in plan.swaps_out:
            ticket = self.transfers.swap_out(moves.pool, moves.src_ids, moves.dst_ids)
            self._reading.append(_Reading(moves.pool, frozenset(moves.src_ids.tolist()), ticket))
            tickets.append(ticket)
        tickets.extend(self.transfers.swap_in(each.pool, each.src_ids, each.dst_ids) for each in plan.swaps_in)

    def _wait_for_readers(self, plan: StepPlan, stream: "torch.cuda.Stream | None") -> None:
        """Make the forward pass wait for swaps that still read a block that it writes."""
        self._reading = [reading for reading in self._reading if not reading.ticket.is_done()]
        for reading in self._reading:
            for index, group in enumerate(self.storage.config.groups):
                if group.pool == reading.pool:
                    written = self._host_tables.written_by(plan, index)
                    if not reading.block_ids.isdisjoint(np.unique(written).tolist()):
                        _wait_on_device(reading.ticket, stream)

    # Loss of the device

    def _end_if_lost(self, problem: Exception, over: tuple[StepId, ...] = ()) -> None:
        """Raise DeviceLostError, and execute no further plan, if the device failed; return for any other exception."""
        if not is_device_failure(problem):
            return
        self._state = _State.ENDED
        raise self._lost(str(problem).splitlines()[0], over) from problem

    def _lost(self, reason: str, over: tuple[StepId, ...] = ()) -> DeviceLostError:
        lost = [launched.step_id for launched in self._launched]
        if self._next_step is not None and self._next_step not in lost and self._next_step > self._last_done:
            lost.append(StepId(self._next_step))
        return DeviceLostError(over or ((self._last_done,) if self._last_done else ()), tuple(lost), reason)


def _wait_on_device(ticket: CopyTicket, stream: "torch.cuda.Stream | None") -> None:
    if stream is not None and ticket.event is not None:
        stream.wait_event(ticket.event)


DEVICE_FAILURES: Final = ("CUDA error", "CUDA driver error", "an illegal memory access", "device-side assert")


def is_device_failure(problem: Exception) -> bool:
    """Return whether an exception means that the device's context is lost, rather than that a call was refused."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(problem, accelerator_error):
        return True
    if isinstance(problem, torch.OutOfMemoryError) or not isinstance(problem, RuntimeError):
        return False
    return any(sign in str(problem) for sign in DEVICE_FAILURES)
