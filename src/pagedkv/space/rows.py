"""The record of each sequence: one row of small integers, with a part for each group.

This module defines the layout; operations write the columns where they have the reason, and ``check()`` proves what
must hold between them. With one group, a row's record is one cache line::

    | STATUS NUM_TOKENS NUM_ACCEPTED NUM_PLANNED LAST_STEP TOUCHED MARK FROZEN | group 0 | group 1 | ...

``NUM_TOKENS`` tokens have slots. Of these, ``NUM_ACCEPTED`` are certain (not drafts), and ``NUM_PLANNED`` are computed,
or will be by a planned step, of this sequence or, in shared blocks, of another one. The first column of a group
(``at``) is one of the group's parameters, which compiled loops take.

A group outside prefix caching has no digests and no tail. Since hits do not apply to it, a column of its own contains
how far it is planned; its parameter ``PLANNED`` is the index of that column. A window that can be replayed also has
such a column, after those of all tables, and one more for its first block that may be named. A group of cross-attention
has the encoder's tokens in place of the row's, and a column of its own with their number. The parameter
``NUM_POSITIONS`` is the index of the column with the number of positions that a row has in a group.

The next plan writes an entry of a block table only after :func:`note_change`. Rows with something for the open plan
are linked through ``TOUCHED``, so that the cost of a plan is proportional to the changes. 0 means "not touched", and
``1 + r`` that row r was touched before. Row 0 is always in the list, as its beginning and its end::

    row 0 [1 + 7] -> row 7 [1 + 3] -> row 3 [1 + 0] -> row 0        rows 3 and then 7 were touched

The retention rules say which tokens a query still needs; groups differ in nothing else. Sources: sliding windows as in
Mistral 7B (arXiv 2310.06825), sinks as in StreamingLLM (arXiv 2309.17453), chunked local attention as in Llama 4. A
recurrent layer needs the state after the token before.
"""

import math
from typing import Final, NamedTuple, assert_never

import numpy as np

