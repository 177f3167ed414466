"""The manager's promise about the identity of blocks (docs/design.md, Promises: 8), by direct examples."""

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    FullAttention,
    GroupSpec,
    MediaSpan,
    RequestKeys,
    SlidingWindow,
    hash_request_tokens,
)
from pagedkv.contract.keys import NO_KEYS
from tests.space.spaces import (
    allocate,
    cache,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
)

# 8. Identity

SALT = RequestKeys(salt=b"tenant-a")
LORA = RequestKeys(lora_name="tenant-a")
NEXT_LORA = RequestKeys(lora_name="tenant-a", lora_version="2")
IMAGE = RequestKeys(media=(MediaSpan(2, 4, b"tenant-a"),))
OTHER_IMAGE = RequestKeys(media=(MediaSpan(2, 4, b"tenant-b"),))
SHORTER_IMAGE = RequestKeys(media=(MediaSpan(2, 2, b"tenant-a"),))
ALL_KEYS = [NO_KEYS, SALT, RequestKeys(salt=b"tenant-b"), LORA, NEXT_LORA, IMAGE, OTHER_IMAGE, SHORTER_IMAGE]


@pytest.mark.parametrize("group", [FullAttention(4), SlidingWindow(4, 4)], ids=["full", "window"])
@pytest.mark.parametrize("keys", ALL_KEYS, ids=repr)
def test_promise_08_only_equal_keys_share(keys: RequestKeys, group: GroupSpec) -> None:
    """Not even the blocks behind the one that carries the key, which are all that a window needs."""
    space = new_space(group)
    cache(space, tokens(13), keys)
    assert [hit(space, tokens(13), other) for other in ALL_KEYS] == [12 if other == keys else 0 for other in ALL_KEYS]


def test_promise_08_a_copy_on_write_keeps_its_keys() -> None:
    """The fork completes a copy of the first block, which carries the salt."""
    space = new_space()
    row = prefill(space, tokens(2), SALT)
    (child,) = space.fork(row)
    space.append([child], tokens(3, first=2), [3])
    run_step(space)
    assert [hit(space, tokens(6), keys) for keys in (SALT, NO_KEYS)] == [4, 0]


def test_promise_08_blocks_before_an_image_are_shared() -> None:
    space = new_space()
    cache(space, tokens(13), RequestKeys(media=(MediaSpan(5, 2, b"cat"),)))
    assert hit(space, tokens(13)) == 4
    assert hit(space, tokens(13), RequestKeys(media=(MediaSpan(5, 2, b"dog"),))) == 4


def test_promise_08_an_image_in_a_later_chunk_of_the_prompt_counts() -> None:
    """Chunked prefill: the placeholders come by append, long after the keys."""
    keys = RequestKeys(media=(MediaSpan(9, 2, b"cat"),))
    space = new_space()
    row = prefill(space, tokens(6), keys)
    space.append([row], tokens(7, first=6), [7])
    run_step(space)
    assert hit(space, tokens(13), keys) == 12
    assert hit(space, tokens(13)) == 8


def test_promise_08_an_image_that_is_rolled_back_and_comes_again_counts() -> None:
    keys = RequestKeys(media=(MediaSpan(4, 4, b"cat"),))
    space = new_space()
    row = prefill(space, tokens(8), keys)
    space.truncate([row], [4])
    space.append([row], tokens(4, first=4), [4])
    run_step(space)
    assert hit(space, tokens(9), keys) == 8
    assert hit(space, tokens(9)) == 4


def test_promise_08_an_image_that_comes_after_a_fork_counts() -> None:
    keys = RequestKeys(media=(MediaSpan(9, 2, b"cat"),))
    space = new_space()
    row = prefill(space, tokens(8), keys)
    (child,) = space.fork(row)
    space.append([child], tokens(5, first=8), [5])
    run_step(space)
    assert hit(space, tokens(13), keys) == 12
    assert hit(space, tokens(13)) == 8


