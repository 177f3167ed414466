"""Small traces as lists of prompts, drawn at random, and as the library reads them."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from hypothesis import strategies as st

from pagedkv.planner.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.planner.traces.request import Request

__all__ = ["Prompt", "prompts", "references_of", "request_of"]

Prompt: TypeAlias = list[int]


@st.composite
def prompts(draw: st.DrawFn, max_prompts: int = 12, max_blocks: int = 5) -> list[Prompt]:
    """Draw prompts as paths in a small tree, so that equal ids mean equal prefixes; at least one has a block."""
    path = st.lists(st.integers(0, 1), max_size=max_blocks)
    paths = draw(st.lists(path, min_size=1, max_size=max_prompts).filter(any_blocks))
    ids: dict[tuple[int, ...], int] = {}
    spread = draw(st.sampled_from([1, 7, 2**40]))
    return [[spread * ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path))] for path in paths]


def any_blocks(paths: list[list[int]]) -> bool:
    return any(map(len, paths))


def request_of(block_ids: Prompt, input_length: int | None = None, block_size: int = 1) -> Request:
    """Make a request of full blocks, or of so many tokens."""
    length = len(block_ids) * block_size if input_length is None else input_length
    return Request(0.0, length, 0, np.array(block_ids, np.int64), block_size)


def references_of(trace: Sequence[Prompt]) -> BlockReferences:
    """Collect the references of prompts of full blocks of one token."""
    collector = ReferenceCollector("trace")
    for prompt in trace:
        collector.add(request_of(prompt))
    return collector.references()
