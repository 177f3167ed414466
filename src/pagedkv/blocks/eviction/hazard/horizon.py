"""The content that LRU would have cached, and a limit on departures from it, which bounds the loss of wrong estimates.

Runs are in the ring in the order of their release, without the blocks that were requested since. So the alive blocks of
the latest runs are LRU's stack (Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal
9(2), 1970). LRU would have as many of them as there is room for, down to the *horizon*. No second cache is simulated::

    runs by release    removed | beyond: LRU has evicted it | horizon: LRU has its head | within: LRU has it

Evicting a block within the horizon is a *departure*. Departures are paid for, block by block, from an account::

    a part of the pool, and of all blocks served + hits beyond the horizon - content within that was computed again

A departure is made only if the account covers its expected loss and that of earlier departures that may still return.
This is estimated from earlier departures that are over; at first, all are expected to be lost. Otherwise the block that
LRU would evict is evicted. So the policy follows LRU until it has learnt, and departs further when it gains. If its
estimates are wrong, the account is empty after losing hits on 1/400 of the blocks served plus 1/32 of the pool's size:
half a point of the hit rate once 13 times the pool's size was served.

Where a hit needs blocks of several groups (``IN_SETS``), a single missing block can lose a whole sequence, and this is
the expected loss at first. Blocks that were cached, but computed again because other blocks of the hit were missing,
count as lost with these.
"""

from typing import Final

from pagedkv.blocks.eviction.hazard.layout import (
    HORIZON,
    HORIZON_CUT,
    LARGEST,
    LAST_SWEEP,
    LOST_BEFORE,
    NEXT_RUN,
    NUM_ALIVE,
    NUM_DEPARTED,
    NUM_DOUBTFUL,
    NUM_GAINED,
    NUM_LOST,
    NUM_RECOMPUTED,
    NUM_REFS,
    NUM_REUSED,
    PENDING,
    PENDING_UNIT,
    SERIAL_MASK,
    SUM_WITHIN,
)
from pagedkv.blocks.record import IN_SETS, NUM_FREE, NUM_LEASED, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Int64Array

__all__ = ["count_against_lru", "judge_doubtful", "lies_within", "move_horizon", "note_departure", "num_departures"]

MOST_MOVED: Final = 64  # runs that the horizon passes at once
REFS_A_BLOCK: Final = 400  # a quarter of a percent of the blocks served may be lost,
BLOCKS_A_BLOCK: Final = 32  # and this part of the pool
BLOCKS_A_DOUBT: Final = 512  # departures assumed at first to have come back, as a part of the pool


@inlined
def lies_within(state: Int64Array, mark: int) -> bool:
    """Whether LRU has blocks of a run that is in the ring."""
    return bool(((state[NEXT_RUN] - mark) & SERIAL_MASK) <= state[NEXT_RUN] - state[HORIZON])


@compiled
def move_horizon(pool: PoolArrays) -> None:
    """Advance the horizon past the blocks that LRU has no room for, up to a limit on the runs at once."""
    state, runs = pool.eviction, pool.eviction_runs
    room = pool.counts[NUM_FREE] - pool.counts[NUM_LEASED]
    num_left = MOST_MOVED
    while num_left > 0 and state[HORIZON] < state[NEXT_RUN]:
        num_alive = runs[state[HORIZON] & (len(runs) - 1), NUM_ALIVE]
        if state[SUM_WITHIN] - num_alive < room:
            break
        if num_alive > 0:  # departures are assumed to be spread evenly among the alive blocks
            state[PENDING] -= state[PENDING] * num_alive // state[SUM_WITHIN]
        state[SUM_WITHIN] -= num_alive
        state[HORIZON] += 1
        state[HORIZON_CUT] = 0
        num_left -= 1
    state[HORIZON_CUT] = max(state[HORIZON_CUT], state[SUM_WITHIN] - room)


@inlined
def count_against_lru(runs: Int32Array, state: Int64Array, mark: int, num_requested: int) -> None:
    """Count the hits gained or lost against LRU by requested blocks of a run, which are still in it."""
    num_reused, num_recomputed = state[NUM_REUSED], state[NUM_RECOMPUTED]
    behind = (state[NEXT_RUN] - mark) & SERIAL_MASK
    to_horizon = state[NEXT_RUN] - state[HORIZON]
    num_of_lru = 0
    if behind < to_horizon:
        num_of_lru = num_requested
    elif behind == to_horizon:
        num_of_lru = max(0, min(num_requested, runs[mark & (len(runs) - 1), NUM_ALIVE] - state[HORIZON_CUT]))
        state[HORIZON_CUT] = max(0, state[HORIZON_CUT] - (num_requested - num_of_lru))
    if behind <= to_horizon:
        state[SUM_WITHIN] -= num_requested
    if num_reused > num_of_lru:
        state[NUM_GAINED] += num_reused - num_of_lru
    elif num_of_lru > num_reused:
        num_doubtful = min(num_recomputed, num_of_lru - num_reused)
        num_lost = num_of_lru - num_reused - num_doubtful
        state[NUM_DOUBTFUL] += num_doubtful
        state[NUM_LOST] += num_lost
        state[PENDING] = max(0, state[PENDING] - num_lost * PENDING_UNIT)


@inlined
def judge_doubtful(state: Int64Array) -> None:
    """Count doubtful blocks as lost, if any other block was lost since the last sequence ended."""
    if state[NUM_LOST] > state[LOST_BEFORE]:
        state[NUM_LOST] += state[NUM_DOUBTFUL]
    state[NUM_DOUBTFUL] = 0
    state[LOST_BEFORE] = state[NUM_LOST]


@inlined
def note_departure(state: Int64Array, mark: int) -> None:
    """Record the eviction of a block of a run; it is a departure if LRU has all of that run."""
    if ((state[NEXT_RUN] - mark) & SERIAL_MASK) < state[NEXT_RUN] - state[HORIZON]:
        state[NUM_DEPARTED] += 1
        state[PENDING] += PENDING_UNIT


@compiled
def num_departures(pool: PoolArrays) -> int:
    """Return how many blocks that LRU has may be evicted now."""
    state = pool.eviction
    if state[LAST_SWEEP] == 0:
        return 0  # nothing was learnt
    num_blocks = len(pool.eviction_blocks) - 1
    allowance = num_blocks / BLOCKS_A_BLOCK + state[NUM_REFS] / REFS_A_BLOCK
    account = allowance + state[NUM_GAINED] - state[NUM_LOST]
    num_pending = state[PENDING] / PENDING_UNIT
    num_over = max(0.0, state[NUM_DEPARTED] - num_pending)
    doubt = 1 + num_blocks / BLOCKS_A_DOUBT
    most = max(1, pool.counts[IN_SETS] * state[LARGEST])  # hits that one missing block can lose
    feared = min(most, (state[NUM_LOST] + doubt * most) / (num_over + doubt))
    return int(max(0.0, account / feared - num_pending))
