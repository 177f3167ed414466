"""The arrays of the learning policy, and the numbers in them: ages of runs, bins of ages, and classes of similar runs.

Bytes a block of a pool of C blocks, beside those of the pool::

    block 8 x 4 = 32 | runs 2 C to 4 C of 16 = 32..64 | ghosts 2.4 C rows of 64 = 154      = 218..250
    once: 746 classes of 276 float32 and two rows of ages = 0.8 MB; small pools have ghosts for 65,536 blocks

A *run* is a stretch of one sequence's blocks that were released together, are in one class, and were not requested
since. Runs have serial numbers, stored in 31 bits; the number in a block's or a ghost's record shows whether its run
is still in the ring. A block *requested* since its release stores the number negated: the run still determines its
class.

The age of a run is measured in ticks of the clock and in blocks served since. Bins of ages grow by the fourth root of
two. The first ends at half a second (or 32 blocks), and the last has no end. Ages are stored in 31 bits: 407 days of
ticks. Without a clock, a block served counts as a tick.

A run's classes are its leaves in three trees, by its features when it is released:

========  ==============================================================================================
feature   meaning
========  ==============================================================================================
is_last   it is the last block of its sequence
uses      earlier uses of its blocks, at most 3
output    bit length of the number of generated tokens, at most 12; 0 also if that number is unknown
length    half the bit length of the number of new blocks, at most 7
gap       0 if no block of the sequence was known, else 1 + half the bit length of twice the seconds since the
          run of its last known block, at most 7
previous  0 if no block was known, else 1 + ``output`` of that run
========  ==============================================================================================

Trees: A by is_last, min(uses, 1), output, gap, and B by output, previous, with rates by seconds. F by is_last, uses,
length, with rates by blocks served. A *known* block is cached or a ghost, so features hardly depend on evictions.
"""

from typing import Final

import numpy as np

from pagedkv.blocks.eviction.policy import PolicyState, no_state
from pagedkv.blocks.record import CLOCK_US, HAS_CLOCK, PoolArrays, aligned_zeros
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Float64Array, Int32Array, Int64Array

# Columns of a block's row.
RUN: Final = 0  # serial of its latest run; negated once the block was requested; 0: none
NUM_CHILDREN: Final = 1  # free cached children,
COUNTED_LIFE: Final = 2  # in this life of the block; in any other life there are none
PLACE: Final = 3  # its place among the leaves, from 1 on; INNER or ABSENT
# Row p also holds place p of the dense array of leaves, a quarter of a cache line, whichever block has it.
LEAF: Final = 4  # the leaf that has this place,
LEAF_TICKS: Final = 5  # and copies of the fields of its run that determine its value: TICKS,
LEAF_REFS: Final = 6  # REFS,
LEAF_CLASSES: Final = 7  # and CLASSES, or NO_CLASSES
NUM_BLOCK_FIELDS: Final = 8
ABSENT: Final = 0  # in use, spare, deferred or without a name
INNER: Final = -1  # free and cached, with a child that is free and cached
NO_CLASSES: Final = -1  # its run was removed
# Columns of a run.
TICKS: Final = 0  # time of its release
REFS: Final = 1  # blocks of all requests before its own
NUM_ALIVE: Final = 2  # its blocks, cached or ghosts, that were not requested since
CLASSES: Final = 3  # its classes, packed
NUM_RUN_FIELDS: Final = 4
# A row of ghosts, which is one cache line.
FRAGMENT: Final = 0
GHOST_RUN: Final = 1
GHOST_FIELDS: Final = 2
GHOSTS_PER_ROW: Final = 8
GHOST_ROW_WORDS: Final = GHOST_FIELDS * GHOSTS_PER_ROW
# Counts.
NEXT_RUN: Final = 0  # serial of the next run, in 64 bits
OLDEST_RUN: Final = 1  # serial of the oldest run in the ring
SUM_ALIVE: Final = 2
NUM_LEAVES: Final = 3
RANDOM: Final = 4  # state of the generator
VICTIM: Final = 5  # the next block to be evicted, if it is a leaf,
VICTIM_RUN: Final = 6  # and of this run
VICTIM_LEFT: Final = 7  # evictions left before victims are drawn again
NUM_REQUESTS: Final = 8
NUM_REFS: Final = 9  # blocks of all requests
TICK_OFFSET: Final = 10  # ticks minus the caller's clock
IS_ON_CLOCK: Final = 11  # 1: ticks are those of the caller's clock; 0: blocks served
NEXT_REFRESH: Final = 12  # number of the request that begins the next sweep
SWEEP: Final = 13  # nodes that the sweep has visited, in both directions; NOT_SWEEPING
SWEPT_REQUESTS: Final = 14  # requests between the previous sweep and this one
LAST_SWEEP: Final = 15  # number of the request that began it
FIRST_BIN: Final = 16  # the bin to be passed next
WORK: Final = 17  # steps over runs and classes since the pool was built, which are not proportional to blocks
REQUESTED_RUN: Final = 18  # the run of the blocks that were requested last,
REQUESTED_AT: Final = 19  # the time of that,
NUM_REQUESTED: Final = 20  # and the number of these blocks that are not counted yet
FETCHED: Final = 21  # the block for which ghosts were prefetched last, an ancestor of the next victim or any block
NUM_REUSED: Final = 22  # those of NUM_REQUESTED that were hit
HORIZON: Final = 23  # serial of the oldest run of which LRU would have a block,
SUM_WITHIN: Final = 24  # alive blocks of it and of later runs,
HORIZON_CUT: Final = 25  # and blocks of that run LRU would have evicted
NUM_GAINED: Final = 26  # hits that LRU would not have had
NUM_LOST: Final = 27  # hits that LRU would have had, and this policy had not
NUM_DEPARTED: Final = 28  # evictions of blocks that LRU would have kept
PENDING: Final = 29  # the estimated number of these that LRU would still have, in units
NUM_RECOMPUTED: Final = 30  # those of NUM_REQUESTED that were cached, and could not be hit
NUM_DOUBTFUL: Final = 31  # those that LRU would have too: lost, if their sequence lost other blocks of the same hit
LOST_BEFORE: Final = 32  # NUM_LOST when the last sequence ended
LARGEST: Final = 33  # most blocks of a sequence
NUM_ASIDE: Final = 34  # blocks released singly since the last sequence ended
NUM_PLAIN_COUNTS: Final = 35
NOT_SWEEPING: Final = -1
PENDING_UNIT: Final = 1024
MOST_DRAWN: Final = 64  # leaves among which a victim is chosen
# Trees of classes, by level; leaves last.
OUTPUT_CLASSES: Final = 13
GAP_CLASSES: Final = 8
PREVIOUS_CLASSES: Final = 1 + OUTPUT_CLASSES
LENGTH_CLASSES: Final = 8
USE_CLASSES: Final = 4
FAN_OUTS: Final = (
    (2, 2, OUTPUT_CLASSES, GAP_CLASSES),  # last block of its sequence? used before? output, gap
    (OUTPUT_CLASSES, PREVIOUS_CLASSES),  # output, output of the request before
    (2, USE_CLASSES, LENGTH_CLASSES),  # last block? uses before, new blocks
)


