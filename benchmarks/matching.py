"""Matching beyond the usual case: a pool whose blocks lie anywhere, prompts as lists, one answer for three questions.

The usual case, a fresh pool that hands out one block after the other, is in ``operations``. How fast a long match can
be is a matter of memory, so a bare pass over as many bytes is timed beside it, by which machines can be compared.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import BLOCK_SIZE, NUM_BLOCKS, PROMPT_SIZES, admit, new_space, prompt, run_step
from pagedkv import Allocation, BlockSpace, Shortage

__all__ = ["OPERATIONS"]

Int32Array = npt.NDArray[np.int32]

RECORD_FIELDS = 14
NUM_PROMPTS = 10
NUM_ROWS = 1023
COLD_NBYTES = 1 << 26


def memory_pass() -> Iterator[Row]:
    """Read as many bytes as a match of 128k cached tokens reads: a yardstick for machines, no code of ours."""
    num_tokens = PROMPT_SIZES["128k"]
    num_fields = num_tokens // BLOCK_SIZE * RECORD_FIELDS
    for is_cold in (False, True):
        # Prompts, the blocks' tokens and records, each written once, as a first touch of a match finds them.
        arrays = [[prompt(num, seed) for num in (num_tokens, num_tokens, num_fields)] for seed in range(NUM_PROMPTS)]
        expected = [[array.max() for array in each] for each in arrays]
        found: list[list[np.int32]] = []
        timing = _first_touches(partial(_read_into, found), arrays, is_cold=is_cold)
        assert found == expected
        yield Row(f"a bare pass over the bytes of a match of 128k tokens{_words(is_cold=is_cold)}", timing)


def _read_into(found: list[list[np.int32]], arrays: list[Int32Array]) -> None:
    found.append([array.max() for array in arrays])


def match_on_a_churned_pool() -> Iterator[Row]:
    """Match prompts whose blocks lie all over the pool, as after many sequences that grew side by side."""
    for size, num_tokens in PROMPT_SIZES.items():
        for is_cold in (False, True):
            space = churned_space()
            prompts = [prompt(num_tokens + 1, seed) for seed in range(NUM_PROMPTS)]
            for tokens in prompts:
                row = admit(space, tokens)
                assert np.mean(np.diff(space.block_ids(row)) == 1) < 0.1, "the pool is as good as fresh"
                space.free(row)
            timing = _first_touches(partial(_match_whole, space), prompts, is_cold=is_cold)
            space.check()
            yield Row(f"match {size} cached tokens on a churned pool, first touch{_words(is_cold=is_cold)}", timing)


def churned_space() -> BlockSpace:
    """Build a space that hands out its blocks in no order: sequences grew side by side, and are gone."""
    space = new_space()
    random = np.random.default_rng(0)
    rows = np.array([admit(space, prompt(1, seed)) for seed in range(NUM_ROWS)], np.int32)
    counts = np.full(NUM_ROWS, BLOCK_SIZE, np.int32)
    for seed in range(NUM_BLOCKS // NUM_ROWS - 1):
        assert space.append(random.permutation(rows), prompt(NUM_ROWS * BLOCK_SIZE, seed), counts) is None
    run_step(space)
    num_unused = space.num_free_blocks()
    admit(
        space, prompt(num_unused * BLOCK_SIZE, NUM_ROWS)
    )  # and stays: these blocks would be handed out first, in order
    space.free(random.permutation(rows))
    return space


def _match_whole(space: BlockSpace, tokens: Int32Array) -> None:
    num_hit_tokens = space.match(tokens).num_tokens
    assert num_hit_tokens == (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE


def _first_touches(
    run: Callable[..., None], arguments: list[Int32Array] | list[list[Int32Array]], *, is_cold: bool
) -> Timing:
    """Time a run for each argument but the first; cold: after other memory traffic, 64 MiB."""
    todo = iter(arguments)
    other_memory = np.zeros(COLD_NBYTES // 8 if is_cold else 1)
    return timed(
        lambda: run(next(todo)),
        before=lambda: other_memory.__iadd__(1),
        num_runs=len(arguments) - 1,
        num_warm_ups=1,
    )


def _words(*, is_cold: bool) -> str:
    return ", processor caches cold" if is_cold else ""


def prompt_as_a_list() -> Iterator[Row]:
    """Prompts as lists of Python integers, as tokenizers return them."""
    for size in ("1k", "32k"):
        space = new_space()
        tokens = prompt(PROMPT_SIZES[size] + 1)
        space.free(admit(space, tokens))
        as_list = tokens.tolist()
        assert space.match(as_list).num_tokens == PROMPT_SIZES[size]
        timing = timed(partial(space.match, as_list), num_runs=25)
        yield Row(f"match {size} cached tokens, given as a list", timing)
        yield Row(
            f"allocate {size} cached tokens, given as a list", _admitting(space, partial(space.allocate, as_list))
        )


def three_questions() -> Iterator[Row]:
    """Match, can_allocate and allocate the same prompt, each on its own."""
    for size, num_tokens in PROMPT_SIZES.items():
        space = new_space()
        tokens = prompt(num_tokens + 1)
        space.free(admit(space, tokens))
        timing = _admitting(space, partial(_ask_thrice, space, tokens))
        yield Row(f"match + can_allocate + allocate {size} cached tokens, each on its own", timing)


def _ask_thrice(space: BlockSpace, tokens: Int32Array) -> Allocation | Shortage:
    space.match(tokens)
    space.can_allocate(tokens)
    return space.allocate(tokens)


def three_questions_one_answer() -> Iterator[Row]:
    """Match, can_allocate and allocate the same prompt, the answer of the first handed on."""
    for size, num_tokens in PROMPT_SIZES.items():
        space = new_space()
        tokens = prompt(num_tokens + 1)
        space.free(admit(space, tokens))
        timing = _admitting(space, partial(_ask_once, space, tokens))
        yield Row(f"match + can_allocate + allocate {size} cached tokens, with one answer", timing)


def _ask_once(space: BlockSpace, tokens: Int32Array) -> Allocation | Shortage:
    answer = space.match(tokens)
    space.can_allocate(tokens, match=answer)
    return space.allocate(tokens, match=answer)


def _admitting(space: BlockSpace, allocate: Callable[[], Allocation | Shortage]) -> Timing:
    """Time an allocation that hits as much as can be; what it took is given back between the runs."""
    allocations: list[Allocation | Shortage] = []

    def prepare() -> None:
        if allocations:
            allocation = allocations.pop()
            assert isinstance(allocation, Allocation)
            space.free(allocation.row)
        run_step(space)

    timing = timed(lambda: allocations.append(allocate()), before=prepare, num_runs=25)
    space.check()
    return timing


OPERATIONS: tuple[Callable[[], Iterator[Row]], ...] = (
    memory_pass,
    match_on_a_churned_pool,
    prompt_as_a_list,
    three_questions,
    three_questions_one_answer,
)
