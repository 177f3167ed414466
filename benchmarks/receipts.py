"""What receipts cost where they are kept: the same operations with and without them, in one run."""

from collections.abc import Iterator

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import BLOCK_SIZE, FULL, HYBRID, NUM_BLOCKS, batch_of, prompt, run_step
from pagedkv import BlockSpace, GroupSpec, Receipt, SpaceConfig

__all__ = ["OPERATIONS"]

NUM_ROWS = 1024
NUM_RUNS = 14
NUM_WARM_UPS = 2


def decode_with_receipts() -> Iterator[Row]:
    """A decode step of 1,024 sequences with plan and acknowledge, with and without receipts."""
    for groups, name in ((FULL, "one group"), (HYBRID, "full + window 1,024")):
        for receipts in (False, True):
            how = "receipts kept" if receipts else "no receipts"
            timing = _decode_steps(groups, receipts=receipts)
            yield Row(f"decode step with plan and acknowledge, {NUM_ROWS:,} sequences, {name}; {how}", timing, "step")


def _decode_steps(groups: tuple[GroupSpec, ...], *, receipts: bool) -> Timing:
    space = BlockSpace(SpaceConfig(groups, num_blocks=NUM_BLOCKS, max_sequences=NUM_ROWS, receipts=receipts))
    rows = batch_of(space, [96 + index % BLOCK_SIZE for index in range(NUM_ROWS)])
    num_steps = (NUM_RUNS + NUM_WARM_UPS) * BLOCK_SIZE
    todo = iter([prompt(NUM_ROWS, seed) for seed in range(num_steps)])
    before = space.receipt(0).num_computed if receipts else 0

    def run_steps() -> None:
        for _ in range(BLOCK_SIZE):
            space.append(rows, next(todo))
            run_step(space)

    whole = timed(run_steps, num_runs=NUM_RUNS, num_warm_ups=NUM_WARM_UPS)
    space.check()
    if receipts:
        assert space.receipt(0).num_computed == before + num_steps
        assert sum(map(space.receipt, rows.tolist()), Receipt()) == space.statistics().receipts
    return whole.divided_by(BLOCK_SIZE)


def free_with_receipts() -> Iterator[Row]:
    """Free 1,024 sequences in one call, with and without receipts."""
    for receipts, how in ((False, "no receipts"), (True, "receipts returned")):
        yield Row(f"free {NUM_ROWS:,} sequences of 100 tokens in one call; {how}", _frees(receipts=receipts), "call")


def _frees(*, receipts: bool) -> Timing:
    space = BlockSpace(SpaceConfig(FULL, num_blocks=NUM_BLOCKS, max_sequences=NUM_ROWS, receipts=receipts))
    lengths = [96 + index % BLOCK_SIZE for index in range(NUM_ROWS)]
    rows = [batch_of(space, lengths)]

    def free() -> None:
        space.free(rows.pop())

    def prepare() -> None:
        if not rows:
            space.reset_prefix_cache()
            rows.append(batch_of(space, lengths))

    timing = timed(free, before=prepare, num_runs=10)
    space.check()
    return timing


OPERATIONS = (decode_with_receipts, free_with_receipts)
