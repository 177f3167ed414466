"""What leases cost: to be given up, all of them with different ends, to be taken, and when time passes."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import BLOCK_SIZE, FULL, Int32Array, allocated, prompt, run_step
from pagedkv import BlockSpace, SpaceConfig

__all__ = ["OPERATIONS"]

BLOCKS_A_LEASE: Final = 32
SHARED_BLOCKS: Final = 16
FIRST_END_S: Final = 1000.0


def give_leases_up() -> Iterator[Row]:
    """Allocate half of a pool of which all is leased, each sequence until another time."""
    for num_leases in (100, 1_000, 8_000):
        for num_shared, name in ((0, "that share nothing"), (SHARED_BLOCKS, "that share half of their blocks")):
            timing = _give_up(num_leases, num_shared)
            yield Row(f"allocate half of a pool with {num_leases:,} leases {name}", timing, "call")


def keep_leases() -> Iterator[Row]:
    """Free a sequence with a lease beside 1,000 others, and let time pass without an end."""
    space, _ = _leased(1_000, SHARED_BLOCKS, num_spare=4 * BLOCKS_A_LEASE)
    seeds = iter(range(10**6, 10**9))
    rows: list[int] = []

    def admit() -> None:
        rows.append(allocated(space.allocate(prompt(BLOCKS_A_LEASE * BLOCK_SIZE, next(seeds)))).row)
        run_step(space)

    def free(until: float | None) -> None:
        space.free([rows.pop()], keep_until_s=until)

    for until, name in ((None, "without a lease"), (FIRST_END_S + 0.5, "with a lease, beside 1,000")):
        timing = timed(partial(free, until), num_runs=100, before=admit)
        yield Row(f"free a sequence of {BLOCKS_A_LEASE} blocks {name}", timing, "call")
    now_s = iter(np.linspace(1.0, FIRST_END_S / 2, 200).tolist())
    timing = timed(lambda: space.advance(next(now_s)), num_runs=100)
    yield Row("advance the clock beside 1,000 leases, none over", timing, "call")
    space.check()


def _session(number: int, num_shared: int) -> Int32Array:
    """Make the tokens of a session; the first blocks are those of all."""
    shared = prompt(num_shared * BLOCK_SIZE, 10**9)
    return np.concatenate([shared, prompt((BLOCKS_A_LEASE - num_shared) * BLOCK_SIZE, number)])


def _leased(num_leases: int, num_shared: int, num_spare: int = 0) -> tuple[BlockSpace, Int32Array]:
    """Build a pool of which all is leased, but for some spare blocks; return the sessions, the last to end first."""
    num_blocks = num_shared + num_leases * (BLOCKS_A_LEASE - num_shared) + num_spare
    config = SpaceConfig(
        FULL, num_blocks=1 + num_blocks, max_sequences=8, max_tokens=num_blocks * BLOCK_SIZE, watermark=0, leases=True
    )
    space = BlockSpace(config)
    ends = np.random.default_rng(0).permutation(num_leases)
    for number, end in enumerate(ends.tolist()):
        row = allocated(space.allocate(_session(number, num_shared))).row
        run_step(space)
        space.free([row], keep_until_s=FIRST_END_S + end)
    assert space.num_cached_blocks() == num_blocks - num_spare
    return space, np.argsort(-ends).astype(np.int32)


def _give_up(num_leases: int, num_shared: int) -> Timing:
    space, order = _leased(num_leases, num_shared)
    num_half = num_leases // 2 * (BLOCKS_A_LEASE - num_shared)
    tokens = prompt(num_half * BLOCK_SIZE, 10**8)
    spaces = [space]

    def rebuild() -> None:
        if not spaces:
            spaces.append(_leased(num_leases, num_shared)[0])

    def run() -> None:
        nonlocal space
        space = spaces.pop()
        allocated(space.allocate(tokens))

    timing = timed(run, num_runs=3 if num_leases > 1_000 else 5, before=rebuild, num_warm_ups=1)
    sizes = [space.match(np.append(_session(number, num_shared), 0)).num_tokens for number in order.tolist()]
    num_kept = num_shared * BLOCK_SIZE
    assert sizes[: num_leases // 2] == [num_kept] * (num_leases // 2), "a lease that ends late was kept"
    assert sizes[num_leases // 2 :] == [BLOCKS_A_LEASE * BLOCK_SIZE] * (num_leases - num_leases // 2)
    space.check()
    return timing


OPERATIONS = (give_leases_up, keep_leases)
