"""Slices of blocks between engines of different sizes: golden cases, and blocks that are put together again."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.contract.head_slices import (
    BlockShape,
    CopiedBytes,
    HeadRange,
    HeadSlice,
    byte_slices,
    head_slices,
    heads_of_rank,
)
from pagedkv.errors import ConfigurationError

SHAPE: Final = BlockShape(num_planes=2, block_size=3, head_nbytes=4)


@pytest.mark.parametrize(
    ("num_heads", "sources", "targets", "expected"),
    [
        (8, 2, 4, [[(0, 0, 0, 2)], [(0, 2, 0, 2)], [(1, 0, 0, 2)], [(1, 2, 0, 2)]]),
        (8, 4, 2, [[(0, 0, 0, 2), (1, 0, 2, 2)], [(2, 0, 0, 2), (3, 0, 2, 2)]]),
        (8, 2, 2, [[(0, 0, 0, 4)], [(1, 0, 0, 4)]]),
        (2, 4, 1, [[(0, 0, 0, 1), (2, 0, 1, 1)]]),  # each head is on two ranks, and read from the first
        (2, 1, 4, [[(0, 0, 0, 1)], [(0, 0, 0, 1)], [(0, 1, 0, 1)], [(0, 1, 0, 1)]]),
        (4, 4, 8, [[(rank // 2, 0, 0, 1)] for rank in range(8)]),
        (6, 2, 3, [[(0, 0, 0, 2)], [(0, 2, 0, 1), (1, 0, 1, 1)], [(1, 1, 0, 2)]]),
        (None, 2, 4, [[(0, 0, 0, 1)], [(1, 0, 0, 1)], [(0, 0, 0, 1)], [(1, 0, 0, 1)]]),  # latents: whole, by turns
    ],
)
def test_golden_slices(
    num_heads: int | None, sources: int, targets: int, expected: Sequence[Sequence[tuple[int, int, int, int]]]
) -> None:
    for rank, slices in enumerate(expected):
        assert head_slices(num_heads, sources, targets, rank) == [HeadSlice(*each) for each in slices]


def test_golden_bytes() -> None:
    shape = BlockShape(num_planes=1, block_size=2, head_nbytes=16)
    assert list(byte_slices(shape, 4, 1, 2, 1)) == [CopiedBytes(0, 32, 0, 32), CopiedBytes(0, 96, 32, 32)]
    assert list(byte_slices(shape, 4, 2, 1, 0)) == [
        CopiedBytes(0, 0, 0, 32),
        CopiedBytes(0, 32, 64, 32),
        CopiedBytes(1, 0, 32, 32),
        CopiedBytes(1, 32, 96, 32),
    ]
    assert list(byte_slices(shape, 4, 2, 2, 1)) == [CopiedBytes(1, 0, 0, 64)]
    assert list(byte_slices(shape, None, 2, 2, 1)) == [CopiedBytes(1, 0, 0, 32)]


def stored(whole: np.ndarray, num_ranks: int, rank: int) -> np.ndarray:
    """Return the bytes of a rank's block: its heads of ``[planes, tokens, heads, bytes]``."""
    heads: HeadRange = heads_of_rank(whole.shape[2], num_ranks, rank)
    return whole[:, :, heads.first : heads.first + heads.count].reshape(-1).copy()


@given(
    num_heads=st.integers(1, 12),
    sources=st.integers(1, 12),
    targets=st.integers(1, 12),
)
def test_blocks_are_put_together_as_they_would_have_been_stored(num_heads: int, sources: int, targets: int) -> None:
    for size in (sources, targets):
        if num_heads % size and size % num_heads:
            with pytest.raises(ConfigurationError, match="one number must divide the other"):
                heads_of_rank(num_heads, size, 0)
            return
    whole = np.random.default_rng(0).integers(0, 256, (2, 3, num_heads, 4), np.uint8)
    blocks = [stored(whole, sources, rank) for rank in range(sources)]
    for rank in range(targets):
        expected = stored(whole, targets, rank)
        got = np.zeros_like(expected)
        times = np.zeros(len(got), int)
        for each in byte_slices(SHAPE, num_heads, sources, targets, rank):
            got[each.target : each.target + each.nbytes] = blocks[each.source_rank][each.source :][: each.nbytes]
            times[each.target : each.target + each.nbytes] += 1
        assert (times == 1).all(), "each byte once"
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("sources", "targets", "rank"), [(0, 1, 0), (1, 1, 1), (1, 0, 0)])
def test_ranks_that_are_not_there_are_refused(sources: int, targets: int, rank: int) -> None:
    with pytest.raises(ConfigurationError):
        head_slices(4, sources, targets, rank)
    with pytest.raises(ConfigurationError):
        head_slices(None, sources, targets, rank)
