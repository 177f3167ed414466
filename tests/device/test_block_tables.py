"""Block tables by calls, as other systems drive them: append, overwrite, gather, slots, padding, several groups.

What vLLM's tests of its own tables ask for (tests/v1/worker), test by test, and where it is asked here. The CPU table,
``test_block_table.py``, asks in thirty tests for one thing, null blocks behind every row: its last lines.

    test_gpu_block_table.py
    apply_staged_writes_fuses_kv_groups           test_writes_of_several_groups_are_applied_at_once
        and appends behind what a row has         test_blocks_are_appended_behind_a_rows_blocks
        and leaves nothing staged                 test_applying_nothing_changes_nothing
    apply_staged_writes_single_group              test_overwriting_begins_anew
    skip_custom_slot_mapping_groups               test_states_have_no_slots, test_slots_beyond_32_bits
    dcp_slot_mapping_only_shards_sharded_groups   not met: slots interleaved over context-parallel ranks
    v1_block_table_move_row_clears_vacated_row    test_rows_are_moved_swapped_and_cleared
    get_dummy_block_tables_returns_zeroed_rows    test_dummies_and_padded_places_are_null_blocks
    dummy_request_slot_mapping_is_pad             test_a_dummys_positions_and_those_beyond_a_table_have_no_slots

    test_block_table_kernels.py
    fused_gather_and_slots_matches_separate       kernels/test_tables.py: plans and calls, against plain torch
    fused_with_shuffled_idx_mapping               test_rows_are_gathered_in_any_order

    test_block_table_slot_mapping.py
    matches_hand_computed_slots                   test_slots_are_those_written_down_by_hand
    covers_block_boundaries_and_ragged_batches    test_slots_of_ragged_batches_are_padded
    pads_beyond_a_triton_tile                     the same, with 1,545 positions
    partitions_tokens_across_dcp_ranks            not met, as above
    dcp_matches_hand_computed_slots               not met, as above
    with_hybrid_kernel_blocks                     test_kernels_of_smaller_blocks_find_every_token
    hybrid_matches_hand_computed_slots            test_blocks_of_two_pages_have_the_slots_of_their_pages
    mode_none_leaves_buffer_untouched             test_states_have_no_slots: here -1, so that nothing stale is left

    test_block_table.py
    fresh tables                                  test_fresh_tables_are_null_blocks
    appended, added anew, used again              test_a_row_that_is_used_again_shows_nothing_of_before
    moved, cleared; other rows                    test_rows_are_moved_swapped_and_cleared, test_other_rows_stay_as_...
    filled to the end, arrays, large ids          test_a_row_may_be_filled_to_its_end

Decision 26 leaves context parallelism out.
"""

import numpy as np
import pytest
import torch

from pagedkv import BlockSpace, FullAttention, RecurrentState, SlidingWindow, SpaceConfig
from pagedkv.contract.spec import GroupSpec
from pagedkv.device import BlockTables, KeyValueShape, KVStorage
from pagedkv.device.shapes import number_pages


def tables_of(
    device: torch.device,
    *block_sizes: int,
    max_tokens: int = 512,
    groups: tuple[GroupSpec, ...] = (),
) -> BlockTables:
    chosen = groups or tuple(FullAttention(size) for size in block_sizes)
    config = SpaceConfig(
        chosen,
        num_blocks=dict.fromkeys((group.pool for group in chosen), 4096),
        max_sequences=8,
        max_tokens=max_tokens,
    )
    return BlockTables(config, max_batched_tokens=2100, device=device)


