"""Misses by cause: every cause counts somewhere, and what a slow trace misses is what a dictionary says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.answers import Miss, MissCause
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import MISS_KINDS, MissMeter

BLOCK = 4


@pytest.mark.parametrize("cause", MissCause)
def test_every_cause_counts_in_one_kind(cause: MissCause) -> None:
    meter = MissMeter()
    meter.note([Miss(3, 10, cause)])
    counted = meter.as_dict()
    assert counted["num_tokens"] == 7
    by_cause = counted["by_cause"]
    assert isinstance(by_cause, dict)
    assert sorted(by_cause.values()) == [0] * (len(MISS_KINDS) - 1) + [7]
    assert tuple(by_cause) == MISS_KINDS


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12)


@pytest.mark.interpreted
@settings(deadline=None, max_examples=30)
@given(prompts=prompts, num_blocks=st.integers(7, 30))
def test_one_after_the_other_what_was_seen_and_does_not_hit_was_lost_to_capacity(
    prompts: list[list[int]], num_blocks: int
) -> None:
    """Of the full blocks before the last token, those that a request before had are capacity's, or hit."""
    config = replace(ServingConfig(num_blocks=num_blocks, block_size=BLOCK), max_sequences=4)
    server = VirtualServer(config, CostModel())
    seen: set[tuple[int, ...]] = set()
    num_seen = num_unseen = num_short = 0
    for number, prompt in enumerate(prompts):
        tokens = np.array(prompt, np.int32)
        server.offer(TokenizedRequest(1000.0 * number, tokens, np.zeros(1, np.int32)))
        num_full = (len(prompt) - 1) // BLOCK
        num_short += len(prompt) - num_full * BLOCK
        for index in range(num_full):
            if tuple(prompt[: (index + 1) * BLOCK]) in seen:
                num_seen += BLOCK
            else:
                num_unseen += BLOCK
        seen |= {tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    server.finish()
    result = server.result()
    lost = result.misses["by_cause"]
    assert lost["short"] == num_short
    if not lost["unknown"]:
        assert lost["capacity"] == num_seen - result.hits["num_hit_tokens"]
        assert lost["new"] + lost["changed"] == num_unseen
    assert result.misses["num_tokens"] == num_seen + num_unseen + num_short - result.hits["num_hit_tokens"]
