"""PrefixIndex: driven against a dictionary, with digests that crowd into few buckets."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.prefix_index import KEYS, PrefixIndex, bucket_of, find, is_child_of, name_block
from pagedkv.blocks.record import BUCKET_NEXT, LIFE, NULL_BLOCK, SUCCESSOR, PoolArrays, new_pool_arrays
from pagedkv.contract.arrays import Uint32Array

NUM_BLOCKS = 16
NUM_CROWDED_BUCKETS = 2

blocks = st.integers(1, NUM_BLOCKS - 1)
groups = st.integers(0, 1)
first_words = st.sampled_from([0, 16, 32, 5, 2**32 - 16])
digests = st.tuples(first_words, st.integers(0, 1)).map(lambda ends: digest_of(*ends))


def digest_of(first: int, last: int = 0) -> bytes:
    """Make a digest with the given first and last word."""
    return np.array([first, *[7] * 6, last], ">u4").tobytes()


def words(digest: bytes) -> Uint32Array:
    return np.frombuffer(digest, ">u4").astype(np.uint32)


def new_arrays() -> PoolArrays:
    return new_pool_arrays(NUM_BLOCKS, 1, caching=True)


def name(arrays: PoolArrays, group: int, block: int, block_digest: bytes, parent: int = NULL_BLOCK) -> None:
    """Name a block as the child of what ``parent`` holds now."""
    arrays.digests[block] = words(block_digest)
    name_block(arrays, group + 1, block, parent, int(arrays.records[parent, LIFE]))


def indexed_blocks(arrays: PoolArrays) -> Iterator[int]:
    """All blocks that the buckets reach."""
    for first in arrays.buckets.tolist():
        block = first
        while block != NULL_BLOCK:
            yield block
            block = int(arrays.records[block, BUCKET_NEXT])


class IndexMachine(RuleBasedStateMachine):
    """An index, and the dictionary from (group, digest) to block that it must equal."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays = new_arrays()._replace(buckets=np.zeros(NUM_CROWDED_BUCKETS, np.int32))
        self.index = PrefixIndex(self.arrays)
        self.model: dict[tuple[int, bytes], int] = {}

    @rule(group=groups, block=blocks, digest=digests)
    def name(self, group: int, block: int, digest: bytes) -> None:
        """A nameless block gets a name that no block has."""
        if (group, digest) not in self.model and block not in self.model.values():
            name(self.arrays, group, block, digest)
            self.model[group, digest] = block

    @rule(block=blocks)
    def forget(self, block: int) -> None:
        """A named block loses its name, wherever it stands in its bucket."""
        if block in self.model.values():
            drop_name(self.arrays, block)
            self.model = {key: value for key, value in self.model.items() if value != block}

    @rule(group=groups, digest=digests)
    def find(self, group: int, digest: bytes) -> None:
        """What was named is found, what was forgotten is not."""
        assert self.index.find(group, digest) == self.model.get((group, digest))

    @invariant()
    def equals_the_dictionary(self) -> None:
        """Every name is found, and the index reaches exactly the named blocks."""
        assert {key: self.index.find(*key) for key in self.model} == self.model
        indexed = sorted(indexed_blocks(self.arrays))
        assert indexed == sorted(self.model.values()) == self.index.named_blocks().tolist()
        assert len(self.index) == len(self.model)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = pytest.mark.interpreted(IndexMachine.TestCase)


def most_in_a_bucket(all_words: Uint32Array) -> int:
    """How many of some digests lie in the fullest of as many buckets."""
    arrays = new_pool_arrays(len(all_words), 1, caching=True)
    assert len(arrays.buckets) == len(all_words)
    return int(np.bincount([bucket_of(arrays, 1, each) for each in all_words]).max())


