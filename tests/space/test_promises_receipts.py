"""Promise 29: for each request what was computed, hit, shared, done again and held; the sums equal the statistics."""

import pytest

from pagedkv import (
    Allocation,
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    Receipt,
    RecurrentState,
    SlidingWindow,
)
from pagedkv.errors import ConfigurationError, FreedSequenceError
from tests.space.spaces import acknowledge, allocate, cache, held, new_space, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted


def counted(receipt: Receipt) -> dict[str, int]:
    """What is not zero on a receipt, block steps aside."""
    names = ("computed", "recomputed", "hit", "forked", "swapped_in", "declared", "aborted", "abandoned")
    counts = {name: getattr(receipt, f"num_{name}") for name in names}
    return {name: count for name, count in counts.items() if count}


def require_balance(space: BlockSpace, *freed: Receipt) -> None:
    """The receipts of all rows that live, and these of all that were freed, are the statistics."""
    live = [space.receipt(row) for row in range(16) if space.generation_or_none(row) is not None]
    assert sum([*live, *freed], Receipt()) == space.statistics().receipts
    space.check()


def again(space: BlockSpace, length: int, earlier: Receipt) -> int:
    """Allocate as many tokens for a request that had a life before; return its row."""
    allocation = space.allocate(tokens(length), continues=earlier)
    assert isinstance(allocation, Allocation)
    return allocation.row


# What is counted


def test_nothing_counts_before_its_step_is_acknowledged() -> None:
    space = new_space(receipts=True)
    row = allocate(space, tokens(10))
    plan = space.plan_step()
    assert counted(space.receipt(row)) == {}
    acknowledge(space, plan)
    assert space.receipt(row) == Receipt(num_computed=10, block_steps=(3,))
    require_balance(space)


def test_a_hit_counts_once_when_a_step_relies_on_it() -> None:
    space = new_space(receipts=True)
    cache(space, tokens(10))
    row = allocate(space, tokens(11))
    assert counted(space.receipt(row)) == {}
    for _ in range(2):
        run_step(space)
        assert counted(space.receipt(row)) == {"computed": 3, "hit": 8}


def test_who_computes_has_it_on_its_receipt() -> None:
    """The second row hit what the first was to compute; it falls to the second, for which it is no hit then."""
    space = new_space(receipts=True)
    first, second = allocate(space, tokens(10)), allocate(space, tokens(10))
    (freed,) = space.free(first)
    run_step(space)
    assert counted(freed) == {}
    assert counted(space.receipt(second)) == {"computed": 10}
    require_balance(space, freed)


def test_rows_of_one_step_share_what_one_of_them_computes() -> None:
    space = new_space(receipts=True)
    first, second = allocate(space, tokens(10)), allocate(space, tokens(10))
    run_step(space)
    assert counted(space.receipt(first)) == {"computed": 10}
    assert counted(space.receipt(second)) == {"computed": 2, "hit": 8}


def test_a_fork_was_given_what_it_does_not_compute() -> None:
    space = new_space(receipts=True)
    row = prefill(space, tokens(10))
    used, unused = space.fork(row, 2).tolist()
    space.append([used], [7])
    run_step(space)
    assert counted(space.receipt(used)) == {"computed": 1, "forked": 10}
    assert counted(space.receipt(unused)) == {}
    require_balance(space)


def test_what_a_request_computes_again_is_told() -> None:
    space = new_space(receipts=True)
    row = prefill(space, tokens(10))
    (first,) = space.free(row)
    space.reset_prefix_cache()
    row = again(space, 12, first)
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 12, "recomputed": 10}
    (second,) = space.free(row)
    assert counted(first + second) == {"computed": 22, "recomputed": 10}
    require_balance(space, first, second)


def test_what_hits_again_is_not_computed_again() -> None:
    space = new_space(receipts=True)
    row = prefill(space, tokens(10))
    (first,) = space.free(row)
    row = again(space, 12, first)
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 4, "recomputed": 2, "hit": 8}


def test_chunks_of_a_continued_prompt_are_computed_again_as_far_as_it_had_come() -> None:
    space = new_space(receipts=True, prefix_caching=False)
    (first,) = space.free(prefill(space, tokens(10)))
    row = again(space, 6, first)
    run_step(space)
    space.append(row, tokens(8, first=6))
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 14, "recomputed": 10}
    (second,) = space.free(row)
    assert second.num_reached == 14


def test_a_life_that_came_less_far_does_not_hide_the_one_before() -> None:
    space = new_space(receipts=True, prefix_caching=False)
    (first,) = space.free(prefill(space, tokens(10)))
    (second,) = space.free(again(space, 10, first))
    assert (counted(second), second.num_reached) == ({}, 10)


def test_tokens_in_place_of_others_that_were_rolled_back_are_not_computed_again() -> None:
    space = new_space(receipts=True)
    row = prefill(space, tokens(10))
    space.append(row, [1, 2, 3], num_draft=2)
    run_step(space)
    space.truncate(row, [11])
    space.append(row, [4, 5, 6])
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 16}


