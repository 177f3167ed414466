"""SpaceInspection: its maps agree with the space's own counts, whatever happened; reading changes nothing."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.answers import Allocation
from pagedkv.contract.space_config import SpaceConfig, TenantLimits
from pagedkv.contract.spec import FullAttention, SlidingWindow
from pagedkv.errors import BlockError, ConfigurationError
from pagedkv.space import BlockSpace, BlockState, SpaceInspection

BLOCK = 4
LIMITS = {"a": TenantLimits(), "b": TenantLimits(cap=9)}


def watched(num_blocks: int = 24, tenants: dict[str, TenantLimits] | None = None) -> tuple[BlockSpace, SpaceInspection]:
    groups = (FullAttention(block_size=BLOCK), SlidingWindow(window=6, block_size=BLOCK))
    space = BlockSpace(SpaceConfig(groups, num_blocks, max_sequences=4, max_tokens=64, leases=True, tenants=tenants))
    inspection = SpaceInspection()
    space.observe(inspection)
    return space, inspection


def begin(space: BlockSpace, prompt: list[int], tenant: str | None = None) -> int | None:
    answer = space.allocate(prompt, tenant=tenant)
    if not isinstance(answer, Allocation):
        return None
    space.acknowledge(space.plan_step().step_id)
    return int(answer.row)


def test_states_are_those_of_the_blocks() -> None:
    space, inspection = watched()
    kept, row = begin(space, [*range(9)]), begin(space, [*range(50, 59)])
    assert kept is not None
    assert row is not None
    space.free([row])
    space.lease([*range(50, 59)], 20.0)
    states = inspection.map("device").states
    for state, blocks in ((BlockState.LIVE, space.block_ids(kept)), (BlockState.NULL, [0])):
        assert set(states[blocks]) == {state}
    assert (states == BlockState.LEASED).sum() == inspection.counts("device").num_leased > 0
    leased = int(np.flatnonzero(states == BlockState.LEASED)[0])
    details = inspection.block("device", leased)
    assert (details.state, details.lease_end_s, details.rows) == (BlockState.LEASED, 20.0, ())
    held = inspection.block("device", space.block_ids(kept)[1])
    assert (held.rows, held.parent, held.token_ids.tolist()) == ((kept,), space.block_ids(kept)[0], [4, 5, 6, 7])


def test_hits_are_counted_where_they_end_and_until_the_content_is_lost() -> None:
    space, inspection = watched()
    prompt = [*range(9)]
    for _ in range(3):
        row = begin(space, prompt)
        assert row is not None
        blocks = space.block_ids(row)
        space.free([row])
    assert [inspection.block("device", block).num_hits for block in blocks[:2]] == [0, 2]
    prefixes = inspection.prefixes("device")
    assert prefixes.num_hits.sum() == 2 * len(space.config.groups)
    assert (prefixes.parents < 0).sum() == len(space.config.groups)
    space.reset_prefix_cache()
    assert inspection.block("device", blocks[1]).num_hits == 0
    assert not len(inspection.prefixes("device").block_ids)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abxyfrl"), st.integers(0, 3), st.integers(1, 30)), max_size=25))
def test_maps_agree_with_the_counts(actions: list[tuple[str, int, int]]) -> None:
    space, inspection = watched(tenants=LIMITS)
    rows: list[int] = []
    for action, place, length in actions:
        if action in "abxy" and len(rows) < 4:
            tenant = action if action in "ab" else None
            rows += [
                row for row in [begin(space, [place * 100 + each for each in range(length)], tenant)] if row is not None
            ]
        elif action == "f" and rows:
            space.free([rows.pop(place % len(rows))])
        elif action == "l":
            space.lease([place * 100 + each for each in range(length)], space.now_s + length)
        elif action == "r":
            space.advance(space.now_s + length)
        seen, counts = inspection.map("device"), inspection.counts("device")
        numbers = np.bincount(seen.states, minlength=len(BlockState)).tolist()
        assert numbers == [
            *(1, counts.num_free, counts.num_cached, counts.num_leased, counts.num_live, counts.num_deferred),
            0,  # absent
        ]
        assert counts.num_live == space.num_live_blocks()
        by_tenant = inspection.shares("device")
        taken = np.bincount(seen.tenants[seen.states >= BlockState.LIVE], minlength=3)
        resting = seen.tenants[(seen.states == BlockState.CACHED) | (seen.states == BlockState.LEASED)]
        assert by_tenant.tolist() == np.stack([taken, np.bincount(resting, minlength=3)], axis=1).tolist()
    seen = inspection.map("device")
    assert [inspection.block("device", block).state for block in range(1, 24)] == seen.states[1:].tolist()
    space.check()


def test_foreign_blocks_and_pools_are_refused() -> None:
    _, inspection = watched()
    for block in (-1, 0, 24):
        with pytest.raises(BlockError, match="not one of the blocks"):
            inspection.block("device", block)
    with pytest.raises(ConfigurationError, match="no pool 'other'"):
        inspection.map("other")
