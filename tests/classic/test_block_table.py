"""BlockTable: one sequence's blocks as an object, in the words of the classic block tables."""

import pytest

from pagedkv import BlockTable, FullAttention, RecurrentState, RequestKeys, SlidingWindow
from pagedkv.errors import OutOfBlocksError, SequenceError, TokenError
from tests.space.spaces import new_space, prefill, run_step, tokens, unchanged


@pytest.mark.interpreted
def test_a_table_grows_with_its_tokens() -> None:
    table = BlockTable.allocate(new_space(), tokens(6))
    assert (table.physical_block_ids, table.num_full_slots) == ([1, 2], 6)
    table.append_token_ids([6, 7])
    assert (table.physical_block_ids, table.num_full_slots) == ([1, 2], 8)
    table.append_token_ids([8], num_lookahead_slots=4)
    assert (table.physical_block_ids, table.num_full_slots) == ([1, 2, 3, 4], 9)


def test_allocation_may_reserve_slots() -> None:
    table = BlockTable.allocate(new_space(), tokens(6), num_lookahead_slots=3)
    assert len(table.physical_block_ids) == 3


def test_allocation_takes_keys() -> None:
    """Another salt shares nothing, the same one the full block."""
    space = new_space()
    ours, theirs, again = (
        BlockTable.allocate(space, tokens(6), keys=RequestKeys(salt=salt)) for salt in (b"ours", b"theirs", b"ours")
    )
    assert not set(ours.physical_block_ids) & set(theirs.physical_block_ids)
    assert again.physical_block_ids[0] == ours.physical_block_ids[0]


@pytest.mark.interpreted
def test_empty_slots_are_ensured_and_given_back() -> None:
    space = new_space()
    table = BlockTable.allocate(space, tokens(6))
    table.ensure_num_empty_slots(2)
    assert len(table.physical_block_ids) == 2
    table.ensure_num_empty_slots(3)
    assert len(table.physical_block_ids) == 3
    assert table.num_full_slots == 6
    table.truncate(6)
    assert len(table.physical_block_ids) == 2
    assert space.num_free_blocks() == 98


def test_what_does_not_fit_raises_and_changes_nothing() -> None:
    space = new_space(num_blocks=4)
    table = BlockTable.allocate(space, tokens(6))
    with unchanged(space):
        with pytest.raises(OutOfBlocksError, match="1 free blocks, 2 are needed"):
            table.append_token_ids(tokens(7))
        with pytest.raises(OutOfBlocksError, match="1 free blocks, 2 are needed"):
            table.ensure_num_empty_slots(10)
        with pytest.raises(OutOfBlocksError, match="1 free blocks, 2 are needed"):
            BlockTable.allocate(space, tokens(8, first=100))


@pytest.mark.interpreted
def test_a_fork_shares_until_one_of_them_writes() -> None:
    space = new_space()
    table = BlockTable.allocate(space, tokens(6))
    run_step(space)
    fork = table.fork()
    assert fork.physical_block_ids == table.physical_block_ids
    fork.append_token_ids([50])
    assert fork.physical_block_ids[0] == table.physical_block_ids[0]
    assert fork.physical_block_ids[1] != table.physical_block_ids[1]
    assert (table.num_full_slots, fork.num_full_slots) == (6, 7)
    table.free()
    fork.free()
    assert space.num_free_blocks() + space.statistics().pools[0].num_deferred == 100
    run_step(space)
    space.check()


def test_unseen_tokens_are_those_that_were_not_appended() -> None:
    table = BlockTable.allocate(new_space(), tokens(6))
    assert table.get_unseen_token_ids(list(range(9))) == [6, 7, 8]
    assert table.get_unseen_token_ids(list(range(6))) == []
    with pytest.raises(SequenceError, match="row 0 holds 6 tokens, the sequence has only 5"):
        table.get_unseen_token_ids(list(range(5)))


@pytest.mark.parametrize(
    ("num_tokens", "num_lookahead", "num_blocks"), [(1, 0, 1), (4, 0, 1), (5, 0, 2), (4, 1, 2), (0, 0, 0), (9, 7, 4)]
)
def test_the_blocks_that_so_many_tokens_take(num_tokens: int, num_lookahead: int, num_blocks: int) -> None:
    assert BlockTable.get_num_required_blocks(tokens(num_tokens), 4, num_lookahead) == num_blocks


@pytest.mark.parametrize(
    ("num_new", "num_lookahead", "num_touched"),
    [(0, 0, 0), (1, 0, 1), (2, 0, 1), (3, 0, 2), (2, 1, 2), (0, 2, 1), (0, 3, 2), (7, 4, 4)],
)
def test_the_blocks_that_appending_would_touch(num_new: int, num_lookahead: int, num_touched: int) -> None:
    """Six tokens in blocks of four: two slots are left in the last one."""
    space = new_space()
    table = BlockTable.allocate(space, tokens(6))
    with unchanged(space):
        touched = table.get_num_blocks_touched_by_append_slots(tokens(num_new), num_lookahead)
    assert touched == num_touched


def test_on_a_block_boundary_only_new_blocks_are_touched() -> None:
    table = BlockTable.allocate(new_space(), tokens(8))
    assert [table.get_num_blocks_touched_by_append_slots(tokens(length)) for length in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("num_lookahead", [0, 1, 3])
@pytest.mark.parametrize("num_new", [0, 1, 3])
def test_a_fork_takes_as_many_new_blocks_as_appending_touches(num_new: int, num_lookahead: int) -> None:
    """All of them are new: the partly filled one is copied, for reserved slots too."""
    space = new_space(FullAttention(4), RecurrentState(4, pool="device"))
    row = prefill(space, tokens(6))
    (child,) = space.fork(row).tolist()
    tables = [BlockTable(space, child, group) for group in (0, 1)]
    touched = [table.get_num_blocks_touched_by_append_slots(tokens(num_new), num_lookahead) for table in tables]
    tables[0].append_token_ids(tokens(num_new), num_lookahead)
    new = [set(space.block_ids(child, group)) - set(space.block_ids(row, group)) for group in (0, 1)]
    assert list(map(len, new)) == touched


def test_a_negative_number_of_slots_is_refused() -> None:
    table = BlockTable.allocate(new_space(), tokens(8))
    with pytest.raises(TokenError, match="-1"):
        table.get_num_blocks_touched_by_append_slots([], -1)


def test_a_table_shows_one_group_and_grows_all() -> None:
    space = new_space(SlidingWindow(4, 4), SlidingWindow(4, 2))
    row = BlockTable.allocate(space, tokens(6)).row
    coarse, fine = BlockTable(space, row), BlockTable(space, row, group=1)
    fine.append_token_ids([6, 7, 8])
    assert [len(table.physical_block_ids) for table in (coarse, fine)] == [3, 5]
    run_step(space)
    assert coarse.physical_block_ids[0] == fine.physical_block_ids[0] == fine.physical_block_ids[1] == 0
