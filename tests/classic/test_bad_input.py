"""What bad input gets at the classic door: an error of ours, and nothing changed (promise 5)."""

from collections.abc import Callable

import pytest

from pagedkv import BlockSpaceManager, BlockTable, FullAttention, Sequence, SequenceGroup, SpaceConfig
from pagedkv.errors import (
    FreedSequenceError,
    OutOfBlocksError,
    PagedKVError,
    SequenceError,
    TooManySequencesError,
    UnknownSequenceError,
)
from tests.space.spaces import new_space, run_step, unchanged

Action = Callable[[BlockSpaceManager], object]


def refused(action: Action, error: type[PagedKVError], message: str, manager: BlockSpaceManager) -> None:
    """Assert that an action raises exactly this error, with this message, and changes nothing."""
    with unchanged(manager.space), pytest.raises(error, match=message) as caught:
        action(manager)
    assert type(caught.value) is error


def new_manager(num_host_blocks: int = 0) -> tuple[BlockSpaceManager, Sequence, SequenceGroup]:
    """A manager that serves one sequence of 6 tokens, number 5, and a group around it."""
    config = SpaceConfig((FullAttention(4),), 6, num_host_blocks, max_sequences=3, max_tokens=40, watermark=0)
    manager = BlockSpaceManager(config)
    seq = Sequence(5, list(range(6)))
    group = SequenceGroup("request 1", [seq])
    manager.allocate(group)
    run_step(manager.space)
    return manager, seq, group


UNKNOWN = Sequence(77, [1, 2, 3])
OF_A_STRANGER: dict[str, Action] = {
    "append_slots": lambda manager: manager.append_slots(UNKNOWN),
    "can_append_slots": lambda manager: manager.can_append_slots(SequenceGroup("x", [UNKNOWN])),
    "fork": lambda manager: manager.fork(UNKNOWN, Sequence(78, [1, 2, 3])),
    "free": lambda manager: manager.free(UNKNOWN),
    "can_swap_out": lambda manager: manager.can_swap_out(SequenceGroup("x", [UNKNOWN])),
    "swap_out": lambda manager: manager.swap_out(SequenceGroup("x", [UNKNOWN])),
    "can_swap_in": lambda manager: manager.can_swap_in(SequenceGroup("x", [UNKNOWN])),
    "swap_in": lambda manager: manager.swap_in(SequenceGroup("x", [UNKNOWN])),
    "access_all_blocks_in_seq": lambda manager: manager.access_all_blocks_in_seq(UNKNOWN, 0.0),
    "get_block_table": lambda manager: manager.get_block_table(UNKNOWN),
    "mark_blocks_as_computed": lambda manager: manager.mark_blocks_as_computed(SequenceGroup("x", [UNKNOWN])),
    "get_common_computed_block_ids": lambda manager: manager.get_common_computed_block_ids([UNKNOWN]),
}


@pytest.mark.parametrize("action", OF_A_STRANGER.values(), ids=OF_A_STRANGER.keys())
def test_a_sequence_that_was_never_allocated_is_refused(action: Action) -> None:
    manager, _, _ = new_manager()
    refused(action, UnknownSequenceError, "sequence 77 is unknown: never allocated, or freed already", manager)


def test_a_sequence_freed_twice_is_refused() -> None:
    manager, seq, _ = new_manager()
    manager.free(seq)
    refused(lambda manager: manager.free(seq), UnknownSequenceError, "sequence 5 is unknown", manager)


def test_a_sequence_allocated_twice_is_refused() -> None:
    manager, seq, group = new_manager()
    message = "sequence 5 of request request 1 is allocated already"
    refused(lambda manager: manager.allocate(group), SequenceError, message, manager)
    refused(lambda manager: manager.can_allocate(group), SequenceError, message, manager)
    refused(lambda manager: manager.fork(seq, seq), SequenceError, "sequence 5 is allocated already", manager)


