"""What explanations cost where they are recorded: the same operations with and without them, in one run."""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import BLOCK_SIZE, FULL, HYBRID, NUM_BLOCKS, admit, allocated, prompt
from pagedkv import BlockSpace, GroupSpec, MissCause, PrefixHit, RequestKeys, SpaceConfig

__all__ = ["OPERATIONS"]

NUM_REQUESTS = 64
NUM_RUNS = 30
NUM_TOKENS = 1024
NUM_EVICTED = 4096


def admissions_with_explanations() -> Iterator[Row]:
    """Admit requests that hit 1,000 tokens and go on otherwise, with and without the record of why."""
    for groups, name in ((FULL, "one group"), (HYBRID, "full + window 1,024")):
        for keys, said in ((RequestKeys(), ""), (RequestKeys(salt=b"tenant"), ", with a salt")):
            for is_recorded, how in ((False, "not explained"), (True, "explained")):
                timing = _admissions(groups, keys, is_recorded=is_recorded)
                yield Row(f"allocate 1,108 tokens{said}, {name}; {how}", timing, "request")


def _admissions(groups: tuple[GroupSpec, ...], keys: RequestKeys, *, is_recorded: bool) -> Timing:
    prompts = [_leaving_prompt(seed) for seed in range(1, NUM_REQUESTS + 1)]
    space = _new_space(groups, is_recorded=is_recorded)
    rows: list[int] = []

    def admit_all() -> None:
        rows.extend([allocated(space.allocate(each, keys=keys)).row for each in prompts])

    def empty() -> None:
        space.free(rows)
        rows.clear()
        space.reset_prefix_cache()
        _cache_prompt(space)

    admit_all()
    if is_recorded and not keys.salt:  # later the same prompts were there before, and called off
        assert space.explanation(rows[0]).cause is MissCause.CHANGED_TOKENS
    whole = timed(admit_all, before=empty, num_runs=NUM_RUNS)
    space.check()
    return whole.divided_by(NUM_REQUESTS)


def records() -> Iterator[Row]:
    """Record why hits of 1,008 tokens end, and nothing else of an admission."""
    for groups, name in ((FULL, "one group"), (HYBRID, "full + window 1,024")):
        space = _new_space(groups, is_recorded=True)
        hits = [space.match(_leaving_prompt(seed)) for seed in range(1, NUM_REQUESTS + 1)]
        assert {hit.num_tokens for hit in hits} == {NUM_TOKENS - 16}
        timing = timed(partial(_record_all, space, hits), num_runs=NUM_RUNS).divided_by(NUM_REQUESTS)
        yield Row(f"record why a hit of 1,008 tokens ends, {name}", timing, "request")


def _record_all(space: BlockSpace, hits: Sequence[PrefixHit]) -> None:
    state: Any = space._state  # noqa: SLF001 - a part of an operation
    for row, hit in enumerate(hits):
        if hasattr(state, "explanations"):
            import_module("pagedkv.space.explaining").record_explanation(state, state.explanations, row, hit)
        else:  # a commit of before
            state.observers.all[0].admitting(row, hit)


def questions_why() -> Iterator[Row]:
    """Explain why a prompt misses, in a pool of 100,000 blocks."""
    for is_recorded, how in ((False, "no ghosts"), (True, "ghosts kept")):
        space, asked = _new_space(FULL, is_recorded=is_recorded), _leaving_prompt(seed=1)
        assert space.explain(asked).cause is MissCause.CHANGED_TOKENS
        yield Row(f"explain a prompt of 1,108 tokens; {how}", timed(partial(space.explain, asked), num_runs=NUM_RUNS))


def evictions_with_ghosts() -> Iterator[Row]:
    """Allocate with eviction in a pool full of cached blocks, with and without ghosts."""
    for is_recorded, how in ((False, "no ghosts"), (True, "ghosts kept")):
        yield Row(f"serve a prompt that evicts 4,096 blocks; {how}", _evictions(is_recorded=is_recorded), "block")


def _evictions(*, is_recorded: bool) -> Timing:
    space = BlockSpace(SpaceConfig(FULL, num_blocks=1 + 2 * NUM_EVICTED, max_sequences=4, explain=is_recorded))
    seeds = iter(range(10_000))

    def serve() -> None:
        space.free(admit(space, prompt(BLOCK_SIZE * NUM_EVICTED, next(seeds))))

    whole = timed(serve, num_runs=10)
    space.check()
    return whole.divided_by(NUM_EVICTED)


def _leaving_prompt(seed: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Make a prompt that leaves the cached one behind 1,008 tokens."""
    return np.append(prompt(NUM_TOKENS - 16), prompt(100, seed)).astype(np.int32)


def _new_space(groups: tuple[GroupSpec, ...], *, is_recorded: bool) -> BlockSpace:
    space = BlockSpace(SpaceConfig(groups, num_blocks=NUM_BLOCKS, max_sequences=NUM_REQUESTS, explain=is_recorded))
    _cache_prompt(space)
    return space


def _cache_prompt(space: BlockSpace) -> None:
    space.free(admit(space, prompt(NUM_TOKENS)))


OPERATIONS = (admissions_with_explanations, records, questions_why, evictions_with_ghosts)