def test_promise_08_an_image_counts_after_swapping() -> None:
    keys = RequestKeys(media=(MediaSpan(5, 6, b"cat"),))
    space = new_space(num_host_blocks=11)
    row = prefill(space, tokens(8), keys)
    space.swap_out([row])
    run_step(space)
    space.swap_in([row])
    space.append([row], tokens(5, first=8), [5])
    run_step(space)
    assert hit(space, tokens(13), keys) == 12
    assert hit(space, tokens(13)) == 4


def test_promise_08_thousands_of_salts_do_not_pile_up() -> None:
    """A key that no block carries any more is forgotten, and never mistaken for another's."""
    space = new_space(num_blocks=41)
    live = prefill(space, tokens(9), RequestKeys(salt=b"live"))
    for number in range(5000):
        cache(space, tokens(9), RequestKeys(salt=b"%d" % number))
        assert hit(space, tokens(9), RequestKeys(salt=b"%d" % (number + 1))) == 0
    assert hit(space, tokens(9), RequestKeys(salt=b"4999")) == 8
    assert hit(space, tokens(9), RequestKeys(salt=b"live")) == 8
    assert space.num_tokens(live) == 9
    assert len(space._state.extra_keys) < 2500


def test_promise_08_digests_of_a_long_prompt() -> None:
    space = new_space(num_blocks=2100, max_tokens=10_000)
    row = allocate(space, tokens(8001))
    last = only_pool(space).block(space.block_ids(row)[-2])
    assert last.digest == hash_request_tokens(tokens(8001), 4)[-1]


GROUP_MIXES: dict[str, tuple[GroupSpec, ...]] = {
    "two pools": (FullAttention(4), SlidingWindow(8, 4, pool="other")),
    "one group": (FullAttention(4),),
    "equal block sizes": (FullAttention(4), SlidingWindow(8, 4)),
    "different block sizes": (SlidingWindow(8, 2), FullAttention(4), FullAttention(1)),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", GROUP_MIXES.values(), ids=GROUP_MIXES.keys())
@pytest.mark.parametrize(
    "keys", [NO_KEYS, RequestKeys("sql", "2", b"a", (MediaSpan(2, 9, b"cat"),))], ids=["-", "keys"]
)
def test_promise_08_blocks_carry_the_digests_of_the_reference(groups: tuple[GroupSpec, ...], keys: RequestKeys) -> None:
    """Prompt and appended tokens, in every group: names are those that any other machine computes."""
    pools = dict.fromkeys((group.pool for group in groups), 50)
    space = new_space(*groups, num_blocks=pools, weights_epoch="step-7")
    row = allocate(space, tokens(7), keys)
    for token in range(7, 13):
        space.append([row], [token])
    for index, group in enumerate(groups):
        expected = hash_request_tokens(tokens(13), group.block_size, keys, "step-7")
        pool = space._state.pools[group.pool]
        named = [pool.block(block) for block in space.block_ids(row, index)]
        assert [block.digest for block in named if block.digest is not None] == expected
        assert {block.group for block in named if block.digest is not None} == {index}


@pytest.mark.interpreted
def test_promise_08_digests_computed_elsewhere_may_be_brought() -> None:
    """They name the same blocks as those that the space computes itself."""
    prompt = tokens(14)
    digests = np.frombuffer(b"".join(hash_request_tokens(prompt, 4, SALT)), np.uint8).reshape(3, 32)
    space = new_space()
    row = allocate(space, prompt[:9], SALT)
    run_step(space)
    assert space.match(prompt, keys=SALT, digests=digests).num_tokens == 8
    other = space.allocate(prompt, keys=SALT, digests=digests)
    assert isinstance(other, Allocation)
    assert other.num_hit_tokens == 8
    named = [only_pool(space).block(block).digest for block in space.block_ids(other.row)]
    assert named == [*(digest.tobytes() for digest in digests), None]
    space.append([other.row, row], tokens(2), [2, 0])
    assert len(hash_request_tokens([*prompt, 0, 1], 4, SALT)) == space.statistics().pools[0].num_named
    space.check()
