"""The operations of the first table of the peers' figures, same sizes: block size 16, a pool of 100,000 blocks.

Each function builds what it needs, checks that the result is right, and only then times. Times are of whole
public calls, argument checks included.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Row, Timing, timed
from benchmarks.naive import NaiveManager
from benchmarks.peers import BUILT_IN_64_TURNS_BAR, FIRST_TOUCH_BARS
from pagedkv import (
    Allocation,
    BlockPool,
    BlockSpace,
    FullAttention,
    GroupSpec,
    Shortage,
    SlidingWindow,
    SpaceConfig,
    StepPlan,
    hash_request_tokens,
)

__all__ = ["OPERATIONS", "Row"]

BLOCK_SIZE = 16
NUM_BLOCKS = 100_000
IMPORT_BAR = 1e6
PROMPT_SIZES = {"1k": 1024, "32k": 32_768, "128k": 131_072}
FULL: tuple[GroupSpec, ...] = (FullAttention(BLOCK_SIZE),)
HYBRID: tuple[GroupSpec, ...] = (FullAttention(BLOCK_SIZE), SlidingWindow(1024, BLOCK_SIZE))

Int32Array = npt.NDArray[np.int32]


def new_space(groups: tuple[GroupSpec, ...] = FULL, *, caching: bool = True) -> BlockSpace:
    """Build a space of the usual size."""
    config = SpaceConfig(groups, num_blocks=NUM_BLOCKS, max_sequences=1024, prefix_caching=caching)
    return BlockSpace(config)


def prompt(num_tokens: int, seed: int = 0) -> Int32Array:
    """Make random tokens."""
    return np.random.default_rng(seed).integers(0, 32_000, num_tokens, dtype=np.int32)


def run_step(space: BlockSpace) -> None:
    """Plan a step and acknowledge it at once."""
    space.acknowledge(space.plan_step().step_id)


def admit(space: BlockSpace, tokens: Int32Array, *, num_hit_tokens: int = 0) -> int:
    """Allocate a prompt, run its step, and check how much of it hit."""
    allocation = allocated(space.allocate(tokens))
    assert allocation.num_hit_tokens == num_hit_tokens, allocation
    run_step(space)
    return allocation.row


def allocated(answer: Allocation | Shortage) -> Allocation:
    """Check that there was room."""
    assert isinstance(answer, Allocation), str(answer)
    return answer


def batch_of(space: BlockSpace, lengths: list[int]) -> Int32Array:
    """Admit a sequence of each length."""
    return np.array([admit(space, prompt(length, seed)) for seed, length in enumerate(lengths)], np.int32)


def decode_without_completion() -> Iterator[Row]:
    """One token for each sequence of a batch; no block is completed. Average over ten steps, then rolled back."""
    num_steps = 10
    for num_rows, bar_us, bar_ratio in ((1, 3.0, None), (256, None, None), (1024, 10.0, 0.9)):
        space = new_space()
        rows = batch_of(space, [97] * num_rows)
        run_steps = partial(_append_often, space, rows, prompt(num_rows), num_steps)
        timing = timed(run_steps, before=partial(space.truncate, rows, np.full(num_rows, 97)), num_runs=25)
        assert {space.num_tokens(row) for row in rows.tolist()} == {97 + num_steps}
        space.check()
        name = "batch of one" if num_rows == 1 else f"{num_rows:,} sequences"
        operation = f"decode step, +1 token, {name}, no block completed"
        yield Row(operation, timing.divided_by(num_steps), "step", bar_us, bar_ratio=bar_ratio)


def _append_often(space: BlockSpace, rows: Int32Array, tokens: Int32Array, num_steps: int) -> None:
    for _ in range(num_steps):
        space.append(rows, tokens)


def decode_with_publication() -> Iterator[Row]:
    """A sixteenth of the blocks completes and is published each step: average over two blocks' worth of steps."""
    naive_us = _naive_decode()
    for groups, name, bar_us in ((FULL, "one group", 60.0), (HYBRID, "full + window 1,024", 90.0)):
        for with_plan in (False, True):
            timing = _decode_steps(groups, with_plan=with_plan)
            operation = f"decode step, 1,024 sequences, 1/16 of blocks published, {name}"
            if with_plan:
                bar_ratio = 0.95 if groups is FULL else None
                yield Row(f"{operation}; with plan and acknowledge", timing, "step", bar_ratio=bar_ratio)
            else:
                yield Row(operation, timing, "step", bar_us, naive_us if groups is FULL else None)


