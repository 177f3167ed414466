"""Prompts that continue earlier ones have the digests that hashing gives, whatever is kept of the earlier ones."""

from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import MediaSpan, RequestKeys, hash_request_tokens
from pagedkv.contract.keys import NO_KEYS
from pagedkv.routing.prompts import PromptHasher
from tests.space.spaces import tokens

pytestmark = pytest.mark.interpreted

SIZE: Final = 4
KEYS: Final = (NO_KEYS, RequestKeys(salt=b"a"), RequestKeys("sql", "v2", b"", (MediaSpan(9, 5, b"image"),)))
ROOM: Final = 700
"""Bytes: two prompts of 48 tokens, or some short ones."""


def expected(prompt: np.ndarray, keys: RequestKeys, size: int = SIZE) -> bytes:
    return b"".join(hash_request_tokens(prompt, size, keys))


def hashed(hasher: PromptHasher, prompt: np.ndarray, keys: RequestKeys = NO_KEYS, size: int = SIZE) -> bytes:
    return hasher.hash(prompt, keys).digests[size].astype(">u4").tobytes()


@settings(max_examples=60)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 48), st.integers(0, 30), st.integers(0, len(KEYS) - 1)),
        min_size=1,
        max_size=14,
    ),
    room=st.sampled_from((0, 100, ROOM, 10_000)),
)
def test_digests_are_those_of_hashing(turns: list[tuple[int, int, int, int]], room: int) -> None:
    """Each prompt takes some tokens of one of four conversations, and goes on with others."""
    hasher = PromptHasher([SIZE], least_tokens=8, most_nbytes=room)
    for conversation, cut, more, which in turns:
        prompt = np.concatenate((tokens(cut, first=100 * (conversation // 2)), tokens(more, first=7 * conversation)))
        prompt.setflags(write=bool(which))
        assert hashed(hasher, prompt, KEYS[which]) == expected(prompt, KEYS[which])


def test_a_continued_prompt_is_not_hashed_again() -> None:
    """A negative control: what is kept is what is given, so that a wrong digest there would be seen."""
    hasher = PromptHasher([SIZE], least_tokens=8)
    hasher.hash(tokens(40))
    assert hashed(hasher, tokens(60)) == expected(tokens(60), NO_KEYS)
    hasher._memory._in_ring[-1].digests[:] ^= 1
    again = hashed(hasher, tokens(60))
    assert again != expected(tokens(60), NO_KEYS)
    assert hashed(hasher, tokens(60), RequestKeys(salt=b"a")) == expected(tokens(60), RequestKeys(salt=b"a"))
    other = tokens(60)
    other[0] += 1
    assert hashed(hasher, other) == expected(other, NO_KEYS)


def test_tokens_that_change_later_were_copied() -> None:
    """Also those behind a read-only view."""
    hasher = PromptHasher([SIZE], least_tokens=8)
    own = np.array(tokens(60))
    view = own[:40]
    view.setflags(write=False)
    for prompt in (own, view):
        hasher.hash(prompt)
    own += 1
    for prompt in (tokens(60), own):
        assert hashed(hasher, prompt) == expected(prompt, NO_KEYS)


def test_digests_that_were_given_are_not_overwritten() -> None:
    hasher = PromptHasher([SIZE], least_tokens=8, most_nbytes=ROOM)
    first = hasher.hash(tokens(40)).digests[SIZE]
    before = first.copy()
    for number in range(20):
        hasher.hash(tokens(40, first=1000 + 50 * number))
    assert (first == before).all()


def test_a_continued_prompt_takes_the_place_of_the_one_before() -> None:
    """Otherwise the turns of one conversation would push out all others."""
    hasher = PromptHasher([SIZE], least_tokens=8, most_nbytes=100_000)
    for length in range(40, 80, SIZE):
        hasher.hash(tokens(length))
    assert [len(known) for known in hasher._memory._by_key.values()] == [1]
    for number in range(10):
        hasher.hash(np.concatenate((tokens(8), tokens(40, first=1000 * (number + 1)))))
    assert [len(known) for known in hasher._memory._by_key.values()] == [4], "branches of one beginning are bounded"


def test_several_block_sizes_are_kept_apart() -> None:
    hasher = PromptHasher([SIZE, 8], least_tokens=8)
    for length in (40, 64, 50, 80):
        for size in (SIZE, 8):
            assert hashed(hasher, tokens(length), size=size) == expected(tokens(length), NO_KEYS, size)


def test_short_prompts_are_not_kept() -> None:
    hasher = PromptHasher([SIZE])
    hasher.hash(tokens(400))
    assert not hasher._memory._by_key