def on(device: torch.device, values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def slots_of(
    tables: BlockTables, rows: list[int], positions: list[list[int]], padded: int | None = None
) -> torch.Tensor:
    offsets = [0]
    for each in positions:
        offsets.append(offsets[-1] + len(each))
    flat = on(tables.device, [position for each in positions for position in each], torch.int64)
    return tables.compute_slot_mappings(on(tables.device, rows), on(tables.device, offsets), flat, padded)


def test_writes_of_several_groups_are_applied_at_once(device: torch.device) -> None:
    tables = tables_of(device, 16, 32, 8)
    tables.append_block_ids(0, ([1, 2], [10, 11], []), overwrite=True)
    tables.append_block_ids(1, ([3], [12], [5, 6]), overwrite=True)
    tables.apply_staged_writes()
    assert tables.table(0)[:2, :2].tolist() == [[1, 2], [3, 0]]
    assert tables.table(1)[:2, :2].tolist() == [[10, 11], [12, 0]]
    assert tables.table(2)[:2, :2].tolist() == [[0, 0], [5, 6]]
    assert [[tables.num_blocks(group, row) for row in (0, 1)] for group in range(3)] == [[2, 1], [2, 1], [0, 2]]


def test_blocks_are_appended_behind_a_rows_blocks(device: torch.device) -> None:
    tables = tables_of(device, 16, 8)
    tables.append_block_ids(0, ([1, 2], []), overwrite=True)
    tables.apply_staged_writes()
    tables.append_block_ids(0, ([7], [8]), overwrite=False)
    tables.append_block_ids(0, ([9], []), overwrite=False)  # twice before they are applied
    tables.apply_staged_writes()
    assert tables.table(0)[0, :4].tolist() == [1, 2, 7, 9]
    assert tables.table(1)[0, :1].tolist() == [8]
    assert (tables.num_blocks(0, 0), tables.num_blocks(1, 0)) == (4, 1)


def test_overwriting_begins_anew(device: torch.device) -> None:
    tables = tables_of(device, 16)
    tables.append_block_ids(0, ([1, 2, 3],), overwrite=True)
    tables.append_block_ids(0, ([4],), overwrite=True)
    tables.apply_staged_writes()
    (batch,) = tables.gather_block_tables(on(device, [0]))
    assert (batch[0, :3].tolist(), tables.num_blocks(0, 0)) == ([4, 0, 0], 1)


def test_fresh_tables_are_null_blocks(device: torch.device) -> None:
    tables = tables_of(device, 16, 8)
    for group in range(2):
        assert not bool(tables.table(group).any())
        assert [tables.num_blocks(group, row) for row in range(8)] == [0] * 8
    assert not any(bool(table.any()) for table in tables.gather_block_tables(on(device, list(range(8)))))


def test_a_row_that_is_used_again_shows_nothing_of_before(device: torch.device) -> None:
    """Longer and shorter sequences in turn, begun anew, cleared, or moved there."""
    tables = tables_of(device, 16)
    lengths = [8, 2, 10, 1, 3]
    for turn, length in enumerate(lengths):
        if turn == 2:
            tables.clear_row(0)
        ids = list(range(100 * turn + 1, 100 * turn + 1 + length))
        tables.append_block_ids(0, (ids,), overwrite=turn != 2)
        tables.apply_staged_writes()
        (batch,) = tables.gather_block_tables(on(device, [0]))
        assert batch[0].tolist() == ids + [0] * (tables.widths[0] - length)
        assert tables.num_blocks(0, 0) == length
    tables.append_block_ids(1, ([7, 9],), overwrite=True)
    tables.append_block_ids(2, ([11],), overwrite=True)
    tables.move_row(1, 0)
    (batch,) = tables.gather_block_tables(on(device, [0, 1, 2]))
    assert batch[:, :3].tolist() == [[7, 9, 0], [0, 0, 0], [11, 0, 0]]
    assert not bool(batch[:, 3:].any())


def test_a_row_may_be_filled_to_its_end(device: torch.device) -> None:
    tables = tables_of(device, 16, max_tokens=64)
    tables.append_block_ids(1, (np.array([4000, 5, 6], np.int32),), overwrite=True)  # type: ignore[arg-type]
    tables.append_block_ids(1, ([],), overwrite=False)
    tables.append_block_ids(1, ([4095],), overwrite=False)
    tables.apply_staged_writes()
    assert tables.table(0)[1].tolist() == [4000, 5, 6, 4095]
    assert slots_of(tables, [1], [[0, 63]])[0].tolist() == [4000 * 16, 4095 * 16 + 15]


def test_applying_nothing_changes_nothing(device: torch.device) -> None:
    tables = tables_of(device, 16)
    tables.append_block_ids(3, ([5],), overwrite=True)
    for _ in range(3):
        tables.apply_staged_writes()
    assert int(tables.table(0).count_nonzero()) == 1


def test_many_more_entries_than_a_packet_holds(device: torch.device) -> None:
    config = SpaceConfig((FullAttention(1),), num_blocks=4096, max_sequences=3, max_tokens=1000)
    tables = BlockTables(config, device=device, packet_entries=32)
    for row in range(3):
        tables.append_block_ids(row, (list(range(row, 1000 + row)),), overwrite=True)
    tables.apply_staged_writes()
    assert all(tables.table(0)[row].tolist() == list(range(row, 1000 + row)) for row in range(3))


def test_rows_are_gathered_in_any_order(device: torch.device) -> None:
    tables = tables_of(device, 16, 4)
    for row in range(8):
        tables.append_block_ids(row, ([row] * (row + 1), [row + 10]), overwrite=True)
    tables.apply_staged_writes()
    first, second = tables.gather_block_tables(on(device, [5, 2, 7]))
    assert first[:, :8].tolist() == [[5] * 6 + [0] * 2, [2] * 3 + [0] * 5, [7] * 8]
    assert second[:, 0].tolist() == [15, 12, 17]


def test_dummies_and_padded_places_are_null_blocks(device: torch.device) -> None:
    tables = tables_of(device, 16)
    tables.append_block_ids(0, ([1, 2],), overwrite=True)
    tables.apply_staged_writes()
    (before,) = tables.gather_block_tables(on(device, [0, 0][:1]))
    (padded,) = tables.gather_block_tables(on(device, [-1, 0]), 4)
    assert padded[:, :2].tolist() == [[0, 0], [1, 2], [0, 0], [0, 0]]
    (dummy,) = tables.get_dummy_block_tables(2)
    assert not bool(dummy.any())
    assert dummy.data_ptr() == before.data_ptr(), "a CUDA graph has the address"


def test_slots_are_those_written_down_by_hand(device: torch.device) -> None:
    tables = tables_of(device, 16)
    tables.append_block_ids(0, ([12, 4, 31],), overwrite=True)
    tables.append_block_ids(1, ([3, 8],), overwrite=True)
    tables.apply_staged_writes()
    assert slots_of(tables, [0], [[0, 15, 16, 40]])[0].tolist() == [192, 207, 64, 504]
    assert slots_of(tables, [1, 0], [[18], [33]])[0].tolist() == [8 * 16 + 2, 31 * 16 + 1]


@pytest.mark.parametrize(
    ("blocks", "positions"),
    [
        ([[3]], [[0]]),
        ([[6, 11, 2]], [[0, 15, 16, 31, 32, 47]]),
        ([[71, 5, 40, 9, 63]], [list(range(80))]),
        ([[4, 3, 2, 1], [12, 17], [25, 21, 29], [33]], [list(range(50)), [], list(range(37)), [0]]),
        ([[16, 15, 14, 13, 12, 11]], [list(range(66, 93))]),
        ([list(range(2, 100))], [list(range(1545))]),
    ],
)
def test_slots_of_ragged_batches_are_padded(
    device: torch.device, blocks: list[list[int]], positions: list[list[int]]
) -> None:
    tables = tables_of(device, 16, max_tokens=2000)
    for row, ids in enumerate(blocks):
        tables.append_block_ids(row, (ids,), overwrite=True)
    tables.apply_staged_writes()
    tables.arrays.slots.fill_(-12345)
    expected = [ids[at // 16] * 16 + at % 16 for ids, each in zip(blocks, positions, strict=True) for at in each]
    slots = slots_of(tables, list(range(len(blocks))), positions, 2100)[0].tolist()
    assert slots == expected + [-1] * (2100 - len(expected))


def test_a_dummys_positions_and_those_beyond_a_table_have_no_slots(device: torch.device) -> None:
    tables = tables_of(device, 4, max_tokens=16)
    tables.append_block_ids(0, ([7, 8],), overwrite=True)
    tables.apply_staged_writes()
    assert slots_of(tables, [-1], [[1, 2, 3]])[0].tolist() == [-1] * 3
    assert slots_of(tables, [0], [[1, 4, 16]])[0].tolist() == [29, 32, -1]


def test_states_have_no_slots(device: torch.device) -> None:
    tables = tables_of(device, groups=(FullAttention(4), RecurrentState(8)))
    tables.append_block_ids(0, ([7], [3]), overwrite=True)
    tables.apply_staged_writes()
    assert slots_of(tables, [0], [[0, 1]]).tolist() == [[28, 29], [-1, -1]]


def test_slots_beyond_32_bits(device: torch.device) -> None:
    config = SpaceConfig((FullAttention(2**20),), num_blocks=2**31 - 1, max_sequences=1, max_tokens=2**20)
    tables = BlockTables(config, device=device)
    tables.append_block_ids(0, ([2**31 - 2],), overwrite=True)
    tables.apply_staged_writes()
    assert slots_of(tables, [0], [[7]])[0].tolist() == [(2**31 - 2) * 2**20 + 7]


def test_positions_move_down_by_what_the_device_refused(device: torch.device) -> None:
    tables = tables_of(device, 4)
    tables.append_block_ids(0, ([1, 2],), overwrite=True)
    tables.append_block_ids(1, ([3, 4],), overwrite=True)
    tables.apply_staged_writes()
    rows, offsets = on(device, [0, 1]), on(device, [0, 2, 4])
    positions = on(device, [4, 5, 6, 7], torch.int64)
    slots = tables.compute_slot_mappings(rows, offsets, positions, None, on(device, [1, 0]))
    assert slots[0].tolist() == [7, 8, 18, 19]


def test_dummy_slots_are_all_padding(device: torch.device) -> None:
    tables = tables_of(device, 4)
    tables.append_block_ids(0, ([1],), overwrite=True)
    tables.apply_staged_writes()
    real = slots_of(tables, [0], [[0, 1]])
    dummy = tables.get_dummy_slot_mappings(1)
    assert dummy.data_ptr() == real.data_ptr()
    assert bool((tables.arrays.slots == -1).all())


def test_rows_are_moved_swapped_and_cleared(device: torch.device) -> None:
    tables = tables_of(device, 4, 8)
    for row, ids in ((0, [1, 2, 3]), (1, [4, 5]), (2, [6])):
        tables.append_block_ids(row, (ids, ids[:1]), overwrite=True)
    tables.swap_rows(0, 1)
    tables.move_row(2, 3)
    tables.clear_row(1)
    rows, _ = tables.gather_block_tables(on(device, [0, 1, 2, 3]))
    assert rows[:, :3].tolist() == [[4, 5, 0], [0, 0, 0], [0, 0, 0], [6, 0, 0]]
    assert [tables.num_blocks(0, row) for row in range(4)] == [2, 0, 0, 1]
    assert not bool(tables.table(0)[2].any()), "what is left behind are null blocks"


@pytest.mark.parametrize("page_size", [16, 8, 4])
def test_kernels_of_smaller_blocks_find_every_token(device: torch.device, page_size: int) -> None:
    """The tokens of a row, read page by page through the derived table and list, are those read block by block."""
    config = SpaceConfig((FullAttention(16),), num_blocks=20, max_sequences=4, max_tokens=64)
    storage = KVStorage(config, [KeyValueShape(2, 2, 4, dtype=torch.float32)], device)
    keys = storage.keys(0, 1)
    keys.copy_(torch.arange(keys.numel()).reshape(keys.shape))
    space, tables = BlockSpace(config), BlockTables(config, device=device)
    space.allocate(range(50))
    space.allocate(range(100, 117))
    inputs = tables.step(space.plan_step())
    pages = storage.pages(0, 1, page_size)
    expected = [keys[inputs.block_tables[0][place].long()].flatten(0, 1) for place in range(2)]
    table = tables.page_tables(0, pages.numbers, 2)
    indptr, indices, last = tables.page_lists(0, 2, 40, pages.numbers)
    for place, length in ((0, 50), (1, 17)):
        assert torch.equal(pages.keys[table[place].long()].flatten(0, 1)[:length], expected[place][:length])
        listed = indices[indptr[place] : indptr[place + 1]]
        assert len(listed) == -(-length // page_size)
        assert torch.equal(pages.keys[listed.long()].flatten(0, 1)[:length], expected[place][:length])
        assert int(last[place]) == (length - 1) % page_size + 1
    assert not bool(indices[indptr[-1] :].any())


def test_a_step_reads_and_writes_states_by_block(device: torch.device) -> None:
    config = SpaceConfig(
        (SlidingWindow(8, 4), RecurrentState(8)), num_blocks={"device": 40, "state": 9}, max_sequences=3, max_tokens=64
    )
    space, tables = BlockSpace(config), BlockTables(config, device=device)
    row = space.allocate(range(11)).row
    tables.step(space.plan_step())
    read, written = tables.state_blocks(1, 1)
    assert (read.tolist(), written.tolist()) == ([0], [space.block_ids(row, 1)[1]])
    space.append(row, [1])
    tables.step(space.plan_step())
    read, written = tables.state_blocks(1, 1)
    assert (read.tolist(), written.tolist()) == ([space.block_ids(row, 1)[1]] * 1, [space.block_ids(row, 1)[1]])


def test_states_of_open_positions_are_in_slots(device: torch.device) -> None:
    """Before the first open position states are in the table, from it on in slot ``p % n``; also once a range moved."""
    config = SpaceConfig((RecurrentState(4, num_draft_states=6),), num_blocks=20, max_sequences=3, max_tokens=64)
    space, tables = BlockSpace(config), BlockTables(config, max_batched_tokens=12, device=device)
    other = space.allocate([9]).row
    row = space.allocate(range(6)).row
    first = tables.step(space.plan_step())
    mine, states = space.block_ids(row, 0), first.state_writes(0).tolist()
    assert states == [*space.block_ids(other, 0), 0, 0, 0, mine[0], 0, mine[1], 0, 0, 0, 0, 0]
    space.append(row, [6, 7, 8], num_draft=2)
    drafted = space.plan_step()
    inputs = tables.step(drafted)
    mine, slots = space.block_ids(row, 0), space.draft_block_ids(row, 0)
    assert [blocks.tolist() for blocks in inputs.state_blocks(0)] == [[mine[1]], [slots[8 % 6]]]
    assert inputs.state_writes(0).tolist() == [mine[1], slots[7 % 6], slots[8 % 6], *[0] * 9]
    positions = torch.tensor([-1, 3, 5, 6, 7, 8], device=device)
    behind = inputs.states_behind(0, torch.zeros_like(positions), positions)
    assert behind.tolist() == [0, mine[0], mine[1], mine[1], slots[7 % 6], slots[8 % 6]]
    refused = torch.tensor([1], dtype=torch.int32, device=device)
    tables.record_refused(drafted.step_id, torch.tensor([row], dtype=torch.int32, device=device), refused)
    space.append(row, None, [1])
    later = space.plan_step()
    inputs = tables.step(later)
    assert (inputs.starts.tolist(), inputs.seq_lens.tolist()) == ([[8]], [[9]]), "planned as position 9"
    assert [blocks.tolist() for blocks in inputs.state_blocks(0)] == [[slots[7 % 6]], [slots[8 % 6]]]
    assert inputs.state_writes(0).tolist() == [slots[8 % 6], *[0] * 11]
    assert [blocks.tolist() for blocks in tables.state_blocks(0, 3)] == [
        [slots[7 % 6], 0, 0],
        [slots[8 % 6], 0, 0],
    ], "places behind the batch, as graphs have them, read and write nothing"


def test_blocks_of_two_pages_have_the_slots_of_their_pages(device: torch.device) -> None:
    """A slot is the same number in blocks of 32 and in pages of 16, where a block's pages follow each other."""
    tables = tables_of(device, 32)
    tables.append_block_ids(0, ([6, 3],), overwrite=True)
    tables.apply_staged_writes()
    positions = [0, 15, 16, 31, 32, 47, 48]
    numbers = number_pages(32, 16, block_stride=32, token_stride=1)
    tables.gather_block_tables(on(device, [0]))
    pages = tables.page_tables(0, numbers, 1)[0, :4].tolist()
    assert pages == [12, 13, 6, 7]
    by_pages = [pages[position // 16] * 16 + position % 16 for position in positions]
    assert slots_of(tables, [0], [positions])[0].tolist() == by_pages == [192, 207, 208, 223, 96, 111, 112]


def test_other_rows_stay_as_they_are(device: torch.device) -> None:
    tables = tables_of(device, 16)
    for row, ids in ((0, [1, 2, 3]), (1, [4]), (2, [40, 41]), (3, [99, 88])):
        tables.append_block_ids(row, (ids,), overwrite=True)
    tables.move_row(3, 1)
    tables.clear_row(0)
    tables.append_block_ids(0, ([5],), overwrite=False)
    tables.apply_staged_writes()
    (batch,) = tables.gather_block_tables(on(device, [0, 1, 2]))
    assert batch[:, :3].tolist() == [[5, 0, 0], [99, 88, 0], [40, 41, 0]]
    assert [tables.num_blocks(0, row) for row in range(4)] == [1, 2, 2, 0]
