"""Independent computations of what a cache hits: lists and sets of block ids, none of pagedkv's code.

They follow the words of the model (:mod:`pagedkv.planner.capacity`), slowly.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

from tests.capacity.prompts import Prompt

__all__ = ["best_hits", "ideal_hits", "leading_run", "lru_hits", "min_hits"]


def leading_run(prompt: Prompt, resident: set[int] | frozenset[int]) -> int:
    """Count the leading blocks of a prompt that are resident."""
    missing = (index for index, block_id in enumerate(prompt) if block_id not in resident)
    return next(missing, len(prompt))


def ideal_hits(trace: Sequence[Prompt]) -> list[int]:
    """Hits of each prompt when nothing is ever evicted."""
    seen: set[int] = set()
    hits = []
    for prompt in trace:
        hits.append(leading_run(prompt, seen))
        seen.update(prompt)
    return hits


def lru_hits(trace: Sequence[Prompt], capacity: int, *, tail_first: bool = True) -> int:
    """Play LRU: a list of resident blocks, the next to be evicted first."""
    resident: list[int] = []
    num_hits = 0
    for prompt in trace:
        num_hits += leading_run(prompt, set(resident))
        held = prompt[:capacity]
        others = [block_id for block_id in resident if block_id not in held]
        while len(others) + len(held) > capacity:
            del others[0]
        resident = others + (held[::-1] if tail_first else held)
    return num_hits


def min_hits(trace: Sequence[Prompt], capacity: int) -> int:
    """Play Belady's MIN with bypass: keep what is used next soonest, the deeper block out first on ties."""
    resident: set[int] = set()
    num_hits = 0
    for number, prompt in enumerate(trace):
        num_hits += leading_run(prompt, resident)
        next_uses = {
            block_id: (later, following.index(block_id))
            for later, following in reversed(list(enumerate(trace[number + 1 :])))
            for block_id in following
        }
        wanted = [block_id for block_id in resident | set(prompt) if block_id in next_uses]
        resident = set(sorted(wanted, key=next_uses.__getitem__)[:capacity])
    return num_hits


def best_hits(trace: Sequence[Prompt], capacity: int, *, must_hold: bool) -> int:
    """Try every way to keep blocks, and return the most hits that there can be.

    Nothing is assumed of what is kept but that it was there: not that it is prefixes. With ``must_hold``, the first
    blocks of a prompt, as many as fit, must be kept.
    """

    @cache
    def best_from(number: int, resident: frozenset[int]) -> int:
        if number == len(trace):
            return 0
        hits = leading_run(trace[number], resident)
        return hits + max(best_from(number + 1, kept) for kept in choices(trace[number], resident))

    def choices(prompt: Prompt, resident: frozenset[int]) -> Iterator[frozenset[int]]:
        held = frozenset(prompt[:capacity]) if must_hold else frozenset()
        others = (resident | set(prompt)) - held
        num_others = min(capacity - len(held), len(others))  # to keep less is never better
        return (held | set(kept) for kept in combinations(sorted(others), num_others))

    return best_from(0, frozenset())