def _decode_steps(groups: tuple[GroupSpec, ...], *, with_plan: bool) -> Timing:
    space = new_space(groups)
    rows = batch_of(space, [96 + index % BLOCK_SIZE for index in range(1024)])
    num_runs, num_warm_ups = 14, 2
    num_steps = (num_runs + num_warm_ups) * BLOCK_SIZE
    steps = [prompt(1024, seed) for seed in range(num_steps)]
    todo = iter(steps)

    def run_steps() -> None:
        for _ in range(BLOCK_SIZE):
            space.append(rows, next(todo))
            if with_plan:
                run_step(space)

    named_before = space.statistics().pools[0].num_named
    whole = timed(run_steps, num_runs=num_runs, num_warm_ups=num_warm_ups)
    named = space.statistics().pools[0].num_named - named_before
    assert named == 1024 * num_steps // BLOCK_SIZE * len(groups), f"{named} blocks were published"
    space.check()
    return whole.divided_by(BLOCK_SIZE)


def _naive_decode() -> float:
    manager = NaiveManager(NUM_BLOCKS, BLOCK_SIZE)
    sequences = [manager.allocate(prompt(96 + index % BLOCK_SIZE, index))[0] for index in range(1024)]

    def run_steps() -> None:
        for _ in range(BLOCK_SIZE):
            for sequence in sequences:
                manager.append(sequence, 7)

    return timed(run_steps, num_runs=2, num_warm_ups=0).divided_by(BLOCK_SIZE).best_us


def allocate_prompt() -> Iterator[Row]:
    """Allocate a prompt of which nothing is cached, and free it."""
    for size, num_tokens in PROMPT_SIZES.items():
        for caching in (True, False):
            yield from _allocate_and_free(size, num_tokens, caching=caching)
    yield _allocate_with_digests()
    yield _allocate_with_digests(num_random_bytes=8)


