"""The record of each sequence: one row of small integers, with a part for each group.

This module defines the layout; :mod:`~pagedkv.tables.row_record` writes it. With one group, a row's record is
one cache line::

    | STATUS NUM_TOKENS NUM_ACCEPTED NUM_PLANNED LAST_STEP TOUCHED MARK FROZEN | group 0 | group 1 | ...

``NUM_TOKENS`` tokens have slots. Of these, ``NUM_ACCEPTED`` are certain (not drafts), and ``NUM_PLANNED`` are computed,
or will be by a planned step, of this sequence or, in shared blocks, of another one. The first column of a group
(``at``) is one of the group's parameters, which compiled loops take.

A group outside prefix caching has no digests and no tail. Since hits do not apply to it, a column of its own contains
how far it is planned; its parameter ``PLANNED`` is the index of that column. A window that can be replayed also has
such a column, after those of all tables, and one more for its first block that may be named.
"""

import math
from typing import Final, NamedTuple, assert_never

import numpy as np

from pagedkv.blocks.blocks import PoolArrays
from pagedkv.compilation.compiled import inlined
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    keeps_state,
    keeps_whole_prefix,
    num_draft_states,
    num_sink_tokens,
)

__all__ = [
    "GroupArrays",
    "block_index",
    "blocks_for",
    "first_sure_block",
    "is_ascending",
    "new_draft_arrays",
    "new_group_arrays",
    "rule_of",
]

# Columns common to all groups.
STATUS: Final = 0
NUM_TOKENS: Final = 1
NUM_ACCEPTED: Final = 2
NUM_PLANNED: Final = 3
LAST_STEP: Final = 4  # last planned step that computes something for the row
TOUCHED: Final = 5  # nonzero if it has something for the open plan: a link to the row touched before, see :func:`touch`
MARK: Final = 6  # number of the last batch that named the row: finds rows that are named twice
FROZEN: Final = 7  # publishes nothing any more (its content belongs to dropped weights, or its chain is lost)
NUM_COMMON: Final = 8

# Columns of each group, relative to its ``at``.
NUM_BLOCKS: Final = 0  # entries of the table in use, null blocks included
FIRST_BLOCK: Final = 1  # entries below it are null, except for sinks
NUM_DIGESTED: Final = 2  # leading full blocks with a known digest
NUM_PUBLISHED: Final = 3  # leading full blocks that were offered to the prefix index
TAIL: Final = 4  # the named block with the last published content, and its life at that time
PLANNED_HERE: Final = 4  # in place of the tail, in a group outside prefix caching where other groups have it
TAIL_LIFE: Final = 5
DIRTY_FROM: Final = 6  # table entries changed since the last plan
DIRTY_TO: Final = 7
NUM_PER_GROUP: Final = 8

# Columns of each group that can be replayed, after those of all tables.
REPLAYED_FROM: Final = 0  # how far the group is planned
SURE_FROM: Final = 1  # logical block from which on a replay computes whole blocks exactly; 0 without a replay
NUM_PER_REPLAY: Final = 2

TENANT: Final = -1  # the last column, only where there are tenants: the tenant to which new blocks are charged

# Values of STATUS; OCCUPIED stands for any but VACANT.
OCCUPIED: Final = -1
VACANT: Final = 0
RUNNING: Final = 1
SWAPPED: Final = 2
LOST: Final = 3
LOST_ON_HOST: Final = 4

# Group parameters.
NAME_IN_POOL: Final = 0  # 1 + index of the group: the NAME of its blocks
AT: Final = 1  # first column in the row
BLOCK_SIZE: Final = 2
KIND: Final = 3
SPAN: Final = 4  # window or chunk, in tokens
NUM_SINK_BLOCKS: Final = 5
CACHING: Final = 6
SHARES_IN_STEP: Final = 7  # blocks that the open step still computes may be hit
ENDS_HITS: Final = 8  # a hit needs the block before its end, even where the rule reads nothing before it
PLANNED: Final = 9  # the column with how far the group is planned: NUM_PLANNED, or one of its own
SHEDS: Final = 10  # blocks that leave the window stay cached only for a reason (tables/retaining.py)
HIT_ALIGNMENT: Final = 11  # hits of whole blocks end at multiples of this number of tokens, in all groups
HITS_INSIDE: Final = 12  # hits may end inside a block (tables/partial_hits.py)
NUM_DRAFT_STATES: Final = 13  # slots of a row's draft states (tables/drafting.py); 0 if it has none
SURE: Final = 14  # the column of its rows with SURE_FROM; 0 if the group cannot be replayed
NUM_PARAMETERS: Final = 15

# Values of KIND.
FULL: Final = 0
WINDOW: Final = 1
CHUNK: Final = 2
RECURRENT: Final = 3

CACHE_LINE_ENTRIES: Final = 16