from pagedkv.blocks.digests import root_digest
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import KEPT, NAME, REF_COUNT, SPARE, PoolArrays, aligned_zeros
from pagedkv.blocks.tenant_charges import charge_to
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.arrays import DIGEST_WORDS, Int32Array, Uint32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    is_cross,
    keeps_state,
    keeps_whole_prefix,
    most_positions,
    num_ahead,
    num_draft_states,
    num_sink_tokens,
)

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
NUM_ENCODER_TOKENS: Final = 5  # in place of the tail's life, in a group of cross-attention
DIRTY_FROM: Final = 6  # table entries changed since the last plan
DIRTY_TO: Final = 7
NUM_PER_GROUP: Final = 8
# Columns of each group that can be replayed, after those of all tables.
REPLAYED_FROM: Final = 0  # how far the group is planned
SURE_FROM: Final = 1  # logical block from which on a replay computes whole blocks exactly; 0 without a replay
NUM_PER_REPLAY: Final = 2
# Positions of a row before which a shedding group keeps blocks cached; 0: none. Columns of the group's ``ends``.
PROMPT_END: Final = 0
JUNCTION: Final = 1
LAST_BOUNDARY: Final = 2  # where the sequence would end if it ended now
PROMPT_LENGTH: Final = 3  # tokens of the prompt, whether or not hits can end there
NUM_ENDS: Final = 4
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
SHEDS: Final = 10  # blocks that leave the window stay cached only for a reason (space/windows.py)
HIT_ALIGNMENT: Final = 11  # hits of whole blocks end at multiples of this number of tokens, in all groups
HITS_INSIDE: Final = 12  # hits may end inside a block (space/partial_hits.py)
NUM_DRAFT_STATES: Final = 13  # slots of a row's draft states (space/drafting.py); 0 if it has none
SURE: Final = 14  # the column of its rows with SURE_FROM; 0 if the group cannot be replayed
COVERED: Final = 15  # tokens that a block's name covers, from the block's first one on: its own, and those ahead
MOST_AHEAD: Final = 16  # the most tokens ahead of any group, without which no hit ends anywhere
RETENTION: Final = 17  # tokens between the places at which blocks stay cached in any case; 0: none
NUM_POSITIONS: Final = 18  # the column with the positions of a row: NUM_TOKENS, or the encoder's
ROOT: Final = 19  # the eight words of the digest before a first block
NUM_PARAMETERS: Final = ROOT + DIGEST_WORDS
# Values of KIND.
FULL: Final = 0
WINDOW: Final = 1
CHUNK: Final = 2
RECURRENT: Final = 3
CROSS: Final = 4
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
        case CrossAttention():
            return CROSS, 0
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
    parameters[COVERED] = block_size + num_ahead(spec) * caching
    parameters[MOST_AHEAD] = max(map(num_ahead, others), default=0) * caching
    parameters[ROOT:] = np.frombuffer(root_digest(num_ahead(spec)), ">u4").astype(np.uint32).view(np.int32)
    parameters[PLANNED] = NUM_PLANNED
    has_chains = any(keeps_whole_prefix(other) for other in others)
    parameters[SHEDS] = caching and config.shed_windows and has_chains and kind != FULL
    parameters[HIT_ALIGNMENT] = math.lcm(*(other.block_size for other in others)) if caching else 0
    parameters[RETENTION] = config.retention_interval
    parameters[NUM_DRAFT_STATES] = num_draft_states(spec)
    parameters[HITS_INSIDE] = caching and kind != RECURRENT and config.min_partial_hit > 0
    parameters[NUM_POSITIONS] = NUM_TOKENS
    if (config.prefix_caching and not caching) or is_cross(spec):
        parameters[PLANNED] = parameters[AT] + PLANNED_HERE
    if is_cross(spec):
        parameters[NUM_POSITIONS] = parameters[AT] + NUM_ENCODER_TOKENS
    if index in config.replaying:
        num_tables = len(config.groups) + len(config.drafting)
        first = NUM_COMMON + num_tables * NUM_PER_GROUP + config.replaying.index(index) * NUM_PER_REPLAY
        parameters[PLANNED], parameters[SURE] = first + REPLAYED_FROM, first + SURE_FROM
    width = -(-most_positions(spec, max_tokens) // block_size)
    return GroupArrays(_new_table(config.max_sequences, width), parameters)


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


def root_of(group: GroupArrays) -> Uint32Array:
    """Return the digest before the first block of a sequence, in words: uint32 ``[8]``. Loops cannot return arrays."""
    return group.parameters[ROOT:].view(np.uint32)


@inlined
def num_sealed(group: GroupArrays, num_tokens: int) -> int:
    """Count the full blocks of so many tokens whose names these determine: those behind which the tokens ahead are."""
    num_ahead = group.parameters[COVERED] - group.parameters[BLOCK_SIZE]
    return int(max(0, num_tokens - num_ahead) // group.parameters[BLOCK_SIZE])


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


def new_rows(max_sequences: int, num_tables: int, *, num_replaying: int = 0, has_tenants: bool = False) -> Int32Array:
    """Make vacant rows, with columns for ``num_tables`` tables: those of the groups, and of their draft states."""
    num_columns = NUM_COMMON + num_tables * NUM_PER_GROUP + num_replaying * NUM_PER_REPLAY
    rows = aligned_zeros(max_sequences, num_columns + has_tenants)
    rows[0, TOUCHED] = 1
    return rows


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.NUMBER)
@compiled
def clear_rows(
    rows: Int32Array, serials: Int32Array, relies_on: Int32Array, num_known: Int32Array, batch: Int32Array, status: int
) -> None:
    """Reset the records of rows to those of new, empty sequences, and reset the arrays kept beside the records."""
    for row in batch:
        serials[row] += 1
        relies_on[row] = 0
        num_known[row] = 0
        mark = rows[row, MARK]
        link = rows[row, TOUCHED]  # the row stays in the list until the next plan, whatever sequence it serves
        for column in range(rows.shape[1]):
            rows[row, column] = 0
        rows[row, STATUS] = status
        rows[row, MARK] = mark
        rows[row, TOUCHED] = link


# Contents of the open plan


@inlined
def touch(rows: Int32Array, row: int) -> None:
    """Record that a row has something for the open plan."""
    if rows[row, TOUCHED] == 0:
        rows[row, TOUCHED] = rows[0, TOUCHED]
        rows[0, TOUCHED] = row
        rows[0, TOUCHED] += 1  # apart: Numba adds signed to unsigned as floats


@inlined
def note_change(rows: Int32Array, row: int, at: int, start: int, stop: int) -> None:
    """Widen the range of a row's table entries that the next plan writes."""
    if rows[row, at + DIRTY_TO] == 0:
        rows[row, at + DIRTY_FROM] = start
        rows[row, at + DIRTY_TO] = stop
    else:
        rows[row, at + DIRTY_FROM] = min(rows[row, at + DIRTY_FROM], start)
        rows[row, at + DIRTY_TO] = max(rows[row, at + DIRTY_TO], stop)
    touch(rows, row)


@inlined
def cut_changes(rows: Int32Array, row: int, at: int, stop: int) -> None:
    """Cut the range of a row's table entries that the next plan writes at ``stop``."""
    rows[row, at + DIRTY_TO] = min(rows[row, at + DIRTY_TO], stop)
    rows[row, at + DIRTY_FROM] = min(rows[row, at + DIRTY_FROM], rows[row, at + DIRTY_TO])


@inlined
def clear_changes(rows: Int32Array, row: int, at: int) -> None:
    """Clear the range of a row's table entries that the next plan writes."""
    rows[row, unsigned(at + DIRTY_FROM)] = 0
    rows[row, unsigned(at + DIRTY_TO)] = 0


@inlined
def first_needed_token(kind: int, span: int, query: int) -> int:
    """Return the first position (sinks aside) that computing position ``query`` or any later one still reads."""
    if kind == FULL:
        return 0
    if kind == WINDOW:
        return max(0, query - span + 1)
    if kind == CHUNK:
        return query // span * span
    if kind == CROSS:
        return 0
    assert kind == RECURRENT
    return max(0, query - 1)


@inlined
def first_block_of_hit(kind: int, span: int, length: int, block_size: int, ends_hits: int) -> int:
    """Return the first logical block (sinks aside) that a prefix hit of ``length`` tokens needs.

    In a group that ``ends_hits`` it is never after the last block: at the start of a chunk nothing before it is read,
    but some group must prove that these tokens were ever computed.
    """
    needed = first_needed_token(kind, span, length) // block_size
    return min(needed, max(0, length // block_size - 1)) if ends_hits else needed


@inlined
def serves(group: GroupArrays, index: int, length: int) -> bool:
    """Whether a hit of ``length`` tokens needs logical block ``index``."""
    block_size = group.parameters[BLOCK_SIZE]
    first = first_block_of_hit(
        group.parameters[KIND], group.parameters[SPAN], length, block_size, group.parameters[ENDS_HITS]
    )
    return index < length // block_size and (index >= first or index < group.parameters[NUM_SINK_BLOCKS])


@inlined
def charge_to_tenant_of_row(pool: PoolArrays, rows: Int32Array, row: int) -> None:
    """Charge all later allocations to a row's tenant, where there are tenants."""
    if len(pool.tenants):
        charge_to(pool, rows[row, TENANT])


@inlined
def shed_at_release(pool: PoolArrays, block: int) -> None:
    """Make a named block spare if one reference is left, which the caller releases, and it has no reason to be kept."""
    record = pool.records[block]
    if record[REF_COUNT] == 1 and record[NAME] and not record[KEPT]:
        pool.records[block, KEPT] = SPARE


@takes(Like.ROWS, Like.IDS, Like.NUMBER, Like.NUMBER)
@compiled
def first_unfit_row(rows: Int32Array, batch: Int32Array, status: int, mark: int) -> int:
    """Find the first place in a batch with a row that is out of range, vacant, repeated, or of another status; or -1.

    ``mark`` is a number that no batch has used before.
    """
    for place in range(len(batch)):
        if batch[place] < 0 or batch[place] >= len(rows):
            return place
        row = unsigned(batch[place])
        if rows[row, MARK] == mark:
            return place
        if rows[row, STATUS] == VACANT or (status != OCCUPIED and rows[row, STATUS] != status):
            return place
        rows[row, MARK] = mark
    return -1


@inlined
def is_unfilled(rows: Int32Array, num_known: Int32Array, row: int) -> bool:
    """Whether a row has unknown tokens."""
    return bool(0 < num_known[row] < rows[row, NUM_TOKENS])


@takes(Like.ROWS, Like.IDS, Like.IDS)
@compiled
def first_unfilled(rows: Int32Array, num_known: Int32Array, batch: Int32Array) -> int:
    """Find the first place in a batch with a row that has unknown tokens, or -1."""
    for place in range(len(batch)):
        if is_unfilled(rows, num_known, batch[place]):
            return place
    return -1
