"""keys_of_blocks: the media of all blocks in one sweep, as the plain encoding of one block gives them."""

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import MediaSpan, RequestKeys
from pagedkv.blocks.digests import keys_of_blocks
from pagedkv.contract.keys import NO_KEYS

# In any order, overlapping or apart, with digests of any length.
spans = st.builds(
    MediaSpan, start=st.integers(0, 40), num_tokens=st.integers(1, 20) | st.just(2**30), digest=st.binary(max_size=5)
)
request_keys = st.builds(RequestKeys, salt=st.binary(max_size=2), media=st.lists(spans, max_size=6).map(tuple))


@pytest.mark.interpreted
@settings(deadline=None, max_examples=300)
@given(
    keys=request_keys,
    epoch=st.sampled_from(["", "7"]),
    block_size=st.integers(1, 17),
    first=st.integers(0, 6),
    num_blocks=st.integers(0, 12),
)
def test_every_block_gets_the_key_that_it_has_alone(
    keys: RequestKeys, epoch: str, block_size: int, first: int, num_blocks: int
) -> None:
    expected = {}
    for index in range(first, first + num_blocks):
        key = keys.media_key(index * block_size, (index + 1) * block_size)
        expected[index] = keys.first_block_key(epoch) + key if index == 0 else key
    found = keys_of_blocks(keys, epoch, block_size, first, first + num_blocks)
    assert found == {index: key for index, key in expected.items() if key}


def test_media_keep_the_order_of_the_request_within_a_block() -> None:
    early, late = MediaSpan(1, 2, b"early"), MediaSpan(2, 2, b"late")
    swapped = keys_of_blocks(RequestKeys(media=(late, early)), "", 4, 0, 1)
    assert swapped == {0: RequestKeys(media=(late,)).media_key(0, 4) + RequestKeys(media=(early,)).media_key(0, 4)}
    assert swapped != keys_of_blocks(RequestKeys(media=(early, late)), "", 4, 0, 1)


def test_the_golden_encoding_of_a_medium() -> None:
    """Tag, number of fields, then offset and length, then digest, each behind its length; little-endian."""
    keys = RequestKeys(media=(MediaSpan(3, 300, b"\x00\xff"),))
    second = "0402" + "10000000" + "ffffffffffffffff" + "2c01000000000000" + "02000000" + "00ff"
    assert keys_of_blocks(keys, "", 4, 1, 2) == {1: bytes.fromhex(second)}


def test_without_keys_no_block_has_any() -> None:
    assert keys_of_blocks(NO_KEYS, "", 4, 0, 100) == {}