@pytest.mark.interpreted
@pytest.mark.parametrize("shared", [[0], [1], [7], [0, 1, 2, 3], [4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7], [*range(7)]])
def test_digests_that_share_words_lie_in_different_buckets(shared: list[int]) -> None:
    """As those of 64 bits do that were filled up with zeros: in one bucket, each would pass all others."""
    all_words = np.random.default_rng(0).integers(0, 2**32, (1024, 8), np.uint32)
    all_words[:, shared] = 0
    assert most_in_a_bucket(all_words) <= 10
    all_words[:, shared] = all_words[0, shared]
    assert most_in_a_bucket(all_words) <= 10


@pytest.mark.interpreted
@pytest.mark.parametrize("word", range(8))
def test_digests_that_count_up_lie_in_different_buckets(word: int) -> None:
    all_words = np.zeros((1024, 8), np.uint32)
    all_words[:, word] = np.arange(1024)
    assert most_in_a_bucket(all_words) <= 10


@pytest.mark.interpreted
def test_a_bucket_is_the_same_on_every_machine() -> None:
    """In 64 bits that wrap, and in integers that do not."""
    arrays = new_pool_arrays(2**16, 1, caching=True)
    for all_words in (
        np.zeros(8, np.uint32),
        np.full(8, 2**32 - 1, np.uint32),
        np.array([5, 0, 1, 2**31, 7, 2**32 - 9, 3, 2], np.uint32),
    ):
        key_sums = [int(word) + key for word, key in zip(all_words, KEYS, strict=True)]
        mixed = sum(left * right for left, right in zip(key_sums[::2], key_sums[1::2], strict=True))
        assert bucket_of(arrays, 3, all_words) == (mixed // 2**31 + 3 * 0x9E3779B1) % len(arrays.buckets)


def test_groups_whose_names_meet_in_one_bucket_share_none() -> None:
    """Equal digests of two groups lie in different buckets, unless so many groups lie between them as there are."""
    arrays = new_arrays()
    other = len(arrays.buckets)
    name(arrays, 0, 3, digest_of(5))
    assert PrefixIndex(arrays).find(other, digest_of(5)) is None
    name(arrays, other, 4, digest_of(5))
    assert [PrefixIndex(arrays).find(group, digest_of(5)) for group in (0, other)] == [3, 4]


def test_a_digest_that_differs_in_its_last_bit_is_not_found() -> None:
    arrays = new_arrays()
    name(arrays, 0, 3, digest_of(16, 0))
    assert PrefixIndex(arrays).find(0, digest_of(16, 1)) is None
    assert PrefixIndex(arrays).find(0, digest_of(16, 0)) == 3


def test_groups_have_names_of_their_own() -> None:
    arrays = new_arrays()
    name(arrays, 0, 3, digest_of(1))
    name(arrays, 1, 4, digest_of(1))
    assert [PrefixIndex(arrays).find(group, digest_of(1)) for group in (0, 1, 2)] == [3, 4, None]


@pytest.mark.interpreted
def test_a_child_is_a_child_only_of_what_its_parent_held() -> None:
    """When the parent's content is given up, the link dies, though the parent's block may be named again."""
    arrays = new_arrays()
    name(arrays, 0, 1, digest_of(1))
    name(arrays, 0, 2, digest_of(2), parent=1)
    assert is_child_of(arrays, 1, 2, 1)
    assert not is_child_of(arrays, 2, 2, 1)  # another group
    assert not is_child_of(arrays, 1, 2, NULL_BLOCK)
    drop_name(arrays, 1)
    name(arrays, 0, 1, digest_of(1))
    assert not is_child_of(arrays, 1, 2, 1)
    assert find(arrays, 1, words(digest_of(2))) == 2


def test_a_parent_remembers_its_latest_child() -> None:
    arrays = new_arrays()
    name(arrays, 0, 1, digest_of(1))
    for child in (2, 3):
        name(arrays, 0, child, digest_of(child), parent=1)
    assert arrays.records[1, SUCCESSOR] == 3


def test_an_index_without_prefix_caching_finds_nothing() -> None:
    assert PrefixIndex(new_pool_arrays(8, 1, caching=False)).find(0, digest_of(1)) is None