def _allocate_and_free(size: str, num_tokens: int, *, caching: bool) -> Iterator[Row]:
    space = new_space(caching=caching)
    held: list[int] = []
    seeds = iter(range(100))
    upcoming: list[Int32Array] = []

    def prepare() -> None:
        if held:
            space.free(held.pop())
        upcoming[:] = [prompt(num_tokens, next(seeds))]

    def allocate() -> None:
        allocation = space.allocate(upcoming[0])
        assert not isinstance(allocation, Shortage)
        held.append(allocation.row)

    def prepare_quietly() -> None:
        prepare()
        run_step(space)

    def prepare_and_allocate() -> None:
        prepare()
        allocate()
        run_step(space)

    allocating = timed(allocate, before=prepare_quietly, num_runs=9)
    assert len(space.block_ids(held[0])) == -(-num_tokens // BLOCK_SIZE)
    if caching:
        assert space.match(np.append(upcoming[0], 1)).num_tokens == num_tokens // BLOCK_SIZE * BLOCK_SIZE
    freeing = timed(lambda: space.free(held.pop()), before=prepare_and_allocate, num_runs=9)
    space.check()
    naive = _naive_allocate(num_tokens) if caching else None
    bars = {True: 2500.0, False: 60.0} if size == "128k" else {}
    kind = "digests included" if caching else "caching off"
    yield Row(f"allocate a {size}-token prompt, no hit, {kind}", allocating, "call", bars.get(caching), naive)
    if caching:
        yield Row(f"free a {size}-token sequence", freeing, "call", 60.0 if size == "128k" else None)


def _allocate_with_digests(num_random_bytes: int = 32) -> Row:
    """The same with digests that the caller brings, filled up with zeros: what naming alone costs."""
    num_tokens = PROMPT_SIZES["128k"]
    space = new_space()
    tokens = prompt(num_tokens)
    digests = np.frombuffer(b"".join(hash_request_tokens(tokens, BLOCK_SIZE)), np.uint8).reshape(-1, 32).copy()
    digests[:, : 32 - num_random_bytes] = 0
    held: list[int] = []

    def prepare() -> None:
        if held:
            space.free(held.pop())
        run_step(space)
        space.reset_prefix_cache()

    def allocate() -> None:
        allocation = space.allocate(tokens, digests=digests)
        assert not isinstance(allocation, Shortage)
        assert allocation.num_hit_tokens == 0
        held.append(allocation.row)

    timing = timed(allocate, before=prepare, num_runs=9)
    kind = "" if num_random_bytes == 32 else f", {8 * num_random_bytes} bits and zeros before"
    return Row(f"allocate a 128k-token prompt, no hit, digests brought by the caller{kind}", timing)


def _naive_allocate(num_tokens: int) -> float:
    manager = NaiveManager(NUM_BLOCKS, BLOCK_SIZE)
    seeds = iter(range(1000, 1010))
    return timed(lambda: manager.allocate(prompt(num_tokens, next(seeds))), num_runs=3, num_warm_ups=1).median_us


def match_prompt() -> Iterator[Row]:
    """Match a prompt that is cached whole: the first touch after its publication, and after 64 turns."""
    for size, num_tokens in PROMPT_SIZES.items():
        yield _match_first_touch(size, num_tokens, cold=False)
    yield _match_first_touch("128k", PROMPT_SIZES["128k"], cold=True)
    space = new_space()
    tokens = prompt(PROMPT_SIZES["128k"])
    turn = len(tokens) // 64
    for end in range(turn, len(tokens) + 1, turn):
        space.free(admit(space, tokens[:end], num_hit_tokens=max(0, end - turn)))
    longer = np.append(tokens, 1).astype(np.int32)
    assert space.match(longer).num_tokens == len(tokens)
    timing = timed(lambda: space.match(longer), num_runs=15)
    yield Row("match 128k cached tokens, built in 64 turns", timing, "call", 150.0, bar_ratio=BUILT_IN_64_TURNS_BAR)


def _match_first_touch(size: str, num_tokens: int, *, cold: bool) -> Row:
    """Every run matches a prompt that was not matched before; cold: after 64 MiB of other memory traffic."""
    space = new_space()
    prompts = [prompt(num_tokens + 1, seed) for seed in range(10)]
    for tokens in prompts:
        space.free(admit(space, tokens))
    todo = iter(prompts)
    other_memory = np.zeros(1 << 23 if cold else 1)
    results = []
    timing = timed(
        lambda: results.append(space.match(next(todo)).num_tokens),
        before=lambda: other_memory.__iadd__(1),
        num_runs=9,
        num_warm_ups=1,
    )
    assert set(results) == {num_tokens // BLOCK_SIZE * BLOCK_SIZE}
    if cold:
        return Row(f"match {size} cached tokens, first touch, processor caches cold", timing)
    bar_us = 150.0 if size == "128k" else None
    return Row(f"match {size} cached tokens, first touch", timing, "call", bar_us, bar_ratio=FIRST_TOUCH_BARS[size])


def shared_hit() -> Iterator[Row]:
    """A prompt of 1,000 tokens that a live sequence has cached: match and allocate in one call."""
    space = new_space()
    tokens = prompt(1001)
    admit(space, tokens[:1000])
    held: list[int] = []

    def allocate() -> None:
        allocation = space.allocate(tokens)
        assert not isinstance(allocation, Shortage)
        assert allocation.num_hit_tokens == 992
        held.append(allocation.row)

    def prepare() -> None:
        if held:
            space.free(held.pop())
        run_step(space)

    timing = timed(allocate, before=prepare, num_runs=100)
    space.check()
    yield Row("shared hit of 1,000 tokens: match + allocate", timing, "call", 25.0)


def fork() -> Iterator[Row]:
    """Fork a sequence of 32k tokens into four more."""
    space = new_space()
    parent = admit(space, prompt(PROMPT_SIZES["32k"]))
    held: list[Int32Array] = []

    def prepare() -> None:
        if held:
            space.free(held.pop())
        run_step(space)

    timing = timed(lambda: held.append(space.fork(parent, 4)), before=prepare, num_runs=30)
    assert {tuple(space.block_ids(int(row))) for row in held[0]} == {tuple(space.block_ids(parent))}
    space.check()
    yield Row("fork of a 32k-token sequence into 4", timing, "call", 40.0)


def evict() -> Iterator[Row]:
    """Allocate from a pool that is full of cached blocks."""
    for caching_of_new, name in ((True, "digests of the new blocks included"), (False, "lookahead slots, no digests")):
        space = new_space()
        seeds = iter(range(1000))
        while space.statistics().pools[0].num_cached < NUM_BLOCKS - 1:
            free = NUM_BLOCKS - 1 - space.statistics().pools[0].num_cached
            space.free(admit(space, prompt(min(free, 1000) * BLOCK_SIZE, next(seeds))))
        num_blocks = 8192
        tokens = num_blocks * BLOCK_SIZE if caching_of_new else 1
        reserved = 0 if caching_of_new else (num_blocks - 1) * BLOCK_SIZE
        fills = [prompt(tokens, next(seeds)) for _ in range(9)]
        before = space.statistics().pools[0].num_evictions
        timing = timed(partial(_allocate_next, space, iter(fills), reserved), num_runs=8, num_warm_ups=1)
        assert space.statistics().pools[0].num_evictions - before == 9 * num_blocks
        space.check()
        operation = f"allocate with eviction, pool full of cached blocks, {name}"
        yield Row(operation, timing.divided_by(num_blocks), "block", 0.2)


def _allocate_next(space: BlockSpace, prompts: Iterator[Int32Array], num_lookahead: int) -> None:
    allocated(space.allocate(next(prompts), num_lookahead=num_lookahead))


def device_table() -> Iterator[Row]:
    """The plan with 1,024 new tables of 1k tokens for the device; in between, the table is the upload buffer."""
    space = new_space()
    rows: list[int] = []

    def prepare() -> None:
        if rows:
            space.free(rows)
            space.acknowledge(plans[-1].step_id)
            rows.clear()
        for seed in range(1024):
            allocation = space.allocate(prompt(1024, seed))
            assert not isinstance(allocation, Shortage)
            rows.append(allocation.row)

    plans: list[StepPlan] = []

    def plan() -> None:
        plans.append(space.plan_step())

    timing = timed(plan, before=prepare, num_runs=3, num_warm_ups=1)
    assert len(plans[-1].table_writes[0].block_ids) == 1024 * 1024 // BLOCK_SIZE
    yield Row("the block table for the device, 1,024 x 1k tokens, all new", timing, "step")


def build() -> Iterator[Row]:
    """Build pools."""
    for num_blocks, name, bar_us in ((100_000, "100,000", None), (1_000_000, "1,000,000", 50_000.0)):
        timing = timed(partial(BlockPool, "pool", num_blocks, BLOCK_SIZE), num_runs=5)
        assert BlockPool("pool", num_blocks, BLOCK_SIZE).num_free == num_blocks - 1
        yield Row(f"build {name} blocks", timing, "call", bar_us)


def import_package() -> Iterator[Row]:
    """Importing the package in a fresh interpreter: processor time, Numba's and NumPy's imports included."""
    program = """
import time
start = time.process_time()
from pagedkv import BlockSpace
print(time.process_time() - start)
"""
    times = [
        1e6 * float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
        for _ in range(5)
    ]
    yield Row("import pagedkv", Timing(median(times), min(times), len(times)), bar_us=IMPORT_BAR)


OPERATIONS: tuple[Callable[[], Iterator[Row]], ...] = (
    decode_without_completion,
    decode_with_publication,
    allocate_prompt,
    match_prompt,
    shared_hit,
    fork,
    evict,
    device_table,
    build,
    import_package,
)
