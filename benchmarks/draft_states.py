"""What drafts of recurrent states cost: a cycle of drafting rows, with a state for each draft and without states."""

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import BLOCK_SIZE, FULL, NUM_BLOCKS, admit, prompt, run_step
from pagedkv import BlockSpace, GroupSpec, RecurrentState, SpaceConfig

__all__ = ["OPERATIONS"]

NUM_ROWS = 256
NUM_DRAFTS = 3
NUM_CYCLES = 8
INTERVAL = 512


def drafting_with_states() -> Iterator[Row]:
    """Append a token and three drafts, plan, acknowledge, refuse two: attention alone, and states beside it."""
    states: tuple[GroupSpec, ...] = (*FULL, RecurrentState(INTERVAL, num_draft_states=NUM_DRAFTS + 1))
    for groups, name in ((FULL, "full attention"), (states, "full attention and states")):
        timing = _drafting_cycles(groups)
        yield Row(f"cycle of {NUM_ROWS} rows that draft {NUM_DRAFTS} tokens; {name}", timing, "cycle")


def _drafting_cycles(groups: tuple[GroupSpec, ...]) -> Timing:
    num_blocks = {group.pool: NUM_BLOCKS if group in FULL else NUM_ROWS * (NUM_DRAFTS + 8) for group in groups}
    space = BlockSpace(SpaceConfig(groups, num_blocks=num_blocks, max_sequences=NUM_ROWS))
    rows = np.array([admit(space, prompt(96 + seed % BLOCK_SIZE, seed)) for seed in range(NUM_ROWS)], np.int32)
    counts = [1 + NUM_DRAFTS] * NUM_ROWS
    tokens = prompt(NUM_ROWS * (1 + NUM_DRAFTS))
    lengths = np.array([space.num_tokens(row) for row in rows.tolist()])
    num_started = lengths.copy()

    def cycle() -> None:
        for _ in range(NUM_CYCLES):
            space.append(rows, tokens, counts, num_draft=NUM_DRAFTS)
            run_step(space)
            lengths[:] += NUM_DRAFTS - 1
            space.truncate(rows, lengths)

    timing = timed(cycle, num_runs=10)
    space.check()
    assert (lengths > num_started).all()
    assert [space.num_tokens(row) for row in rows.tolist()] == lengths.tolist()
    return timing.divided_by(NUM_CYCLES)


OPERATIONS = (drafting_with_states,)
