"""What explanations cost where they are recorded: the same operations with and without them, in one run."""

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Row, timed
from benchmarks.operations import FULL, HYBRID, NUM_BLOCKS, prompt, run_step
from pagedkv import Allocation, BlockSpace, GroupSpec, MissCause, RequestKeys, SpaceConfig

__all__ = ["OPERATIONS"]

NUM_REQUESTS = 64
NUM_RUNS = 30
NUM_TOKENS = 1024


def _new_space(groups: tuple[GroupSpec, ...], *, is_recorded: bool) -> BlockSpace:
    config = SpaceConfig(groups, num_blocks=NUM_BLOCKS, max_sequences=NUM_REQUESTS, explain=is_recorded)
    space = BlockSpace(config)
    admitted = space.allocate(prompt(NUM_TOKENS))
    assert isinstance(admitted, Allocation)
    run_step(space)
    space.free(admitted.row)
    return space


def admissions_with_explanations() -> Iterator[Row]:
    """Admit requests that hit 1,000 tokens and go on otherwise, with and without the record of why."""
    prompts = [np.append(prompt(NUM_TOKENS - 16), prompt(100, seed)) for seed in range(1, NUM_REQUESTS + 1)]
    for groups, name in ((FULL, "one group"), (HYBRID, "full + window 1,024")):
        for keys, said in ((RequestKeys(), ""), (RequestKeys(salt=b"tenant"), ", with a salt")):
            for is_recorded in (False, True):
                space = _new_space(groups, is_recorded=is_recorded)
                rows: list[int] = []

                def admit() -> None:
                    for each in prompts:
                        rows.append(space.allocate(each, keys=keys).row)  # type: ignore[union-attr]  # noqa: B023, PERF401 - called at once

                def empty() -> None:
                    space.free(rows)  # noqa: B023 - as above
                    rows.clear()  # noqa: B023 - as above
                    space.reset_prefix_cache()  # noqa: B023 - as above
                    first = space.allocate(prompt(NUM_TOKENS))  # noqa: B023 - as above
                    run_step(space)  # noqa: B023 - as above
                    space.free(first.row)  # type: ignore[union-attr]  # noqa: B023 - as above

                timing = timed(admit, before=empty, num_runs=NUM_RUNS)
                if is_recorded:
                    told = space.explanation(rows[0]).cause
                    assert told is MissCause.CHANGED_TOKENS or keys.salt
                space.check()
                how = "explained" if is_recorded else "not explained"
                yield Row(f"allocate 1,108 tokens{said}, {name}; {how}", timing.divided_by(NUM_REQUESTS), "request")


def questions_why() -> Iterator[Row]:
    """Ask why a prompt misses, in a pool of 100,000 blocks."""
    for is_recorded in (False, True):
        space = _new_space(FULL, is_recorded=is_recorded)
        asked = np.append(prompt(NUM_TOKENS - 16), prompt(100, 1))
        assert space.explain(asked).cause is MissCause.CHANGED_TOKENS
        how = "ghosts kept" if is_recorded else "no ghosts"
        yield Row(f"explain a prompt of 1,108 tokens; {how}", timed(lambda: space.explain(asked), num_runs=NUM_RUNS))  # noqa: B023 - called at once


def evictions_with_ghosts() -> Iterator[Row]:
    """Allocate with eviction in a pool full of cached blocks, with and without ghosts."""
    for is_recorded in (False, True):
        space = BlockSpace(SpaceConfig(FULL, num_blocks=1 + 8192, max_sequences=4, explain=is_recorded))
        seeds = iter(range(10_000))

        def serve() -> None:
            answer = space.allocate(prompt(65_536, next(seeds)))  # noqa: B023 - called at once
            run_step(space)  # noqa: B023 - as above
            space.free(answer.row)  # type: ignore[union-attr]  # noqa: B023 - as above

        timing = timed(serve, num_runs=10)
        space.check()
        how = "ghosts kept" if is_recorded else "no ghosts"
        yield Row(f"serve a prompt that evicts 4,096 blocks; {how}", timing.divided_by(4096), "block")


OPERATIONS = (admissions_with_explanations, questions_why, evictions_with_ghosts)
