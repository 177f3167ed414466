"""The configuration: what cannot work is refused when it is built, with the number that is wrong."""

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from pagedkv import ChunkedLocal, CrossAttention, FullAttention, GroupSpec, RecurrentState, SlidingWindow, SpaceConfig
from pagedkv.errors import ConfigurationError

FULL = (FullAttention(),)
TWO_POOLS = (FullAttention(), RecurrentState(64))

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "full attention, block of 0": (lambda: FullAttention(0), "block_size .* got 0"),
    "full attention, block of -16": (lambda: FullAttention(-16), "block_size .* got -16"),
    "window, block of 0": (lambda: SlidingWindow(8, block_size=0), "block_size .* got 0"),
    "window of 0 tokens": (lambda: SlidingWindow(0), "window must be at least 1, got 0"),
    "window of -1 tokens": (lambda: SlidingWindow(-1), "window must be at least 1, got -1"),
    "negative sinks": (lambda: SlidingWindow(8, num_sink_tokens=-4), "num_sink_tokens .* got -4"),
    "chunk, block of 0": (lambda: ChunkedLocal(8, block_size=0), "block_size .* got 0"),
    "chunk of 0 tokens": (lambda: ChunkedLocal(0), "chunk_size .* got 0"),
    "checkpoints every 0 tokens": (lambda: RecurrentState(0), "checkpoint_interval .* got 0"),
    "no checkpoints": (lambda: RecurrentState(4, max_checkpoints=0), "max_checkpoints .* at least 1, got 0"),
    "half a checkpoint": (lambda: RecurrentState(4, max_checkpoints=0.5), "max_checkpoints must be"),  # type: ignore[arg-type]
    "a bound on nothing": (lambda: RecurrentState(4, prefix_caching=False, max_checkpoints=2), "bounds what is cached"),
    "an encoder of 0 tokens": (lambda: CrossAttention(0), "max_encoder_tokens .* got 0"),
    "an encoder, block of 0": (lambda: CrossAttention(8, 0), "block_size .* got 0"),
    "an encoder alone": (lambda: SpaceConfig((CrossAttention(8),), 10), "after all others, of which there must be one"),
    "an encoder first": (lambda: SpaceConfig((CrossAttention(8), *FULL), 10), "put groups of cross-attention after"),
    "no groups": (lambda: SpaceConfig((), num_blocks=10), "groups must be a tuple or list of group rules"),
    "0 sequences": (lambda: SpaceConfig(FULL, 10, max_sequences=0), "max_sequences .* got 0"),
    "-1 sequences": (lambda: SpaceConfig(FULL, 10, max_sequences=-1), "max_sequences .* got -1"),
    "0 tokens": (lambda: SpaceConfig(FULL, 10, max_tokens=0), "max_tokens .* got 0"),
    "watermark of 1": (lambda: SpaceConfig(FULL, 10, watermark=1.0), r"watermark must be in \[0, 1\), got 1\.0"),
    "negative watermark": (lambda: SpaceConfig(FULL, 10, watermark=-0.1), r"watermark .* got -0\.1"),
    "watermark that is no number": (lambda: SpaceConfig(FULL, 10, watermark=float("nan")), "watermark .* got nan"),
    "caching said in words": (lambda: SpaceConfig(FULL, 10, prefix_caching="no"), "prefix_caching must be True .*'no'"),  # type: ignore[arg-type]
    "caching as a number": (lambda: SpaceConfig(FULL, 10, prefix_caching=0), "True or False, got 0"),  # type: ignore[arg-type]
    "no events, in words": (lambda: SpaceConfig(FULL, 10, events="off"), "events must be True or False, got 'off'"),  # type: ignore[arg-type]
    "0 blocks": (lambda: SpaceConfig(FULL, 0), "pool 'device' needs at least 2 blocks .* got 0"),
    "the null block alone": (lambda: SpaceConfig(FULL, 1), "at least 2 blocks .* got 1"),
    "-5 blocks": (lambda: SpaceConfig(FULL, -5), "at least 2 blocks .* got -5"),
    "1 host block": (lambda: SpaceConfig(FULL, 10, 1), "host pool of 'device' needs 0 blocks or at least 2, got 1"),
    "-2 host blocks": (lambda: SpaceConfig(FULL, 10, -2), "0 blocks or at least 2, got -2"),
    "one number for two pools": (lambda: SpaceConfig(TWO_POOLS, 10), r"one number \(10\) .*\['device', 'state'\]"),
    "a pool left out": (lambda: SpaceConfig(TWO_POOLS, {"device": 10}), r"missing \['state'\], unknown \[\]"),
    "a pool too many": (lambda: SpaceConfig(FULL, {"device": 9, "x": 9}), r"missing \[\], unknown \['x'\]"),
    "a host pool too many": (lambda: SpaceConfig(FULL, 9, {"device": 9, "x": 9}), r"num_host_blocks .*unknown \['x'\]"),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build()


