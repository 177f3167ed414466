"""Lookahead slots of a group: every sequence has its own, counted exactly, given whole or not at all."""

from itertools import product

import pytest

from pagedkv import AllocStatus, BlockSpaceManager, FullAttention, SequenceGroup, SlidingWindow, SpaceConfig
from pagedkv.errors import OutOfBlocksError
from tests.classic.device import Device
from tests.classic.managers import new_group
from tests.space.spaces import unchanged

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER
BLOCK_SIZE = 4
CASES = [pytest.param(*case, id="-".join(map(str, case))) for case in product((1, 2, 3), (3, 4, 5, 8), (0, 1, 3, 8))]
cases = pytest.mark.parametrize(("num_sequences", "num_tokens", "num_lookahead"), CASES)


def manager_with(num_blocks: int, num_groups: int = 1) -> BlockSpaceManager:
    """A manager that has so many blocks to give."""
    groups = FullAttention(BLOCK_SIZE), SlidingWindow(8, BLOCK_SIZE)
    config = SpaceConfig(groups[:num_groups], num_blocks + 1, max_sequences=8, max_tokens=64, watermark=0)
    return BlockSpaceManager(config)


def blocks_of(num_sequences: int, num_tokens: int, num_lookahead: int) -> int:
    """Count what a group holds: full blocks are shared, a partly filled one only without reserved slots."""
    num_full, is_partial = num_tokens // BLOCK_SIZE, num_tokens % BLOCK_SIZE > 0
    if num_lookahead == 0:
        return num_full + is_partial
    return num_full + num_sequences * (-(-(num_tokens + num_lookahead) // BLOCK_SIZE) - num_full)


@pytest.mark.interpreted
def test_a_group_of_two_reserves_for_both() -> None:
    manager = manager_with(20)
    group = new_group([1, 2, 3, 4, 5], n=2)
    manager.allocate(group, 8)
    first, second = (manager.get_block_table(seq) for seq in group.seqs)
    assert [len(first), len(second)] == [4, 4]
    assert set(first) & set(second) == {first[0]}


@cases
def test_can_allocate_counts_exactly_what_a_group_takes(
    num_sequences: int, num_tokens: int, num_lookahead: int
) -> None:
    num_needed = blocks_of(num_sequences, num_tokens, num_lookahead)
    group = new_group(list(range(num_tokens)), n=num_sequences)
    manager = manager_with(num_needed)
    assert manager.can_allocate(group, num_lookahead) is OK
    manager.allocate(group, num_lookahead)
    assert manager.get_num_free_blocks() == 0
    length = -(-(num_tokens + num_lookahead) // BLOCK_SIZE)
    assert [len(manager.get_block_table(seq)) for seq in group.seqs] == [length] * num_sequences
    manager.space.check()


@cases
def test_with_a_block_less_nothing_is_allocated(num_sequences: int, num_tokens: int, num_lookahead: int) -> None:
    """NEVER in an empty pool, LATER while another sequence has the block: and no half allocation in either."""
    num_needed = blocks_of(num_sequences, num_tokens, num_lookahead)
    group = new_group(list(range(num_tokens)), n=num_sequences)
    other = new_group([100], first_id=10)
    small, busy = manager_with(max(1, num_needed - 1)), manager_with(num_needed)
    busy.allocate(other)
    expected = [(busy, LATER)] if num_needed == 1 else [(small, NEVER), (busy, LATER)]
    for manager, status in expected:
        assert manager.can_allocate(group, num_lookahead) is status
        with unchanged(manager.space), pytest.raises(OutOfBlocksError):
            manager.allocate(group, num_lookahead)
        assert not any(map(manager.is_allocated, group.seqs))


@cases
def test_several_groups_of_layers_reserve_alike(num_sequences: int, num_tokens: int, num_lookahead: int) -> None:
    num_needed = 2 * blocks_of(num_sequences, num_tokens, num_lookahead)
    group = new_group(list(range(num_tokens)), n=num_sequences)
    assert manager_with(num_needed - 1, num_groups=2).can_allocate(group, num_lookahead) is NEVER
    manager = manager_with(num_needed, num_groups=2)
    manager.allocate(group, num_lookahead)
    assert manager.get_num_free_blocks() == 0


@pytest.mark.parametrize("num_lookahead", [0, 3, 8])
def test_a_prompt_in_chunks_counts_what_its_forks_reserve_at_its_end(num_lookahead: int) -> None:
    """The last chunk of 4 tokens stands beside what a window of 8 still needs: 3 blocks, and what each reserves."""
    group = new_group(list(range(28)), n=3)
    num_needed = 3 + 3 * -(-num_lookahead // BLOCK_SIZE)
    statuses = []
    for num_blocks in (num_needed - 1, num_needed):
        config = SpaceConfig((SlidingWindow(8, BLOCK_SIZE),), num_blocks + 1, max_sequences=8, max_tokens=64)
        statuses.append(BlockSpaceManager(config).can_allocate(group, num_lookahead, max_chunk=4))
    assert statuses == [NEVER, OK]


def test_cached_blocks_are_counted_once_for_the_whole_group() -> None:
    manager = manager_with(9)
    manager.allocate(new_group(list(range(9)), first_id=10))
    group = new_group(list(range(9)), n=2)
    assert manager.can_allocate(group, 8) is OK
    manager.allocate(group, 8)
    assert manager.get_num_free_blocks() == 0


@pytest.mark.interpreted
@pytest.mark.parametrize("num_tokens", [4, 5, 7])
def test_each_sequence_of_a_group_writes_into_slots_of_its_own(num_tokens: int) -> None:
    """The prompt is computed into each copy of the partly filled block, and what follows into the reserved slots."""
    manager = manager_with(30)
    device = Device(manager.space.config)
    group = new_group(list(range(num_tokens)), n=3)
    manager.allocate(group, 5)
    for generated in range(6):
        manager.end_round(lambda plan: device.run(plan, {manager.row_of(seq): seq.token_ids for seq in group.seqs}))
        for seq in group.seqs:
            assert device.read(manager.row_of(seq), len(seq.token_ids)) == seq.token_ids
            seq.token_ids.append(100 * seq.seq_id + generated)
            before = manager.get_block_table(seq)
            assert manager.append_slots(seq) == []
            if generated < 5:
                assert manager.get_block_table(seq) == before
    manager.space.check()


def test_a_group_of_one_is_counted_as_before() -> None:
    manager = manager_with(3)
    group = SequenceGroup("request", new_group([1, 2, 3, 4, 5]).seqs)
    assert [manager.can_allocate(group, slots) for slots in (0, 7, 8)] == [OK, OK, NEVER]