class GroupArrays(NamedTuple):
    """The state of one group, as arrays for compiled loops.

    Args:
        table: int32 ``[max_sequences, at least width]``: logical block -> block id; the upload buffer itself.
        parameters: int32 ``[NUM_PARAMETERS]``.
    """

    table: Int32Array
    parameters: Int32Array


class GroupView(NamedTuple):
    """The state of the rows of one group: the first three arguments of most loops over rows."""

    pool: PoolArrays
    group: GroupArrays
    rows: Int32Array


@inlined
def first_sure_block(group: GroupArrays, rows: Int32Array, row: int) -> int:
    """Return the logical block from which on a replay computes whole blocks exactly; 0 for a row without a replay."""
    column = group.parameters[SURE]
    return int(rows[row, column]) if column > 0 else 0


def rule_of(spec: GroupSpec) -> tuple[int, int]:
    """Return a group's rule for compiled loops: its kind, and the span of its window or chunk, else 0."""
    match spec:
        case FullAttention():
            return FULL, 0
        case SlidingWindow():
            return WINDOW, spec.window
        case ChunkedLocal():
            return CHUNK, spec.chunk_size
        case RecurrentState():
            return RECURRENT, 0
        case _:
            assert_never(spec)


def new_group_arrays(index: int, config: SpaceConfig) -> GroupArrays:
    """Make the empty table and the parameters of one group of a configuration."""
    spec, max_tokens = config.groups[index], config.max_tokens
    caching = config.prefix_caching and spec.prefix_caching
    kind, span = rule_of(spec)
    is_one_state = kind == RECURRENT and not caching  # no checkpoints: one state block serves the whole sequence
    block_size = max_tokens if is_one_state else spec.block_size
    parameters = np.zeros(NUM_PARAMETERS, np.int32)
    parameters[NAME_IN_POOL] = index + 1
    parameters[AT] = NUM_COMMON + index * NUM_PER_GROUP
    parameters[BLOCK_SIZE] = block_size
    parameters[KIND] = kind
    parameters[SPAN] = span
    parameters[NUM_SINK_BLOCKS] = -(-num_sink_tokens(spec) // block_size)
    parameters[CACHING] = caching
    # A kernel would read and write a recurrent state in one step, and no other row could take over its computation.
    others = [other for other in config.groups if other.prefix_caching]
    parameters[SHARES_IN_STEP] = not any(keeps_state(other) for other in others)
    parameters[ENDS_HITS] = kind != CHUNK or all(rule_of(other)[0] == CHUNK for other in others)
    parameters[PLANNED] = NUM_PLANNED
    has_chains = any(keeps_whole_prefix(other) for other in others)
    parameters[SHEDS] = caching and config.shed_windows and has_chains and kind != FULL
    parameters[HIT_ALIGNMENT] = math.lcm(*(other.block_size for other in others)) if caching else 0
    parameters[NUM_DRAFT_STATES] = num_draft_states(spec)
    parameters[HITS_INSIDE] = caching and kind != RECURRENT and config.min_partial_hit > 0
    if config.prefix_caching and not caching:
        parameters[PLANNED] = parameters[AT] + PLANNED_HERE
    if index in config.replaying:
        num_tables = len(config.groups) + len(config.drafting)
        first = NUM_COMMON + num_tables * NUM_PER_GROUP + config.replaying.index(index) * NUM_PER_REPLAY
        parameters[PLANNED], parameters[SURE] = first + REPLAYED_FROM, first + SURE_FROM
    return GroupArrays(_new_table(config.max_sequences, -(-max_tokens // block_size)), parameters)


def new_draft_arrays(index: int, config: SpaceConfig, num_slots: int) -> GroupArrays:
    """Make the empty second table of a group, for its draft states, which is table ``index`` of a configuration."""
    parameters = np.zeros(NUM_PARAMETERS, np.int32)
    parameters[AT] = NUM_COMMON + index * NUM_PER_GROUP
    parameters[NUM_DRAFT_STATES] = num_slots
    return GroupArrays(_new_table(config.max_sequences, num_slots), parameters)


def _new_table(max_sequences: int, width: int) -> Int32Array:
    # One spare cache line for each row: with a stride of a power of two all rows would share a few cache sets.
    stride = -(-width // CACHE_LINE_ENTRIES) * CACHE_LINE_ENTRIES + CACHE_LINE_ENTRIES
    return np.zeros((max_sequences, stride), np.int32)


@inlined
def block_index(position: int, block_size: int) -> int:
    """Return the logical block of a position, for loops over many rows.

    It divides doubles, which takes half as long as dividing integers, and is as exact for numbers below 2**31.
    """
    return int(position / block_size)


@inlined
def blocks_for(num_tokens: int, block_size: int) -> int:
    """Count the blocks that ``num_tokens`` tokens need."""
    return (num_tokens + block_size - 1) // block_size


@inlined
def is_ascending(batch: Int32Array) -> bool:
    """Whether each row of a batch has a greater number than the one before."""
    num_descents = 0
    for place in range(1, len(batch)):
        num_descents += batch[place] <= batch[place - 1]
    return num_descents == 0