@pytest.mark.parametrize("group", [FullAttention(1), SlidingWindow(1, 1), ChunkedLocal(1, 1), RecurrentState(1)])
def test_the_smallest_sizes_are_accepted(group: GroupSpec) -> None:
    config = SpaceConfig((group,), num_blocks=2, num_host_blocks=2, max_sequences=1, max_tokens=1, watermark=0.0)
    assert config.blocks_by_pool() == config.host_blocks_by_pool() == {group.pool: 2}


def test_a_list_of_groups_is_taken_as_well() -> None:
    groups: list[GroupSpec] = [FullAttention(16), SlidingWindow(128)]
    assert SpaceConfig(groups, num_blocks=10) == SpaceConfig(tuple(groups), num_blocks=10)
    assert hash(SpaceConfig(groups, num_blocks=10)) == hash(SpaceConfig(tuple(groups), num_blocks=10))
    with pytest.raises(ConfigurationError, match="groups must be a tuple or list of group rules"):
        SpaceConfig([FullAttention(16), "window"], num_blocks=10)  # type: ignore[list-item]


def test_pools_are_those_that_groups_name_in_their_order() -> None:
    groups = (RecurrentState(64), FullAttention(), SlidingWindow(128), FullAttention(pool="other"))
    config = SpaceConfig(groups, num_blocks={"device": 10, "other": 5, "state": 7})
    assert config.pool_names == ("state", "device", "other")
    assert config.blocks_by_pool() == {"state": 7, "device": 10, "other": 5}
    assert config.host_blocks_by_pool() == {"state": 0, "device": 0, "other": 0}


def test_a_checkpoint_interval_is_the_block_size_of_its_group() -> None:
    assert RecurrentState(512).block_size == 512


def test_a_configuration_does_not_change() -> None:
    config = SpaceConfig(FULL, 10)
    with pytest.raises(AttributeError):
        config.watermark = 0.5  # type: ignore[misc]


def test_defaults_are_those_documented() -> None:
    config = SpaceConfig(FULL, 10)
    assert (config.watermark, config.prefix_caching, config.events) == (0.01, True, False)
    assert config.host_blocks_by_pool() == {"device": 0}


specs = st.one_of(
    st.builds(FullAttention, st.integers(1, 64), st.sampled_from(["device", "other"])),
    st.builds(SlidingWindow, st.integers(1, 64), st.integers(1, 64), st.integers(0, 9)),
    st.builds(ChunkedLocal, st.integers(1, 64), st.integers(1, 64)),
    st.builds(RecurrentState, st.integers(1, 64)),
)
configurations = st.builds(
    lambda groups, events, epoch: SpaceConfig(
        tuple(groups), {group.pool: 9 for group in groups}, events=events, weights_epoch=epoch
    ),
    st.lists(specs, min_size=1, max_size=3),
    st.booleans(),
    st.text(max_size=5),
)


@given(configurations)
def test_a_configuration_is_shown_as_what_builds_it(config: SpaceConfig) -> None:
    assert eval(repr(config)) == config  # noqa: S307 - what a configuration shows is Python


def test_a_configuration_shows_only_what_is_not_as_it_is_by_itself() -> None:
    config = SpaceConfig((FullAttention(), SlidingWindow(64, num_sink_tokens=4)), num_blocks=100, events=True)
    assert repr(config) == (
        "SpaceConfig(groups=(FullAttention(), SlidingWindow(window=64, num_sink_tokens=4)), "
        "num_blocks=100, events=True)"
    )
