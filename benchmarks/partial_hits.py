"""What hits inside blocks cost: prompts that leave 16 others inside the same block, with the feature and without."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import BLOCK_SIZE, FULL, HYBRID, NUM_BLOCKS, PROMPT_SIZES, admit, allocated, prompt, run_step
from pagedkv import BlockSpace, GroupSpec, SpaceConfig

__all__ = ["OPERATIONS"]

NUM_BRANCHES = 16
NUM_INSIDE = BLOCK_SIZE // 2


def hits_inside_blocks() -> Iterator[Row]:
    """Match and allocate a prompt that leaves 16 cached ones inside one block, with partial hits and without."""
    for groups, name in ((FULL, "one group"), (HYBRID, "full + window 1,024")):
        for least, how in ((0, "whole blocks"), (1, "partial hits")):
            space, tokens = _branched_space(groups, least), _branch(NUM_BRANCHES)
            num_hit_tokens = PROMPT_SIZES["1k"] + NUM_INSIDE * (least > 0)
            assert space.match(tokens).num_tokens == num_hit_tokens
            timing = timed(partial(space.match, tokens), num_runs=25)
            yield Row(f"match 1k cached tokens and 8 inside a block, {name}; {how}", timing)
            timing = _admissions(space, tokens, num_hit_tokens)
            yield Row(f"match and allocate 1k cached tokens and 8 inside a block, {name}; {how}", timing)


def _admissions(space: BlockSpace, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], num_hit_tokens: int) -> Timing:
    rows: list[int] = []

    def admit_branch() -> None:
        answer = allocated(space.allocate(tokens))
        assert answer.num_hit_tokens == num_hit_tokens
        rows.append(answer.row)

    def give_up() -> None:
        space.free(rows)
        rows.clear()
        run_step(space)

    timing = timed(admit_branch, before=give_up, num_runs=25)
    space.check()
    return timing


def _branch(seed: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Make a prompt that shares 1,024 tokens and half a block with the others, and ends before that block does."""
    return np.append(prompt(PROMPT_SIZES["1k"] + NUM_INSIDE), prompt(NUM_INSIDE - 1, seed + 1)).astype(np.int32)


def _branched_space(groups: tuple[GroupSpec, ...], least: int) -> BlockSpace:
    space = BlockSpace(SpaceConfig(groups, num_blocks=NUM_BLOCKS, max_sequences=64, min_partial_hit=least))
    for seed in range(NUM_BRANCHES):
        tokens = np.append(_branch(seed), prompt(BLOCK_SIZE, seed)).astype(np.int32)
        hit = space.match(tokens).num_tokens
        space.free(admit(space, tokens, num_hit_tokens=hit))
    return space


OPERATIONS = (hits_inside_blocks,)
