"""Word positions of packets and arrays for kernels, wrapped as Triton requires for constants of a module.

Each is explained at its definition, in :mod:`pagedkv.device.table_arrays` and
:mod:`pagedkv.plan_buffer`.
"""

import triton.language as tl

from pagedkv.device.table_arrays import (
    ARE_DECODES as ARE_DECODES_,
    ARE_SINGLE as ARE_SINGLE_,
    BASE as BASE_,
    BLOCK_SIZE as BLOCK_SIZE_,
    ENDS_LINE as ENDS_LINE_,
    ENTRIES_AT as ENTRIES_AT_,
    ENTRIES_LINE as ENTRIES_LINE_,
    HAS_SLOTS as HAS_SLOTS_,
    LAST_WORDS as LAST_WORDS_,
    NO_FIRST as NO_FIRST_,
    NOW as NOW_,
    NUM_COLUMNS as NUM_COLUMNS_,
    NUM_ENTRIES as NUM_ENTRIES_,
    NUM_HEADS as NUM_HEADS_,
    NUM_RANGES as NUM_RANGES_,
    NUM_ROWS as NUM_ROWS_,
    NUM_RUN_COLUMNS as NUM_RUN_COLUMNS_,
    NUM_RUNS as NUM_RUNS_,
    NUM_TOKENS as NUM_TOKENS_,
    PADDED_TO as PADDED_TO_,
    PULLED as PULLED_,
    RANGES_AT as RANGES_AT_,
    ROWS_AT as ROWS_AT_,
    RUN_COUNT as RUN_COUNT_,
    RUN_FIRST as RUN_FIRST_,
    RUN_START as RUN_START_,
    RUNS_AT as RUNS_AT_,
    RUNS_LINE as RUNS_LINE_,
    STARTS_LINE as STARTS_LINE_,
    UNKNOWN_AT as UNKNOWN_AT_,
    UNKNOWNS_AT as UNKNOWNS_AT_,
    WIDTH as WIDTH_,
)
from pagedkv.plan_buffer import (
    ALIGNMENT as ALIGNMENT_,
    LENGTH as LENGTH_,
    NUM_WORDS as NUM_WORDS_,
    OFFSET as OFFSET_,
    STEP_LOW as STEP_LOW_,
)

ARE_DECODES = tl.constexpr(ARE_DECODES_)
ARE_SINGLE = tl.constexpr(ARE_SINGLE_)
BASE = tl.constexpr(BASE_)
BLOCK_SIZE = tl.constexpr(BLOCK_SIZE_)
ENDS_LINE = tl.constexpr(ENDS_LINE_)
ENTRIES_AT = tl.constexpr(ENTRIES_AT_)
ENTRIES_LINE = tl.constexpr(ENTRIES_LINE_)
HAS_SLOTS = tl.constexpr(HAS_SLOTS_)
LAST_WORDS = tl.constexpr(LAST_WORDS_)
NO_FIRST = tl.constexpr(NO_FIRST_)
NOW = tl.constexpr(NOW_)
NUM_COLUMNS = tl.constexpr(NUM_COLUMNS_)
NUM_ENTRIES = tl.constexpr(NUM_ENTRIES_)
NUM_HEADS = tl.constexpr(NUM_HEADS_)
NUM_RANGES = tl.constexpr(NUM_RANGES_)
NUM_ROWS = tl.constexpr(NUM_ROWS_)
NUM_RUN_COLUMNS = tl.constexpr(NUM_RUN_COLUMNS_)
NUM_RUNS = tl.constexpr(NUM_RUNS_)
NUM_TOKENS = tl.constexpr(NUM_TOKENS_)
PADDED_TO = tl.constexpr(PADDED_TO_)
PULLED = tl.constexpr(PULLED_)
RANGES_AT = tl.constexpr(RANGES_AT_)
ROWS_AT = tl.constexpr(ROWS_AT_)
RUN_COUNT = tl.constexpr(RUN_COUNT_)
RUN_FIRST = tl.constexpr(RUN_FIRST_)
RUN_START = tl.constexpr(RUN_START_)
RUNS_AT = tl.constexpr(RUNS_AT_)
RUNS_LINE = tl.constexpr(RUNS_LINE_)
STARTS_LINE = tl.constexpr(STARTS_LINE_)
UNKNOWN_AT = tl.constexpr(UNKNOWN_AT_)
UNKNOWNS_AT = tl.constexpr(UNKNOWNS_AT_)
WIDTH = tl.constexpr(WIDTH_)
ALIGNMENT = tl.constexpr(ALIGNMENT_)
LENGTH = tl.constexpr(LENGTH_)
NUM_WORDS = tl.constexpr(NUM_WORDS_)
OFFSET = tl.constexpr(OFFSET_)
STEP_LOW = tl.constexpr(STEP_LOW_)