def test_a_row_that_is_rolled_back_in_flight_was_computed_all_the_same() -> None:
    space = new_space(receipts=True)
    row = allocate(space, tokens(10))
    plan = space.plan_step()
    space.truncate(row, [6])
    acknowledge(space, plan)
    assert counted(space.receipt(row)) == {"computed": 10}
    assert space.receipt(row).num_reached == 6


@pytest.mark.parametrize("is_late", [False, True])
def test_refused_drafts_were_computed_and_what_follows_is_not_computed_again(*, is_late: bool) -> None:
    """Whether they are known to be refused before their step is acknowledged, or after."""
    space = new_space(receipts=True)
    row = prefill(space, tokens(5))
    space.append([row], None, [4])
    first = space.plan_step()
    space.fill([row], [7])
    space.append([row], None, [4])
    second = space.plan_step()
    if is_late:
        acknowledge(space, first)
    space.fill([row], [8, 9], [2])
    acknowledge(space, *([second] if is_late else [first, second]))
    space.truncate([row], [8])
    space.append([row], [1, 2, 3], [3])
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 16}
    require_balance(space)


def test_swapping_in_counts_for_the_host_when_the_row_goes_on() -> None:
    space = new_space(receipts=True, num_host_blocks=20)
    row = prefill(space, tokens(10))
    space.swap_out(row)
    run_step(space)
    space.swap_in(row)
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 10}
    space.append(row, [1])
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 11, "swapped_in": 10}
    assert space.receipt(row).block_steps == (9,)
    assert space.receipt(row).host_block_steps == (3,)
    require_balance(space)


def test_a_step_from_before_a_swap_does_not_count_the_swap() -> None:
    space = new_space(receipts=True, num_host_blocks=20)
    row = prefill(space, tokens(10))
    space.append(row, [1])
    computing = space.plan_step()
    space.swap_out(row)
    leaving = space.plan_step()
    space.swap_in(row)
    returning = space.plan_step()
    acknowledge(space, computing, leaving, returning)
    assert counted(space.receipt(row)) == {"computed": 11}
    space.append(row, [2])
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 12, "swapped_in": 11}


def test_aborted_work_is_a_line_of_its_own() -> None:
    space = new_space(receipts=True)
    (other,) = space.free(prefill(space, tokens(8)))
    row = allocate(space, tokens(11))
    plan = space.plan_step()
    space.append(row, [1])
    space.plan_step()
    space.abort(plan.step_id)
    assert counted(space.receipt(row)) == {"aborted": 4}
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 4, "hit": 8, "aborted": 4}
    require_balance(space, other)


def test_a_lost_row_keeps_its_receipt_until_it_is_freed() -> None:
    space = new_space(receipts=True)
    row = prefill(space, tokens(10))
    space.invalidate_memory()
    run_step(space)
    assert space.receipt(row) == Receipt(num_computed=10, block_steps=(6,))
    (freed,) = space.free(row)
    row = again(space, 10, freed)
    run_step(space)
    assert counted(space.receipt(row)) == {"computed": 10, "recomputed": 10}
    require_balance(space, freed)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_what_is_in_flight_when_a_row_is_freed_is_abandoned(*, is_aborted: bool) -> None:
    space = new_space(receipts=True)
    row = allocate(space, tokens(10))
    plan = space.plan_step()
    (freed,) = space.free(row)
    other = allocate(space, tokens(3, first=50))
    assert other == row
    if is_aborted:
        space.abort(plan.step_id)
    else:
        acknowledge(space, plan)
    assert counted(freed) == {"abandoned": 10}
    assert counted(space.receipt(other)) == {}
    require_balance(space, freed)


def test_what_is_declared_is_a_line_of_its_own() -> None:
    space = new_space(receipts=True)
    (other,) = space.free(prefill(space, tokens(4)))
    row = allocate(space, tokens(10))
    plan = space.plan_step()
    space.append(row, [1, 2])
    space.mark_computed(row)
    acknowledge(space, plan)
    assert counted(space.receipt(row)) == {"declared": 8}
    space.append(row, [3])
    run_step(space)
    assert counted(space.receipt(row)) == {"declared": 8, "computed": 1, "hit": 4}
    (freed,) = space.free(row)
    assert freed.num_reached == 13
    require_balance(space, other, freed)


# What is held


def test_every_acknowledged_step_charges_every_row_for_the_blocks_in_its_tables() -> None:
    space = new_space(receipts=True, num_host_blocks=20)
    row = prefill(space, tokens(10))
    (child,) = space.fork(row).tolist()
    idle = allocate(space, tokens(3, first=50), num_lookahead=6)
    plan = space.plan_step()
    acknowledge(space, plan)
    assert [space.receipt(each).block_steps for each in (row, child, idle)] == [(6,), (3,), (3,)]
    space.abort(space.plan_step().step_id)
    assert space.receipt(row).block_steps == (6,)
    require_balance(space)


