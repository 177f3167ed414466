"""Blocks of all heads from those of ranks, and back: by the slices of bytes; keys and values of other widths."""

from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch

from pagedkv.contract.head_slices import BlockShape, byte_slices, heads_of_rank
from pagedkv.device import Companion, KeyValueShape, LatentShape, StateShape, StateTensor
from pagedkv.engine.ranked_content import WholeBlocks
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.entry_blocks import Rows

BLOCK_SIZE: Final = 3
NUM_BLOCKS: Final = 2
RNG: Final = np.random.default_rng(5)


def random_rows(num_blocks: int, nbytes: int) -> Rows:
    return RNG.integers(0, 256, (num_blocks, nbytes), np.uint8)


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(8, 1), (8, 2), (8, 8), (2, 4), (1, 3), (6, 3), (4, 8)])
def test_cut_and_put_move_the_bytes_that_byte_slices_lists(num_heads: int, num_ranks: int) -> None:
    shape = KeyValueShape(num_layers=2, num_heads=num_heads, key_dim=4, dtype=torch.float16)
    blocks = WholeBlocks(shape, BLOCK_SIZE, num_ranks)
    as_bytes = BlockShape(num_planes=4, block_size=BLOCK_SIZE, head_nbytes=8)
    assert blocks.nbytes == as_bytes.nbytes(num_heads) == shape.block_nbytes(BLOCK_SIZE)
    whole = random_rows(NUM_BLOCKS, blocks.nbytes)
    parts = []
    for rank in range(num_ranks):
        expected = np.zeros((NUM_BLOCKS, blocks.rank_nbytes), np.uint8)
        for each in byte_slices(as_bytes, num_heads, 1, num_ranks, rank):
            expected[:, each.target : each.target + each.nbytes] = whole[:, each.source : each.source + each.nbytes]
        parts.append(blocks.cut(whole, rank))
        assert parts[rank].tobytes() == expected.tobytes()
    again = np.zeros_like(whole)
    for rank in blocks.sources:
        blocks.put(again, rank, parts[rank])
    assert again.tobytes() == whole.tobytes()
    assert len(blocks.sources) == min(num_heads, num_ranks), "a repeated head comes from one rank"


def test_keys_and_values_may_have_other_widths() -> None:
    shape = KeyValueShape(num_layers=2, num_heads=4, key_dim=3, value_dim=2, dtype=torch.float32)
    blocks = WholeBlocks(shape, BLOCK_SIZE, 2)
    numbers = [RNG.random((2, BLOCK_SIZE, 4, dim)).astype(np.float32) for dim in (3, 2)]
    whole = np.concatenate([each.reshape(2, -1) for each in numbers], axis=1).reshape(1, -1).view(np.uint8)
    for rank in (0, 1):
        heads = heads_of_rank(4, 2, rank)
        own = [each[:, :, heads.first : heads.first + heads.count].reshape(2, -1) for each in numbers]
        assert blocks.cut(whole, rank).tobytes() == np.concatenate(own, axis=1).tobytes()


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(8, 2), (2, 4)])
def test_companions_are_whole_on_each_rank_and_keys_are_not(num_heads: int, num_ranks: int) -> None:
    plain = KeyValueShape(num_layers=2, num_heads=num_heads, key_dim=4, dtype=torch.float16)
    beside = Companion("indexer", 1, 6, torch.float16)
    without, blocks = (
        WholeBlocks(shape, BLOCK_SIZE, num_ranks) for shape in (plain, replace(plain, companions=(beside,)))
    )
    own = BLOCK_SIZE * beside.entry_nbytes
    whole = random_rows(NUM_BLOCKS, blocks.nbytes)
    parts = [blocks.cut(whole, rank) for rank in range(num_ranks)]
    for rank, part in enumerate(parts):
        assert part[:, :-own].tobytes() == without.cut(whole[:, :-own], rank).tobytes()
        assert part[:, -own:].tobytes() == whole[:, -own:].tobytes()
    again = np.zeros_like(whole)
    for rank in blocks.sources:
        blocks.put(again, rank, parts[rank])
    assert again.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    "shape", [LatentShape(num_layers=2, dim=6), StateShape(num_layers=2, tensors=(StateTensor("state", (2, 3)),))]
)
def test_what_has_no_heads_is_whole_on_each_rank(shape: LatentShape | StateShape) -> None:
    blocks = WholeBlocks(shape, BLOCK_SIZE, 4)
    whole = random_rows(NUM_BLOCKS, blocks.nbytes)
    assert blocks.rank_nbytes == blocks.nbytes
    assert tuple(blocks.sources) == (0,)
    assert all(blocks.cut(whole, rank).tobytes() == whole.tobytes() for rank in range(4))
    again = np.zeros_like(whole)
    blocks.put(again, 0, whole)
    assert again.tobytes() == whole.tobytes()


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one number must divide the other"):
        WholeBlocks(KeyValueShape(num_layers=1, num_heads=6, key_dim=4), BLOCK_SIZE, 4)
