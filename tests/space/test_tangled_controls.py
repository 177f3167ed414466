"""Negative controls of tangled rows: faults that were there once, put back one at a time; each must be found again.

The space's own audit would notice some of them first. It is switched off here: what a device finds in its memory, what
plans contain and what is refused must be enough.
"""

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import BlockSpace
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.record import HOLD_STEP, NAME, NULL_BLOCK, PENDING_STEP, REF_COUNT, PoolArrays
from pagedkv.contract.arrays import Int32Array
from pagedkv.space import declaring, drafting, planning, publishing, releasing, swapping
from pagedkv.space.growing import grow_rows, lower_start
from pagedkv.space.rows import MARK, NUM_PLANNED, NUM_TOKENS, RUNNING, STATUS, GroupArrays
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from tests.space.controls import replace_method, require_noticed, require_noticed_in_tangles


def without_audit(space: BlockSpace) -> None:
    """Switch the space's own audit off."""
    replace_method(space, "check", lambda _: lambda: None)


def hand_over_from_the_first(state: SpaceState, row: int, leaving_mark: int) -> None:
    """Let the heir of the last shared block compute all that a row was to compute, wherever its own blocks begin."""
    if state.rows[row, NUM_PLANNED] < state.rows[row, NUM_TOKENS]:
        for group in state.groups:
            _hand_over_in_group(state, group, row, leaving_mark)


def _hand_over_in_group(state: SpaceState, group: Group, row: int, leaving_mark: int) -> None:
    start, num_tokens = int(state.rows[row, group.planned]), int(state.rows[row, NUM_TOKENS])
    records = group.pool.arrays.records
    for index in range((num_tokens - 1) // group.block_size, start // group.block_size - 1, -1):
        block = int(group.arrays.table[row, index])
        is_pending = records[block, PENDING_STEP] == state.open_step
        if block == NULL_BLOCK or not is_pending or records[block, REF_COUNT] == 1:
            continue
        stays = (state.rows[:, STATUS] == RUNNING) & (state.rows[:, MARK] != leaving_mark)
        heirs = np.flatnonzero(stays & (group.arrays.table[:, index] == block))
        if len(heirs):
            lower_start(group.arrays, state.rows, int(heirs[0]), start)
            return
        if records[block, NAME]:
            drop_name(group.pool.arrays, block)


pytestmark = pytest.mark.long  # minutes in all


@pytest.mark.parametrize("mix_name", ["full", "window with sinks", "chunk and full", "state"])
def test_an_heir_that_begins_where_the_row_did_that_left_is_noticed(
    mix_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releasing, "hand_over", hand_over_from_the_first)
    monkeypatch.setattr(swapping, "hand_over", hand_over_from_the_first)
    require_noticed_in_tangles(mix_name, without_audit)


@pytest.mark.parametrize("mix_name", ["full", "window with sinks"])
def test_a_row_that_leaves_without_an_heir_is_noticed(mix_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releasing, "hand_over", lambda *_: None)
    require_noticed_in_tangles(mix_name, without_audit)


@pytest.mark.parametrize("mix_name", ["full"])
def test_a_row_that_swaps_out_what_it_has_not_computed_and_forgets_it_is_noticed(
    mix_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping, "stop_relying", lambda *_: None)
    require_noticed_in_tangles(mix_name, without_audit)


@pytest.mark.parametrize("mix_name", ["full", "chunk and full"])
def test_blocks_that_wait_for_steps_that_never_touch_them_are_noticed(
    mix_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = planning.settle

    def settle_when_all_is_over(state: SpaceState, ledger: StepLedger) -> None:
        if not ledger.in_flight:
            settle(state, ledger)

    monkeypatch.setattr(planning, "settle", settle_when_all_is_over)
    require_noticed_in_tangles(mix_name, without_audit)


@pytest.mark.parametrize("mix_name", ["full", "without caching"])
def test_a_block_that_is_held_for_the_last_of_its_rows_only_is_noticed(mix_name: str) -> None:
    def sabotage(space: BlockSpace) -> None:
        without_audit(space)

        def free_without_holds(free: Callable[..., object]) -> Callable[..., object]:
            def wrapped(rows: object) -> None:
                pools = space._state.all_pools
                holds = [pool.arrays.records[:, HOLD_STEP].copy() for pool in pools]
                free(rows)
                for pool, before in zip(pools, holds, strict=True):
                    is_held = pool.arrays.records[:, REF_COUNT] > 0
                    pool.arrays.records[is_held, HOLD_STEP] = before[is_held]

            return wrapped

        replace_method(space, "free", free_without_holds)

    require_noticed_in_tangles(mix_name, sabotage)


@pytest.mark.parametrize("refusal", ["_require_no_moves", "_require_no_other_computes"])
@pytest.mark.parametrize("mix_name", ["full", "full and window in one pool"])
def test_declaring_computed_what_a_plan_moves_or_another_row_computes_is_noticed(
    mix_name: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declaring, refusal, lambda *_: None)
    require_noticed_in_tangles(mix_name, without_audit)


def test_declaring_a_state_computed_that_the_open_plan_saves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declaring, "_require_no_moves", lambda *_: None)
    require_noticed_in_tangles("state", without_audit)


@pytest.mark.parametrize("mix_name", ["full", "window with sinks"])
def test_slots_that_two_forks_reserve_are_noticed(mix_name: str) -> None:
    def sabotage(space: BlockSpace) -> None:
        without_audit(space)
        state = space._state
        grow = state.loops[grow_rows]

        def grow_without_copies_for_slots(  # noqa: PLR0913, PLR0917 - the arguments of grow
            pool: PoolArrays,
            group: GroupArrays,
            rows: Int32Array,
            batch: Int32Array,
            starts: Int32Array,
            growth: Int32Array,
            tokens: Int32Array,
            num_lookahead: int,
            copies: Int32Array,
            num_draft: int,
        ) -> tuple[int, int]:
            block_size = pool.tokens.shape[1]
            idle = [(row, start) for row, start, count in zip(batch, starts, growth, strict=True) if not count]
            shared = [int(group.table[row, start // block_size]) for row, start in idle if start % block_size]
            references = {block: int(pool.records[block, REF_COUNT]) for block in shared}
            pool.records[shared, REF_COUNT] = 1
            answer = grow(pool, group, rows, batch, starts, growth, tokens, num_lookahead, copies, num_draft)
            for block, count in references.items():
                pool.records[block, REF_COUNT] = count
            return answer

        state.loops[grow_rows] = grow_without_copies_for_slots

    require_noticed(mix_name, sabotage)


@pytest.mark.parametrize("mix_name", ["full", "full and window in one pool"])
def test_a_swap_in_that_leaves_no_room_for_the_next_token_is_noticed(
    mix_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping, "_num_grown", lambda *_: 0)
    require_noticed(mix_name, without_audit)


def test_duplicates_that_nobody_can_find_once_their_carrier_is_gone_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "publish", lambda *_: None)
    require_noticed_in_tangles("full", without_audit)


def test_drafts_that_are_replaced_under_the_name_a_fork_gave_them_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "forget_drafts", lambda *_: None)
    require_noticed_in_tangles("full")


def test_superseded_content_that_goes_by_the_ids_of_its_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releasing, "blocks_of", lambda group, batch: np.unique(group.arrays.table[batch]))
    require_noticed("full", without_audit)
