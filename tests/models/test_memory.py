"""Groups as rules for a block space."""

import pytest

from pagedkv import BlockSpace, ChunkedLocal, FullAttention, RecurrentState, SlidingWindow, SpaceConfig
from pagedkv.errors import ConfigurationError
from pagedkv.models import model_names, read_model


def test_each_kind_of_group_gives_its_rule_in_a_pool_of_its_own() -> None:
    assert read_model("gemma-3-27b").specs(16) == (
        FullAttention(16, pool="full"),
        SlidingWindow(1024, 16, pool="window_1024"),
    )
    assert read_model("llama-4-scout").specs(32) == (
        FullAttention(32, pool="full"),
        ChunkedLocal(8192, 32, pool="chunk_8192"),
    )
    assert read_model("jamba-v0.1").specs(512) == (FullAttention(512, pool="full"), RecurrentState(512, pool="state"))


@pytest.mark.parametrize("name", model_names())
def test_every_preset_builds_a_block_space(name: str) -> None:
    model = read_model(name)
    num_blocks = {group.name: 64 for group in model.groups}
    space = BlockSpace(SpaceConfig(model.specs(16), num_blocks, max_sequences=4, max_tokens=256))
    space.check()


def test_a_block_holds_so_many_tokens_or_one_state() -> None:
    full, state = read_model("jamba-v0.1").groups
    assert (full.block_nbytes(1), full.block_nbytes(16)) == (16_384, 16 * 16_384)
    assert (state.block_nbytes(1), state.block_nbytes(512)) == (16_515_072, 16_515_072)


def test_a_block_size_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="block_size must be at least 1, got 0"):
        read_model("opt-13b").specs(0)