def test_entries_that_a_window_gave_back_are_not_charged_but_sinks_are() -> None:
    groups = (
        FullAttention(4, pool="full"),
        SlidingWindow(4, 2, num_sink_tokens=3, pool="others"),
        ChunkedLocal(8, 4, pool="others"),
        RecurrentState(8, pool="states"),
    )
    space = new_space(*groups, num_blocks={"full": 20, "others": 40, "states": 9}, receipts=True)
    row = prefill(space, tokens(15))
    pools = ("full", "others", "others", "states")
    expected = dict(zip(("full", "others", "states"), space.receipt(row).block_steps, strict=True))
    for token in range(5):
        space.append(row, [token])
        for group, pool in enumerate(pools):
            expected[pool] += len(held(space, row, group))
        run_step(space)
        assert space.receipt(row).block_steps == tuple(expected.values())
    assert 0 in space.block_ids(row, 1)
    assert space.block_ids(row, 1)[0] > 0
    require_balance(space)


def test_only_pools_with_a_host_pool_have_a_line_for_it() -> None:
    groups = FullAttention(4, pool="first"), FullAttention(4, pool="second")
    blocks = {"first": 20, "second": 20}
    space = new_space(*groups, num_blocks=blocks, num_host_blocks={"first": 0, "second": 9}, receipts=True)
    row = prefill(space, tokens(6))
    assert space.receipt(row) == Receipt(num_computed=6, block_steps=(2, 2), host_block_steps=(0,))
    assert [pool.name for pool in space.statistics().host_pools] == ["second"]


# Receipts as values, and none at all


def test_receipts_add_up() -> None:
    first = Receipt(1, 2, 3, 4, 5, 6, 7, 8, (9, 10), (11,), num_reached=5)
    second = Receipt(10, 20, 30, 40, 50, 60, 70, 80, (90, 100), (110,), num_reached=3)
    both = Receipt(11, 22, 33, 44, 55, 66, 77, 88, (99, 110), (121,))
    assert first + second == both
    assert (first + second).num_reached == 5
    assert sum([first, second], Receipt()) == both
    assert first.hits_by_medium == {"device": 3}


def test_hits_by_medium_add_up() -> None:
    first = Receipt(num_hit=40, num_loaded={"host": 10, "disk": 5})
    second = Receipt(num_hit=7, num_loaded={"disk": 7})
    both = first + second
    assert both.num_loaded == {"host": 10, "disk": 12}
    assert both.hits_by_medium == {"device": 25, "host": 10, "disk": 12}
    assert sum(both.hits_by_medium.values()) == both.num_hit
    assert sum([second, first], Receipt()).num_loaded == both.num_loaded
    with pytest.raises(TypeError):
        first + 1  # type: ignore[operator]


def test_without_receipts_nothing_is_kept() -> None:
    space = new_space()
    row = prefill(space, tokens(10))
    assert space.statistics().receipts is None
    with unchanged(space), pytest.raises(ConfigurationError, match="no receipts are kept: set receipts=True"):
        space.receipt(row)
    with unchanged(space), pytest.raises(ConfigurationError, match="no receipts are kept, so none continues"):
        space.allocate(tokens(10), continues=Receipt())
    assert space.free(row) == ()


def test_misuse_is_told() -> None:
    space = new_space(receipts=True)
    row = prefill(space, tokens(10))
    with unchanged(space), pytest.raises(ConfigurationError, match="continues must be a receipt"):
        space.allocate(tokens(10), continues=10)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="receipts must be True or False"):
        new_space(receipts=1)  # type: ignore[arg-type]
    space.free(row)
    with unchanged(space), pytest.raises(FreedSequenceError):
        space.receipt(row)


def test_a_shortage_leaves_receipts_as_they_are() -> None:
    space = new_space(num_blocks=4, receipts=True)
    row = prefill(space, tokens(10))
    receipt = space.receipt(row)
    with unchanged(space):
        assert not isinstance(space.allocate(tokens(10, first=50), continues=receipt), Allocation)
    assert space.receipt(row) == receipt


# That they balance is proved by the audit, and by the state machine's model


@pytest.mark.parametrize(("attribute", "line"), [("counts", 0), ("counts", 8), ("closed", 0), ("totals", 3)])
def test_a_receipt_that_does_not_add_up_is_noticed(attribute: str, line: int) -> None:
    space = new_space(receipts=True)
    prefill(space, tokens(10))
    book = space._state.receipts
    assert book is not None
    getattr(book, attribute)[..., line] += 1
    with pytest.raises(AssertionError, match="receipts: line"):
        space.check()


def test_what_waits_for_a_vacant_row_is_noticed() -> None:
    space = new_space(receipts=True)
    space.free(prefill(space, tokens(10)))
    assert space._state.receipts is not None
    space._state.receipts.waiting[0, 0] = 1
    with pytest.raises(AssertionError, match="something waits for a vacant row"):
        space.check()
