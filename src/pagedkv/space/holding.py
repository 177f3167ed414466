"""Tickets: references to blocks that an external reader holds, such as a tier that stores them or a sender.

A ticket is one more reference to each of its blocks, beside those of the tables, and the rules for shared blocks do the
rest: a referenced block is not handed out, evicted or counted as free; a row that writes into a partly filled block
with another reference copies it first; rolling back into it is refused. So content that was computed when the ticket
was given stays as it is until the ticket is released, whatever happens to the rows::

    hold ------------------------------------------------> release
     |   rows are freed, swapped out, merged, grow by copies   |
     v                                                         v
    one reference more, name and content stay          back to the free queue if it was the last: cached, or deferred

Only blocks of device pools can be held. A ticket belongs to no step: it is released when its reader is done, in any
order, and acknowledging or aborting steps does not end it.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import FREE, NAME, NEW, NULL_BLOCK, OPEN_STEP, PENDING_STEP, QUEUE
from pagedkv.blocks.holding import claim_all, release_all
from pagedkv.contract.answers import Ticket
from pagedkv.contract.arguments import as_array
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import BlockError
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger

__all__ = [
    "as_block_ids",
    "give_back",
    "hold",
    "num_held",
    "release",
    "take_ticket",
    "tickets_out",
    "undefined_tickets",
]

NO_IDS: Final = np.zeros(0, np.int32)


def hold(state: SpaceState, ledger: StepLedger, pool: BlockPool, block_ids: npt.ArrayLike) -> Ticket:
    """Take one more reference to each block.

    Raises:
        BlockError: an id that is no block with content; nothing was changed.
    """
    held = as_block_ids(pool, block_ids)
    _require_content(pool, held)
    _require_not_moved_into(ledger, pool, held)
    state.is_changing = True
    claim_all(pool.arrays, held)
    ticket = take_ticket(state, pool.name, held)
    state.is_changing = False
    return ticket


def release(state: SpaceState, ticket: Ticket) -> None:
    """Drop a ticket's references.

    Raises:
        BlockError: it is no ticket, or was released before; nothing was changed.
    """
    if not isinstance(ticket, Ticket):
        raise BlockError(f"release takes the ticket that hold returned, got {ticket!r}")
    if ticket not in state.held:
        raise BlockError(f"{ticket!r} holds no blocks of this space: it was released before, or is another space's")
    state.is_changing = True
    give_back(state, ticket)
    state.is_changing = False


def take_ticket(state: SpaceState, pool: str, held: Int32Array) -> Ticket:
    """Make a ticket for blocks of a pool; the references for it are taken already."""
    state.num_tickets += 1
    ticket = Ticket(state.num_tickets, pool)
    state.held[ticket] = held
    return ticket


def give_back(state: SpaceState, ticket: Ticket) -> None:
    """Drop the references of a ticket that was not released before."""
    held = state.held.pop(ticket)
    pool = state.pools[ticket.pool]
    release_all(pool.arrays, held)
    for feature in state.features:
        feature.dropped(pool, held)


def tickets_out(state: SpaceState) -> tuple[Ticket, ...]:
    """Return the tickets that callers have: all but those of loads."""
    of_loads = {ticket for loading in state.loads.values() for ticket in loading.tickets}
    return tuple(ticket for ticket in state.held if ticket not in of_loads)


def num_held(state: SpaceState, pool: str) -> int:
    """Count the different blocks of a pool that tickets hold. O(blocks held)."""
    return len(set().union(*(held.tolist() for ticket, held in state.held.items() if ticket.pool == pool)))


def undefined_tickets(state: SpaceState, first_step: int, moved: dict[str, set[int]]) -> tuple[Ticket, ...]:
    """Return the tickets with a block that steps from ``first_step`` on were to compute, or with a moved block."""
    return tuple(
        ticket
        for ticket in tickets_out(state)
        if (state.pools[ticket.pool].arrays.records[state.held[ticket], PENDING_STEP] >= first_step).any()
        or not moved[ticket.pool].isdisjoint(state.held[ticket].tolist())
    )


def _require_not_moved_into(ledger: StepLedger, pool: BlockPool, held: Int32Array) -> None:
    """Refuse blocks that the open plan copies or swaps something into."""
    for block in held.tolist():
        if ledger.is_written(pool.name, [block]):
            raise BlockError(
                f"block {block} of pool {pool.name!r} gets its content by a copy or a swap of the open step: hold it "
                "once that step is planned"
            )


def as_block_ids(pool: BlockPool, block_ids: npt.ArrayLike) -> Int32Array:
    """Convert block ids to an array without repeats, in their order."""
    given = np.atleast_1d(as_array(block_ids, "block ids", BlockError))
    if given.size == 0:
        return NO_IDS
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise BlockError(f"block ids must be a flat array of integers, got {given.dtype} {list(given.shape)}")
    different = list(dict.fromkeys(given.tolist()))
    for block in different:
        if block == NULL_BLOCK:
            raise BlockError("block 0 is the null block, which has no content to be held: leave it out")
        if not 0 < block < pool.num_blocks:
            raise BlockError(f"block {block} is not one of the blocks 1..{pool.num_blocks - 1} of pool {pool.name!r}")
    return np.array(different, np.int32)


def _require_content(pool: BlockPool, held: Int32Array) -> None:
    """Refuse blocks without content, and blocks that no plan computes yet."""
    records, counts = pool.arrays.records, pool.arrays.counts
    is_empty = (records[held, QUEUE] == FREE) & (records[held, NAME] == 0)
    if is_empty.any():
        block = int(held[is_empty.argmax()])
        raise BlockError(f"block {block} of pool {pool.name!r} is free and has no content, so it cannot be held")
    is_planned = (records[held, QUEUE] != NEW) & (records[held, PENDING_STEP] != counts[OPEN_STEP])
    if not is_planned.all():
        block = int(held[is_planned.argmin()])
        raise BlockError(
            f"block {block} of pool {pool.name!r} gets its content in the open step: hold it once that step is planned"
        )
