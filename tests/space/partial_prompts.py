"""Spaces and prompts for tests of hits that end inside blocks."""

from pagedkv import BlockSpace, GroupSpec, StepPlan
from tests.space.spaces import new_space, tokens

__all__ = ["copies_of", "leaving", "space_of"]

OTHERS = tokens(20, first=500)


def space_of(*groups: GroupSpec, **settings: object) -> BlockSpace:
    """Blocks of 4 tokens; hits of one token inside a block, by default."""
    return new_space(*groups, **({"min_partial_hit": 1} | settings))  # type: ignore[arg-type]


def leaving(at: int, num_others: int = 8, first: int = 0) -> list[int]:
    """Make a prompt that begins as ``tokens`` does and differs from some position on."""
    return [*range(first, first + at), *OTHERS[:num_others].tolist()]


def copies_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    """Pool, source and destination of a plan's copies."""
    return [
        (part.pool, source, target)
        for part in plan.copies
        for source, target in zip(part.src_ids.tolist(), part.dst_ids.tolist(), strict=True)
    ]
