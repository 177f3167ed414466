"""What hits inside blocks cost: prompts that leave 16 others inside the same block, with the feature and without."""

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, timed
from benchmarks.operations import BLOCK_SIZE, FULL, HYBRID, NUM_BLOCKS, PROMPT_SIZES, admit, prompt, run_step
from pagedkv import Allocation, BlockSpace, GroupSpec, SpaceConfig

__all__ = ["OPERATIONS"]

NUM_BRANCHES = 16
NUM_INSIDE = BLOCK_SIZE // 2


def hits_inside_blocks() -> Iterator[Row]:
    """Match and allocate a prompt that leaves 16 cached ones inside one block, with partial hits and without."""
    for groups, name in ((FULL, "one group"), (HYBRID, "full + window 1,024")):
        for least in (0, 1):
            how = "partial hits" if least else "whole blocks"
            space, tokens = _branched_space(groups, least), _branch(NUM_BRANCHES)
            expected = PROMPT_SIZES["1k"] + NUM_INSIDE * (least > 0)
            assert space.match(tokens).num_tokens == expected
            timing = timed(lambda: space.match(tokens), num_runs=25)  # noqa: B023 - called at once
            yield Row(f"match 1k cached tokens and 8 inside a block, {name}; {how}", timing)
            allocations: list[Allocation] = []

            def admit_branch() -> None:
                answer = space.allocate(tokens)  # noqa: B023 - called at once
                assert isinstance(answer, Allocation)
                allocations.append(answer)  # noqa: B023 - as above

            def give_up() -> None:
                if allocations:  # noqa: B023 - as above
                    space.free(allocations.pop().row)  # noqa: B023 - as above
                run_step(space)  # noqa: B023 - as above

            timing = timed(admit_branch, before=give_up, num_runs=25)
            space.check()
            yield Row(f"match and allocate 1k cached tokens and 8 inside a block, {name}; {how}", timing)


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
