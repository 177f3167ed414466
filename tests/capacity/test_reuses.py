"""Reuses: against the pairs of uses of each block, one by one."""

from collections import Counter

import pytest
from hypothesis import given, settings

from tests.capacity.prompts import Prompt, prompts, references_of


@pytest.mark.interpreted
@settings(deadline=None)
@given(prompts())
def test_rows_count_the_blocks_that_pass_from_one_request_to_the_next(trace: list[Prompt]) -> None:
    last_uses: dict[int, int] = {}
    pairs: Counter[tuple[int, int]] = Counter()
    for request, prompt in enumerate(trace):
        pairs.update((last_uses[block_id], request) for block_id in prompt if block_id in last_uses)
        last_uses.update(dict.fromkeys(prompt, request))
    reuses = references_of(trace).reuses
    rows = list(zip(reuses.earlier.tolist(), reuses.later.tolist(), strict=True))
    assert dict(zip(rows, reuses.num_blocks.tolist(), strict=True)) == pairs
    assert rows == sorted(set(rows), key=lambda row: (row[1], row[0]))
