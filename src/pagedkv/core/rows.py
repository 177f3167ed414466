"""What is known of each sequence: one row of small integers, the part of every group beside it.

Owns the layout. With one group a row's record is one cache line::

    | STATUS NUM_TOKENS NUM_ACCEPTED NUM_PLANNED SERIAL TOUCHED MARK FROZEN | group 0 | group 1 | ...

``NUM_TOKENS`` tokens are known and have slots. Of these, ``NUM_ACCEPTED`` are certain (not drafts), and
``NUM_PLANNED`` are computed or on their way in a planned step, by this sequence or, in shared blocks, by
another one. Compiled loops take the group's first column (``at``) among the group's parameters.
"""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.core.blocks import Int32Array, aligned_zeros
from pagedkv.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow, SpaceConfig

__all__ = ["GroupArrays", "new_group_arrays", "new_rows", "rule_of"]

# Columns common to all groups.
STATUS: Final = 0
NUM_TOKENS: Final = 1
NUM_ACCEPTED: Final = 2
NUM_PLANNED: Final = 3
SERIAL: Final = 4  # grows with every sequence that gets the row, so that old plans know it is another
TOUCHED: Final = 5  # has something for the open plan
MARK: Final = 6  # number of the last batch that named the row: finds duplicates
FROZEN: Final = 7  # publishes nothing any more (its content belongs to dropped weights, or its chain is lost)
NUM_COMMON: Final = 8

# Columns of each group, counted from its ``at``.
NUM_BLOCKS: Final = 0  # entries of the table in use, null blocks included
FIRST_BLOCK: Final = 1  # blocks below it are null, but for the sinks
NUM_DIGESTED: Final = 2  # leading full blocks whose digest is known
NUM_PUBLISHED: Final = 3  # leading full blocks that were offered to the prefix index
TAIL: Final = 4  # the named block that carries the last published content, and its life then
TAIL_LIFE: Final = 5
DIRTY_FROM: Final = 6  # table entries changed since the last plan
DIRTY_TO: Final = 7
NUM_PER_GROUP: Final = 8

# Values of STATUS; OCCUPIED asks for any but VACANT.
OCCUPIED: Final = -1
VACANT: Final = 0
RUNNING: Final = 1
SWAPPED: Final = 2
LOST: Final = 3
LOST_ON_HOST: Final = 4

# Group parameters.
NAME_IN_POOL: Final = 0  # 1 + index of the group: what NAME of its blocks says
AT: Final = 1  # first column in the row
BLOCK_SIZE: Final = 2
KIND: Final = 3
SPAN: Final = 4  # window or chunk, in tokens
NUM_SINK_BLOCKS: Final = 5
CACHING: Final = 6
SHARES_IN_STEP: Final = 7  # blocks that the open step still computes may hit
NUM_PARAMETERS: Final = 8

# Values of KIND.
FULL: Final = 0
WINDOW: Final = 1
CHUNK: Final = 2
RECURRENT: Final = 3

CACHE_LINE_ENTRIES: Final = 16


class GroupArrays(NamedTuple):
    """The state of one group, as compiled loops take it.

    Args:
        table: int32 ``[max_sequences, at least width]``: logical block -> block id; the upload buffer itself.
        parameters: int32 ``[NUM_PARAMETERS]``.
    """

    table: Int32Array
    parameters: Int32Array


def new_rows(max_sequences: int, num_groups: int) -> Int32Array:
    """Make vacant rows."""
    return aligned_zeros(max_sequences, NUM_COMMON + num_groups * NUM_PER_GROUP)


def rule_of(spec: GroupSpec) -> tuple[int, int]:
    """Give a group's rule as compiled loops take it: its kind, and the span of its window or chunk, else 0."""
    match spec:
        case FullAttention():
            return FULL, 0
        case SlidingWindow():
            return WINDOW, spec.window
        case ChunkedLocal():
            return CHUNK, spec.chunk_size
        case RecurrentState():
            return RECURRENT, 0


def new_group_arrays(index: int, config: SpaceConfig) -> GroupArrays:
    """Make the empty table and the parameters of one group of a configuration."""
    spec, max_tokens, caching = config.groups[index], config.max_tokens, config.prefix_caching
    kind, span = rule_of(spec)
    is_one_state = kind == RECURRENT and not caching  # no checkpoints: one state block serves the whole sequence
    block_size = max_tokens if is_one_state else spec.block_size
    num_sink_tokens = spec.num_sink_tokens if isinstance(spec, SlidingWindow) else 0
    parameters = np.zeros(NUM_PARAMETERS, np.int32)
    parameters[NAME_IN_POOL] = index + 1
    parameters[AT] = NUM_COMMON + index * NUM_PER_GROUP
    parameters[BLOCK_SIZE] = block_size
    parameters[KIND] = kind
    parameters[SPAN] = span
    parameters[NUM_SINK_BLOCKS] = -(-num_sink_tokens // block_size)
    parameters[CACHING] = caching
    # One kernel would read and write a recurrent state at once, and nobody could inherit its computation.
    parameters[SHARES_IN_STEP] = not any(isinstance(other, RecurrentState) for other in config.groups)
    width = -(-max_tokens // block_size)
    # One spare cache line a row: with a stride of a power of two all rows would share a few cache sets.
    stride = -(-width // CACHE_LINE_ENTRIES) * CACHE_LINE_ENTRIES + CACHE_LINE_ENTRIES
    return GroupArrays(np.zeros((config.max_sequences, stride), np.int32), parameters)