def _num_nodes(fan_outs: tuple[int, ...]) -> int:
    sizes = np.cumprod((1, *fan_outs))
    return int(sizes.sum())


def _num_leaves(fan_outs: tuple[int, ...]) -> int:
    return int(np.prod(fan_outs))


ROOT_A: Final = 0
ROOT_B: Final = ROOT_A + _num_nodes(FAN_OUTS[0])
ROOT_F: Final = ROOT_B + _num_nodes(FAN_OUTS[1])
NUM_NODES: Final = ROOT_F + _num_nodes(FAN_OUTS[2])
LEAVES_A: Final = ROOT_B - _num_leaves(FAN_OUTS[0])
LEAVES_B: Final = ROOT_F - _num_leaves(FAN_OUTS[1])
LEAVES_F: Final = NUM_NODES - _num_leaves(FAN_OUTS[2])
# Bins of ages, and columns of a node's row.
NUM_SECOND_BINS: Final = 61
NUM_REF_BINS: Final = 69
MOST_BINS: Final = NUM_REF_BINS
HITS: Final = 0  # of each bin
RISK: Final = MOST_BINS  # age at risk in each bin
RATE: Final = 2 * MOST_BINS
VALUE: Final = 3 * MOST_BINS  # weighted logarithm of the index
NUM_NODE_FIELDS: Final = 4 * MOST_BINS
# Rows after the nodes: the bins of each scale.
SECONDS: Final = NUM_NODES
REFERENCES: Final = NUM_NODES + 1
SCRATCH: Final = NUM_NODES + 2
NUM_RATE_ROWS: Final = NUM_NODES + 3
START: Final = HITS
WIDTH: Final = RISK
MIDDLE: Final = RATE
# After the plain counts: one number for each node, and, for each bin, the serial up to which the ring was passed.
PARENTS: Final = NUM_PLAIN_COUNTS
CURVES: Final = PARENTS + NUM_NODES  # the node that has a node's curve: itself, or its nearest ancestor with data
PASSED: Final = CURVES + NUM_NODES
NUM_BINS: Final = NUM_SECOND_BINS + NUM_REF_BINS
ENDS: Final = PASSED + NUM_BINS  # the age, in ticks or in blocks, at which a run leaves each bin
DRAWN: Final = ENDS + NUM_BINS  # places of the drawn leaves
HAS_DATA: Final = DRAWN + MOST_DRAWN  # 1: the node has counts
NUM_COUNTS: Final = HAS_DATA + NUM_NODES
SERIAL_MASK: Final = 2**31 - 1
GHOSTS_PER_BLOCK: Final = 16
GHOSTS_PER_RUN: Final = 8
FEWEST_REMEMBERED: Final = 1 << 16
ROWS_PER_100_GHOSTS: Final = 15
FIRST_RANDOM: Final = 0x2545F491
FIRST_REFRESH: Final = 16
# Ages.
TICKS_PER_SECOND: Final = 1_000_000 / 2**14
FIRST_SECONDS: Final = 0.5
FIRST_REFERENCES: Final = 32
MIDDLE_SECONDS: Final = 1.0  # added to the middle of a bin, so that rates of young runs stay bounded
MIDDLE_REFERENCES: Final = 200.0


