"""What replay of windows costs for groups that use it; rows of other benchmarks show that it costs others nothing."""

from collections.abc import Iterator
from functools import partial

from benchmarks.measure import Row, timed
from benchmarks.operations import BLOCK_SIZE, PROMPT_SIZES, Int32Array, admit, allocated, prompt, run_step
from pagedkv import BlockSpace, FullAttention, GroupSpec, Replay, SlidingWindow, SpaceConfig

__all__ = ["OPERATIONS"]

WINDOW = 128
REPLAYED = 4 * (WINDOW - 1)
HIT = PROMPT_SIZES["32k"] // 2
NUM_BLOCKS = {"device": 20_000, "windows": 2_052}  # as many as one prompt of 32k has


def windows_computed_again() -> Iterator[Row]:
    """Match and allocate half of a cached prompt of 32k whose windows there are gone: without replay, and with."""
    tokens = prompt(HIT + 1)
    for most, how in ((0, "no replay: nothing hits"), (REPLAYED + BLOCK_SIZE, "replay of 512 tokens")):
        space = _without_windows()
        num_hit_tokens = HIT if most else 0
        assert space.match(tokens, max_replay_tokens=most).num_tokens == num_hit_tokens
        timing = timed(partial(space.match, tokens, max_replay_tokens=most), num_runs=25)
        yield Row(f"match 16k tokens, full + window 128; {how}", timing)
        if not most:
            continue
        rows: list[int] = []
        admit_half = partial(_admit, space, tokens, most, rows)
        timing = timed(admit_half, before=partial(_give_up, space, rows), num_runs=25)
        space.check()
        yield Row(f"match and allocate 16k tokens, full + window 128; {how}", timing)


def _admit(space: BlockSpace, tokens: Int32Array, most: int, rows: list[int]) -> None:
    answer = space.match(tokens, max_replay_tokens=most)
    rows.append(allocated(space.allocate(tokens, match=answer)).row)


def _give_up(space: BlockSpace, rows: list[int]) -> None:
    """Free the rows before their step, so that what they were to compute is never hit."""
    space.free(rows)
    rows.clear()
    run_step(space)


def _without_windows() -> BlockSpace:
    """Cache a prompt of 32k tokens, then push its windows out by two others."""
    window = SlidingWindow(WINDOW, BLOCK_SIZE, pool="windows", replay=Replay(REPLAYED, 4))
    groups: tuple[GroupSpec, ...] = (FullAttention(BLOCK_SIZE), window)
    space = BlockSpace(SpaceConfig(groups, num_blocks=NUM_BLOCKS, max_sequences=64))
    for seed in range(3):
        space.free(admit(space, prompt(PROMPT_SIZES["32k"], seed)))
    return space


OPERATIONS = (windows_computed_again,)
