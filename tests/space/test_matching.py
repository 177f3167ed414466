"""Matching and publishing: a hit is granted for the content itself, never for a digest."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import Allocation, BlockSpace, FullAttention, RequestKeys, SlidingWindow, hash_request_tokens
from pagedkv.blocks.record import AHEAD, EXTRA, LIFE, LOOKAHEAD, SUCCESSOR
from pagedkv.contract.keys import NO_KEYS
from tests.space.spaces import allocate, cache, hit, new_space, only_pool, run_step, tokens

Tamper = Callable[[BlockSpace, int], None]

VICTIM = tokens(9)
FORGER = tokens(9, first=100)


def digests_of(token_ids: npt.NDArray[np.int32], keys: RequestKeys = NO_KEYS) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(hash_request_tokens(token_ids, 4, keys)), np.uint8).reshape(-1, 32)


def cache_under(
    space: BlockSpace,
    token_ids: npt.NDArray[np.int32],
    digests: npt.NDArray[np.uint8],
    keys: RequestKeys = NO_KEYS,
) -> None:
    """Cache tokens under digests that the caller brings, right or wrong."""
    allocation = space.allocate(token_ids, digests=digests, keys=keys)
    assert isinstance(allocation, Allocation)
    run_step(space)
    space.free(allocation.row)


def hits_both_ways(space: BlockSpace, token_ids: npt.NDArray[np.int32], keys: RequestKeys = NO_KEYS) -> set[int]:
    """Match with digests brought, and without."""
    brought = space.match(token_ids, digests=digests_of(token_ids, keys), keys=keys).num_tokens
    return {brought, hit(space, token_ids, keys)}


@pytest.mark.interpreted
def test_a_block_under_a_forged_digest_is_never_handed_out() -> None:
    """Peers' fault 4: the forger's blocks carry the victim's digests; the victim's prompt must not hit them."""
    space = new_space()
    cache_under(space, FORGER, digests_of(VICTIM))
    assert block_named(space, VICTIM, 0)
    assert hits_both_ways(space, VICTIM) == {0}


def test_the_right_digests_do_hit() -> None:
    """What the test above would see if the content were right."""
    space = new_space()
    cache_under(space, VICTIM, digests_of(VICTIM))
    assert hits_both_ways(space, VICTIM) == {8}


def test_a_forged_digest_does_not_displace_the_true_block() -> None:
    space = new_space()
    cache(space, VICTIM)
    cache_under(space, FORGER, digests_of(VICTIM))
    assert hits_both_ways(space, VICTIM) == {8}
    assert hits_both_ways(space, FORGER) == {0}
    space.check()


def test_the_forger_is_not_handed_the_true_block_either() -> None:
    """Blocks of one name are merged once computed, if their content is equal; here only the digests are."""
    space = new_space()
    cache(space, VICTIM)
    allocation = space.allocate(FORGER, digests=digests_of(VICTIM))
    assert isinstance(allocation, Allocation)
    before = space.block_ids(allocation.row)
    run_step(space)
    assert space.block_ids(allocation.row) == before


def test_a_victim_of_a_forged_digest_still_computes_its_own_blocks() -> None:
    space = new_space()
    cache_under(space, FORGER, digests_of(VICTIM))
    row = allocate(space, VICTIM)
    run_step(space)
    assert space.num_tokens(row) == 9
    space.check()


def test_equal_tokens_behind_another_prefix_do_not_hit() -> None:
    """The forger's second block has the victim's tokens and digest, but follows other content."""
    space = new_space()
    forged = np.concatenate([FORGER[:4], VICTIM[4:]])
    cache(space, VICTIM[:5])
    cache_under(space, forged, np.stack([digests_of(FORGER)[0], digests_of(VICTIM)[1]]))
    assert hits_both_ways(space, VICTIM) == {4}


def test_equal_tokens_under_another_salt_do_not_hit() -> None:
    ours, theirs = RequestKeys(salt=b"ours"), RequestKeys(salt=b"theirs")
    space = new_space()
    cache_under(space, VICTIM, digests_of(VICTIM, ours), theirs)
    cache(space, FORGER, ours)  # so that our key is known
    assert hits_both_ways(space, VICTIM, ours) == {0}


def block_named(space: BlockSpace, token_ids: npt.NDArray[np.int32], index: int) -> int:
    """Find the block that carries the name of logical block ``index``."""
    block = only_pool(space).prefix_index.find(0, digests_of(token_ids)[index].tobytes())
    assert block is not None
    return block


def tamper_tokens(space: BlockSpace, block: int) -> None:
    only_pool(space).arrays.tokens[block, 3] ^= 1


def tamper_extra_keys(space: BlockSpace, block: int) -> None:
    only_pool(space).arrays.records[block, EXTRA] ^= 1


def tamper_parents_life(space: BlockSpace, block: int) -> None:
    only_pool(space).arrays.records[block, LIFE] += 1


@pytest.mark.parametrize("tamper", [tamper_tokens, tamper_extra_keys, tamper_parents_life])
def test_each_part_of_the_verification_counts(tamper: Tamper) -> None:
    """Negative controls: content that differs in one respect is no hit (a dead parent costs its child)."""
    space = new_space()
    cache(space, VICTIM)
    tamper(space, block_named(space, VICTIM, 0))
    assert hit(space, VICTIM) == (4 if tamper is tamper_parents_life else 0)


@pytest.mark.parametrize("tamper", [tamper_tokens, tamper_extra_keys])
def test_looked_up_blocks_are_verified_too(tamper: Tamper) -> None:
    """The same in a group whose prefix may be partly gone, where blocks are found by digest."""
    space = new_space(SlidingWindow(4, 4))
    cache(space, VICTIM)
    assert hit(space, VICTIM) == 8
    tamper(space, block_named(space, VICTIM, 1))
    assert hit(space, VICTIM) == 4


@pytest.mark.interpreted
def test_both_branches_are_found_though_a_block_remembers_one_successor() -> None:
    space = new_space()
    left, right = np.concatenate([VICTIM[:4], FORGER]), VICTIM
    cache(space, left)
    cache(space, right)
    assert hit(space, left) == 12
    assert hit(space, right) == 8


def test_a_hit_does_not_need_the_successor() -> None:
    space = new_space()
    cache(space, VICTIM)
    only_pool(space).arrays.records[:, SUCCESSOR] = 0
    assert hit(space, VICTIM) == 8


def test_a_chain_whose_middle_is_evicted_hits_up_to_there_and_is_completed_again() -> None:
    space = new_space(FullAttention(4), num_blocks=6)
    cache(space, VICTIM)
    other = allocate(space, tokens(16, first=50))  # takes the three empty blocks, and the chain's tail
    assert hit(space, VICTIM) == 4
    space.free(other)
    cache(space, VICTIM)
    assert hit(space, VICTIM) == 8


LONG = tokens(4 * (LOOKAHEAD + 9) + 1)


def chain_of(space: BlockSpace, token_ids: npt.NDArray[np.int32]) -> list[int]:
    blocks: list[int] = space.match(token_ids).block_ids[0].tolist()
    return blocks


@pytest.mark.interpreted
def test_blocks_know_what_lies_ahead_however_the_chain_came_about() -> None:
    """At once, over several turns, and token by token."""
    at_once, in_turns, growing = (new_space() for _ in range(3))
    cache(at_once, LONG)
    for end in range(13, len(LONG) + 1, 8):
        cache(in_turns, LONG[:end])
    row = allocate(growing, LONG[:1])
    for token in LONG[1:].tolist():
        growing.append([row], [token])
    run_step(growing)
    for space in (at_once, in_turns, growing):
        chain = chain_of(space, LONG)
        assert len(chain) == LOOKAHEAD + 9
        ahead = only_pool(space).arrays.records[chain, AHEAD].tolist()
        assert ahead == chain[LOOKAHEAD:] + [0] * LOOKAHEAD
        space.check()


@pytest.mark.interpreted
def test_what_lies_ahead_is_never_trusted() -> None:
    space = new_space()
    cache(space, LONG)
    chain = chain_of(space, LONG)
    records = only_pool(space).arrays.records
    for wrong in (0, chain[0], chain[-1], 90):
        records[chain, AHEAD] = wrong
        assert chain_of(space, LONG) == chain
        assert hit(space, FORGER) == 0


@pytest.mark.interpreted
@pytest.mark.parametrize("block_size", [1, 3, 8, 15, 16, 17, 32, 40])
def test_every_token_of_a_block_is_compared_whatever_its_size(block_size: int) -> None:
    space = new_space(FullAttention(block_size))
    prompt = tokens(3 * block_size + 1)
    cache(space, prompt)
    assert hit(space, prompt) == 3 * block_size
    for place in range(3 * block_size):
        other = prompt.copy()
        other[place] += 1000
        assert hit(space, other) == place // block_size * block_size