def num_remembered(num_blocks: int) -> int:
    """Return the number of blocks and ghosts of which a pool of ``num_blocks`` keeps the runs."""
    return max(GHOSTS_PER_BLOCK * num_blocks, FEWEST_REMEMBERED)


def new_arrays(num_blocks: int) -> PolicyState:
    """Make the state of an empty pool without any learnt rates. O(blocks)."""
    num_runs = 1 << (num_remembered(num_blocks) // GHOSTS_PER_RUN - 1).bit_length()
    num_rows = num_remembered(num_blocks) * ROWS_PER_100_GHOSTS // 100
    rates = np.zeros((NUM_RATE_ROWS, NUM_NODE_FIELDS), np.float32)
    for row, num_bins, more in (
        (SECONDS, NUM_SECOND_BINS, MIDDLE_SECONDS),
        (REFERENCES, NUM_REF_BINS, MIDDLE_REFERENCES),
    ):
        edges = _edges(row, num_bins)
        rates[row, START : START + num_bins] = edges[:-1]
        rates[row, WIDTH : WIDTH + num_bins] = np.diff(edges)
        rates[row, MIDDLE : MIDDLE + num_bins] = (edges[:-1] + edges[1:]) / 2 + more
    return no_state(num_blocks)._replace(
        counts=_new_counts(),
        table=aligned_zeros(num_rows, GHOST_ROW_WORDS).view(np.uint32),
        blocks=aligned_zeros(num_blocks + 1, NUM_BLOCK_FIELDS),
        runs=aligned_zeros(num_runs, NUM_RUN_FIELDS),
        rates=rates,
    )


def _edges(row: int, num_bins: int) -> Float64Array:
    """Compute the ages at which a scale's bins begin, and the end of the last: float64 ``[num_bins + 1]``."""
    first = FIRST_SECONDS if row == SECONDS else FIRST_REFERENCES
    return np.append(0.0, first * 2 ** (np.arange(num_bins) / 4))


def _ends() -> Int64Array:
    """Compute the ages, in ticks and in blocks, at which runs leave each bin: int64 ``[NUM_BINS]``; the last: never."""
    in_ticks = np.ceil(_edges(SECONDS, NUM_SECOND_BINS)[1:] * TICKS_PER_SECOND)
    in_blocks = np.ceil(_edges(REFERENCES, NUM_REF_BINS)[1:])
    in_ticks[-1] = in_blocks[-1] = SERIAL_MASK + 1
    return np.concatenate([in_ticks, in_blocks]).astype(np.int64)


def _new_counts() -> Int64Array:
    counts = np.zeros(NUM_COUNTS, np.int64)
    counts[[NEXT_RUN, OLDEST_RUN, HORIZON]] = 1
    counts[RANDOM] = FIRST_RANDOM
    counts[NEXT_REFRESH] = FIRST_REFRESH
    counts[SWEEP] = NOT_SWEEPING
    counts[PARENTS : PARENTS + NUM_NODES] = np.concatenate(
        [_parents(root, fan_outs) for root, fan_outs in zip((ROOT_A, ROOT_B, ROOT_F), FAN_OUTS, strict=True)]
    )
    counts[CURVES:PASSED] = np.repeat((ROOT_A, ROOT_B, ROOT_F), [_num_nodes(fan_outs) for fan_outs in FAN_OUTS])
    counts[PASSED:ENDS] = 1
    counts[ENDS:DRAWN] = _ends()
    return counts


def _parents(root: int, fan_outs: tuple[int, ...]) -> Int32Array:
    """Compute the parents of a tree's nodes, level by level; a root is its own parent."""
    parents = [np.array([root])]
    level = parents[0]
    for fan_out in fan_outs:
        parents.append(np.repeat(level, fan_out))
        level = level[-1] + 1 + np.arange(len(parents[-1]))
    return np.concatenate(parents).astype(np.int32)


TICK_BITS: Final = 14  # of microseconds
MANTISSA_BITS: Final = 52  # of a double
MANTISSA: Final = (1 << MANTISSA_BITS) - 1
EXPONENT_OF_ONE: Final = 1023
QUARTERS: Final = tuple(int(np.float64(2.0 ** (quarter / 4)).view(np.int64)) & MANTISSA for quarter in (1, 2, 3))


@inlined
def ticks_now(pool: PoolArrays) -> int:
    """Return the current time."""
    if pool.counts[HAS_CLOCK] != pool.eviction[IS_ON_CLOCK]:
        _join_clocks(pool)
    if pool.counts[HAS_CLOCK]:
        return int((pool.counts[CLOCK_US] >> TICK_BITS) + pool.eviction[TICK_OFFSET])
    return int(pool.eviction[NUM_REFS])


@compiled
def _join_clocks(pool: PoolArrays) -> None:
    """Continue from the count of blocks, now that there is a clock."""
    pool.eviction[TICK_OFFSET] = pool.eviction[NUM_REFS] - (pool.counts[CLOCK_US] >> TICK_BITS)
    pool.eviction[IS_ON_CLOCK] = 1


@inlined
def age_since(start: int, now: int) -> int:
    """Return the time from ``start`` to ``now``, in the unit of both."""
    return int((now - int(start)) & SERIAL_MASK)


@inlined
def age_in_seconds(runs: Int32Array, slot: int, now: int) -> float:
    """Return the time since a run was released."""
    return float(age_since(runs[slot, TICKS], now)) / TICKS_PER_SECOND


@inlined
def age_in_refs(runs: Int32Array, slot: int, num_refs: int) -> int:
    """Return how many blocks were served since the request of a run."""
    return age_since(runs[slot, REFS], num_refs)


@inlined
def _bin_of(ratio: float, num_bins: int) -> int:
    """Find the bin of an age, given its ratio to the first bin's end: the exponent and the quarter of an octave.

    It is computed from the bits of the number without a branch: a call of ``frexp`` took 6 ns, and each choice of a
    victim looks up 128 bins.
    """
    bits = int(np.float64(ratio).view(np.int64))
    mantissa = bits & MANTISSA
    quarter = (mantissa >= QUARTERS[0]) + (mantissa >= QUARTERS[1]) + (mantissa >= QUARTERS[2])
    return int(max(0, min(1 + 4 * ((bits >> MANTISSA_BITS) - EXPONENT_OF_ONE) + quarter, num_bins - 1)))


@inlined
def bin_of_seconds(age_s: float) -> int:
    """Return the bin of an age in seconds."""
    return _bin_of(age_s / FIRST_SECONDS, NUM_SECOND_BINS)


@inlined
def bin_of_refs(age: int) -> int:
    """Return the bin of an age in blocks."""
    return _bin_of(age / FIRST_REFERENCES, NUM_REF_BINS)


BITS_A = 9
BITS_B = 8
BITS_F = 6


@inlined
def bit_length(number: int) -> int:
    """Return the bit length of a number that is not negative."""
    bits = 0
    while number > 0:
        number >>= 1
        bits += 1
    return bits


@inlined
def pack(is_last: int, uses: int, output: int, length: int, gap: int, previous: int) -> int:
    """Pack the three leaves of a run into one number."""
    in_a = ((2 * is_last + min(uses, 1)) * OUTPUT_CLASSES + output) * GAP_CLASSES + gap
    in_b = output * PREVIOUS_CLASSES + previous
    in_f = (USE_CLASSES * is_last + uses) * LENGTH_CLASSES + length
    return ((in_f << BITS_B | in_b) << BITS_A) | in_a


@inlined
def leaf_a(classes: int) -> int:
    """Return the leaf in tree A."""
    return LEAVES_A + (classes & ((1 << BITS_A) - 1))


@inlined
def leaf_b(classes: int) -> int:
    """Return the leaf in tree B."""
    return LEAVES_B + ((classes >> BITS_A) & ((1 << BITS_B) - 1))


@inlined
def leaf_f(classes: int) -> int:
    """Return the leaf in tree F."""
    return LEAVES_F + ((classes >> (BITS_A + BITS_B)) & ((1 << BITS_F) - 1))


@inlined
def uses_of(classes: int) -> int:
    """Return the earlier uses of a run's blocks."""
    return (leaf_f(classes) - LEAVES_F) // LENGTH_CLASSES % USE_CLASSES


@inlined
def output_of(classes: int) -> int:
    """Return the output class of the request that released a run."""
    return (leaf_b(classes) - LEAVES_B) // PREVIOUS_CLASSES