@pytest.mark.parametrize(
    ("seqs", "message"),
    [
        ([], "request new has no sequences"),
        ([Sequence(1, [1]), Sequence(1, [1])], r"names a sequence twice: \[1, 1\]"),
        ([Sequence(1, [1]), Sequence(2, [2])], "must share one prompt"),
    ],
    ids=["empty", "one twice", "two prompts"],
)
def test_a_group_that_is_none_is_refused(seqs: list[Sequence], message: str) -> None:
    manager, _, _ = new_manager()
    refused(lambda manager: manager.allocate(SequenceGroup("new", seqs)), SequenceError, message, manager)


def test_a_sequence_that_has_become_shorter_is_refused() -> None:
    manager, seq, _ = new_manager()
    del seq.token_ids[3:]
    message = "sequence 5 has 3 tokens, 6 were known: truncate its table"
    refused(lambda manager: manager.append_slots(seq), SequenceError, message, manager)


def test_classic_actions_that_were_not_asked_for_raise_when_blocks_are_short() -> None:
    """Two blocks of five are held."""
    manager, seq, _ = new_manager(num_host_blocks=2)
    large = SequenceGroup("large", [Sequence(6, list(range(100, 113)))])
    message = "pool 'device' has 3 free blocks, 4 are needed"
    refused(lambda manager: manager.allocate(large), OutOfBlocksError, f"request large: {message}", manager)
    seq.token_ids += range(50, 65)
    refused(lambda manager: manager.append_slots(seq), OutOfBlocksError, f"sequence 5: {message}", manager)


def test_swapping_a_group_into_a_host_pool_that_is_too_small_is_refused() -> None:
    manager, _, group = new_manager(num_host_blocks=2)
    message = r"request request 1: pool 'device \(host\)' has 1 free blocks, 2 are needed"
    refused(lambda manager: manager.swap_out(group), OutOfBlocksError, message, manager)


def test_a_group_with_more_sequences_than_rows_is_refused_before_anything_is_evicted() -> None:
    manager, seq, _ = new_manager()
    manager.free(seq)
    group = SequenceGroup("wide", [Sequence(number, list(range(100, 120))) for number in range(4)])
    refused(lambda manager: manager.allocate(group), TooManySequencesError, "max_sequences = 3", manager)


# The view of one sequence

STALE: dict[str, Callable[[BlockTable], object]] = {
    "free": lambda table: table.free(),
    "fork": lambda table: table.fork(),
    "truncate": lambda table: table.truncate(1),
    "append_token_ids": lambda table: table.append_token_ids([4]),
    "physical_block_ids": lambda table: table.physical_block_ids,
}


@pytest.mark.parametrize("use", STALE.values(), ids=STALE.keys())
def test_a_stale_table_is_refused(use: Callable[[BlockTable], object]) -> None:
    space = new_space()
    table = BlockTable.allocate(space, [1, 2, 3])
    table.free()
    with unchanged(space), pytest.raises(FreedSequenceError, match="the sequence that had row 0 was freed"):
        use(table)


@pytest.mark.parametrize(("block_size", "num_lookahead"), [(0, 0), (-4, 0), (4, -1)])
def test_impossible_sizes_of_a_table_are_refused(block_size: int, num_lookahead: int) -> None:
    with pytest.raises(PagedKVError, match=str(min(block_size, num_lookahead))):
        BlockTable.get_num_required_blocks([1, 2], block_size, num_lookahead)


def test_a_row_freed_through_the_other_door_is_unknown_to_the_manager() -> None:
    manager, first, _ = new_manager()
    second = Sequence(1, [3, 4])
    table = manager.block_table(first)
    manager.space.free(manager.row_of(first))
    manager.allocate(SequenceGroup("second", [second]))
    with unchanged(manager.space):
        with pytest.raises(UnknownSequenceError):
            manager.free(first)
        with pytest.raises(FreedSequenceError):
            table.append_token_ids([5])


def test_a_child_must_begin_with_its_parents_tokens() -> None:
    manager, parent, _ = new_manager()
    child = Sequence(1, [9, 1, 2, 3, 4, 5])
    refused(lambda manager: manager.fork(parent, child), SequenceError, "does not begin with the 6 tokens", manager)
