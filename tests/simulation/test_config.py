"""ServingConfig and sizing: what is refused, and how memory becomes blocks."""

from collections.abc import Callable

import pytest

from pagedkv.blocks.eviction.registry import POLICIES
from pagedkv.contract.space_config import blocks_that_fit
from pagedkv.contract.spec import FullAttention, RecurrentState, SlidingWindow
from pagedkv.errors import ConfigurationError
from pagedkv.models import read_model
from pagedkv.models.memory import block_nbytes_of, groups_of
from pagedkv.simulation import ServingConfig

GIB = 2**30


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ServingConfig(1), "at least 2 blocks"),
        (lambda: ServingConfig(100, block_size=0), "block_size"),
        (lambda: ServingConfig(100, max_sequences=0), "max_sequences must be at least 1, got 0"),
        (lambda: ServingConfig(100, max_batched_tokens=255), "max_batched_tokens (255)"),
        (lambda: ServingConfig(100, watermark=1.0), "watermark"),
        (
            lambda: ServingConfig(100, eviction="oldest"),
            f"eviction policy must be one of {tuple(POLICIES)}, got 'oldest'",
        ),
        (lambda: ServingConfig(100, preemption="swap"), "needs a host pool"),
        (lambda: ServingConfig(100, num_samples=0), "`num_samples` must be from 1"),
        (lambda: ServingConfig(100, num_samples=2, beam_width=2), "give one of the two"),
        (lambda: ServingConfig(100, load=float("nan")), "load"),
        (lambda: ServingConfig(100, seed=-1), "seed"),
        (lambda: ServingConfig(100, max_length=0), "max_length"),
        (lambda: ServingConfig({"elsewhere": 100}), "must name the pools"),
        (
            lambda: blocks_that_fit((FullAttention(16, "full"),), {"full": GIB}, 1.5 * GIB, 100, 100),
            "leave 1 blocks of 1,073,741,824 bytes for pool 'full'",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_numbers(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert told in str(caught.value)


def test_pools_hold_as_many_sequences_of_the_mean_length() -> None:
    model = read_model("gemma-2-27b")
    groups = groups_of(model, 16)
    assert groups == (FullAttention(16, "full"), SlidingWindow(4096, 16, pool="window_4096"))
    nbytes = block_nbytes_of(model, 16)
    for mean_tokens, kept in ((1000, 1000 + 32), (50_000, 4096 + 32)):
        blocks = blocks_that_fit(groups, nbytes, 64 * GIB, mean_tokens, step_tokens=8192)
        in_window = blocks["window_4096"] - (8192 + 16) // 16  # beside what one step computes
        assert blocks["full"] * 16 / mean_tokens == pytest.approx(in_window * 16 / kept, rel=0.01)
        assert 0.999 < sum(blocks[pool] * nbytes[pool] for pool in blocks) / (64 * GIB) <= 1


def test_a_window_leaves_full_attention_the_memory_that_long_prompts_need() -> None:
    model = read_model("gemma-3-27b")
    nbytes = block_nbytes_of(model, 16)
    blocks = blocks_that_fit(groups_of(model, 16), nbytes, 94 * GIB, 12_000, step_tokens=8192)
    full, window = (blocks[pool] * nbytes[pool] / GIB for pool in ("full", "window_1024"))
    assert full > 60
    assert 3 < window < 32  # not 15 and 79, as when windows took as many tokens as full attention


def test_states_of_drafts_are_blocks_of_each_sequence() -> None:
    nbytes = {"full": 100, "state": 100}

    def share(num_draft_states: int) -> float:
        groups = (FullAttention(16, "full"), RecurrentState(16, pool="state", num_draft_states=num_draft_states))
        blocks = blocks_that_fit(groups, nbytes, 10**6, mean_tokens=160, step_tokens=10)
        return blocks["state"] / blocks["full"]

    assert share(4) - share(0) == pytest.approx(4 / 10, rel=0.01)


def test_what_passes_a_window_in_a_step_takes_no_more_than_half_the_memory() -> None:
    groups = (FullAttention(16, "full"), SlidingWindow(64, 16, pool="window"))
    blocks = blocks_that_fit(groups, {"full": 100, "window": 100}, 20_000, 50, step_tokens=10**6)
    assert blocks["window"] >= 100
    assert blocks["full"] >= 30


def test_a_state_stands_for_many_tokens() -> None:
    model = read_model("jamba-v0.1")
    nbytes = block_nbytes_of(model, 16)
    blocks = blocks_that_fit(groups_of(model, 16), nbytes, 10 * GIB, 3000, step_tokens=8192)
    assert blocks["state"] / blocks["full"] == pytest.approx((3000 / 1024 + 2) / (3000 / 16), rel=0.01)
    assert sum(blocks[pool] * nbytes[pool] for pool in blocks) <= 10 * GIB


def test_windows_alone_take_all_memory() -> None:
    groups = (SlidingWindow(64, 16, pool="window"),)
    assert blocks_that_fit(groups, {"window": 100}, 10**9, 99, step_tokens=8192) == {"window": 10**7}


def test_states_are_kept_far_apart() -> None:
    groups = groups_of(read_model("jamba-v0.1"), 48)
    assert [group for group in groups if isinstance(group, RecurrentState)] == [RecurrentState(1056, pool="state")]


def test_a_swapped_block_counts_for_the_bytes_it_has() -> None:
    groups = (FullAttention(16, "full"), SlidingWindow(64, 16, pool="window"), RecurrentState(1024, pool="state"))
    nbytes = {"full": 3000, "window": 1000, "state": 777}
    config = ServingConfig(100, groups=groups, block_nbytes=nbytes)
    assert config.tokens_per_block == {"full": 12.0, "window": 4.0, "state": 0.0}
    assert ServingConfig(100, 16).tokens_per_block == {"device": 16.0}
