"""What LRU would have cached, and how far it may be departed from, so that whoever is wrong loses little.

Runs lie in the ring in the order of their release, and what was asked for since is in them no more. So the blocks alive
in the latest runs are LRU's stack (Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal
9(2), 1970): LRU would have those down to the *horizon*, as many as there is room for. No second cache is played::

    runs by release    forgotten | beyond: LRU has evicted it | horizon: LRU has the head of it | within: LRU has it

To evict what lies within is a *departure*. Departures are paid for block by block, from an account::

    a part of the pool, and of all blocks served + hits beyond the horizon - content within that was computed again

and one is made only if the account covers what is to be feared of it and of those that may still come back: as much of
them as of earlier ones that are over, at first all. Else what LRU would evict goes. So whoever has learnt nothing
follows LRU, whoever gains may depart further, and whoever is wrong has lost a quarter of a point, and a 32nd of the
pool, when the account is empty: half a point once a pool has served its blocks 13 times over.

Where hits take blocks of several groups (``IN_SETS``), one that is missing can lose a whole sequence, and that is what
is feared of it at first. What was cached and computed again, for want of something else, is lost with that.
"""

from typing import Final

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.contract.arrays import Int32Array, Int64Array
from pagedkv.memory.pool.blocks import IN_SETS, NUM_FREE, NUM_LEASED, PoolArrays
from pagedkv.memory.pool.eviction.hazard.layout import (
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

__all__ = ["count_against_lru", "judge_doubtful", "lies_within", "move_horizon", "note_departure", "num_departures"]

MOST_MOVED: Final = 64  # runs that the horizon passes at once
REFS_A_BLOCK: Final = 400  # a quarter of a point of what is served may be lost,
BLOCKS_A_BLOCK: Final = 32  # and so much of the pool
BLOCKS_A_DOUBT: Final = 512  # departures thought to have come back before any was seen to, as a part of the pool


@inlined
def lies_within(state: Int64Array, mark: int) -> bool:
    """Tell whether LRU has blocks of a run that is remembered."""
    return bool(((state[NEXT_RUN] - mark) & SERIAL_MASK) <= state[NEXT_RUN] - state[HORIZON])


@compiled
def move_horizon(pool: PoolArrays) -> None:
    """Let LRU evict what there is no room for now; no more runs at once than is bounded, the others next time."""
    state, runs = pool.eviction, pool.eviction_runs
    room = pool.counts[NUM_FREE] - pool.counts[NUM_LEASED]
    num_left = MOST_MOVED
    while num_left > 0 and state[HORIZON] < state[NEXT_RUN]:
        num_alive = runs[state[HORIZON] & (len(runs) - 1), NUM_ALIVE]
        if state[SUM_WITHIN] - num_alive < room:
            break
        if num_alive > 0:  # who departed is thought to be spread evenly among what is alive
            state[PENDING] -= state[PENDING] * num_alive // state[SUM_WITHIN]
        state[SUM_WITHIN] -= num_alive
        state[HORIZON] += 1
        state[HORIZON_CUT] = 0
        num_left -= 1
    state[HORIZON_CUT] = max(state[HORIZON_CUT], state[SUM_WITHIN] - room)


@inlined
def count_against_lru(runs: Int32Array, state: Int64Array, mark: int, num_asked: int) -> None:
    """Count what was gained or lost by blocks of a run that were asked for, which are in it still."""
    num_reused, num_recomputed = state[NUM_REUSED], state[NUM_RECOMPUTED]
    behind = (state[NEXT_RUN] - mark) & SERIAL_MASK
    to_horizon = state[NEXT_RUN] - state[HORIZON]
    num_of_lru = 0
    if behind < to_horizon:
        num_of_lru = num_asked
    elif behind == to_horizon:
        num_of_lru = max(0, min(num_asked, runs[mark & (len(runs) - 1), NUM_ALIVE] - state[HORIZON_CUT]))
        state[HORIZON_CUT] = max(0, state[HORIZON_CUT] - (num_asked - num_of_lru))
    if behind <= to_horizon:
        state[SUM_WITHIN] -= num_asked
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
    """Count what was cached and computed again as lost, if anything else was lost since a sequence ended last."""
    if state[NUM_LOST] > state[LOST_BEFORE]:
        state[NUM_LOST] += state[NUM_DOUBTFUL]
    state[NUM_DOUBTFUL] = 0
    state[LOST_BEFORE] = state[NUM_LOST]


@inlined
def note_departure(state: Int64Array, mark: int) -> None:
    """Note that a block of a run is evicted, which is a departure if LRU keeps all of that run."""
    if ((state[NEXT_RUN] - mark) & SERIAL_MASK) < state[NEXT_RUN] - state[HORIZON]:
        state[NUM_DEPARTED] += 1
        state[PENDING] += PENDING_UNIT


@compiled
def num_departures(pool: PoolArrays) -> int:
    """Tell how many blocks that LRU has may be evicted now."""
    state = pool.eviction
    if state[LAST_SWEEP] == 0:
        return 0  # nothing was learnt
    num_blocks = len(pool.eviction_blocks) - 1
    allowance = num_blocks / BLOCKS_A_BLOCK + state[NUM_REFS] / REFS_A_BLOCK
    account = allowance + state[NUM_GAINED] - state[NUM_LOST]
    num_pending = state[PENDING] / PENDING_UNIT
    num_over = max(0.0, state[NUM_DEPARTED] - num_pending)
    doubt = 1 + num_blocks / BLOCKS_A_DOUBT
    most = max(1, pool.counts[IN_SETS] * state[LARGEST])  # that one block loses
    feared = min(most, (state[NUM_LOST] + doubt * most) / (num_over + doubt))
    return int(max(0.0, account / feared - num_pending))
