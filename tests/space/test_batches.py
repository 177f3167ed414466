"""Batches: rows in any form, and that a batch and its rows one by one come to the same."""

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import BlockSpace, BlockSpaceManager, FullAttention, Sequence, SequenceGroup, SpaceConfig
from pagedkv.contract.arguments import Rows, as_batch
from tests.space.spaces import new_space, prefill, run_step, tokens


def read_only(rows: list[int]) -> npt.NDArray[np.int32]:
    batch = np.array(rows, np.int32)
    batch.flags.writeable = False
    return batch


KINDS: dict[str, Rows] = {
    "list": [3, 1],
    "int64": np.array([3, 1]),
    "int32": np.array([3, 1], np.int32),
    "uint8": np.array([3, 1], np.uint8),
    "every other": np.array([3, 0, 1, 0], np.int32)[::2],
    "backwards": np.array([1, 3], np.int32)[::-1],
    "read-only": read_only([3, 1]),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS.keys())
def test_rows_may_come_in_any_form(rows: Rows) -> None:
    assert as_batch(rows).tolist() == [3, 1]
    space = new_space()
    for first in range(4):
        prefill(space, tokens(6, first=100 * first))
    space.append(rows, [7, 8, 9], np.array([0, 1, 0, 2])[1::2])
    assert [space.num_tokens(row) for row in range(4)] == [6, 8, 6, 7]
    space.truncate(rows, [6, 6])
    space.free(rows)
    assert space.statistics().num_running == 2
    space.check()


@pytest.mark.parametrize("row", [2, np.int32(2), np.int64(2)])
def test_a_single_row_is_a_batch_of_one(row: int) -> None:
    assert as_batch(row).tolist() == [2]


@pytest.mark.parametrize("rows", [[], np.zeros(0, np.int32), np.zeros(0)])
def test_an_empty_batch_does_nothing(rows: Rows) -> None:
    space = new_space()
    assert space.append(rows, []) is None
    assert space.can_append(rows)
    space.truncate(rows, [])
    space.free(rows)
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(3))
def test_batches_and_single_sequences_come_to_the_same(seed: int) -> None:
    """The inner door in whole batches, the classic one sequence by sequence: block for block the same tables."""
    rng = np.random.default_rng(seed)
    config = SpaceConfig((FullAttention(4),), num_blocks=101, max_sequences=8, max_tokens=500)
    manager, by_batch = BlockSpaceManager(config), BlockSpace(config)
    parent = Sequence(0, list(range(6)))
    manager.allocate(SequenceGroup("request", [parent]))
    seqs = {0: parent}
    by_batch.allocate(parent.token_ids)
    for step in range(1, 30):
        if rng.random() < 0.3 and len(seqs) < 8:
            origin = int(rng.choice(list(seqs)))
            child = Sequence(step, list(seqs[origin].token_ids))
            manager.fork(seqs[origin], child)
            assert by_batch.fork(manager.row_of(seqs[origin])).tolist() == [manager.row_of(child)]
            seqs[step] = child
        rows = [manager.row_of(seq) for seq in seqs.values()]
        new = rng.integers(0, 3, len(rows)).tolist()
        assert by_batch.append(rows, new) is None
        for seq, token in zip(seqs.values(), new, strict=True):
            seq.token_ids.append(token)
            manager.append_slots(seq)
        assert [manager.get_block_table(seq) for seq in seqs.values()] == [by_batch.block_ids(row) for row in rows]
        if rng.random() < 0.2 and len(seqs) > 1:
            leaving = seqs.pop(int(rng.choice(list(seqs))))
            by_batch.free([manager.row_of(leaving)])
            manager.free(leaving)
        plans = run_step(manager.space), run_step(by_batch)
        assert plans[0].compute.starts.tolist() == plans[1].compute.starts.tolist()
    assert manager.space.statistics() == by_batch.statistics()
