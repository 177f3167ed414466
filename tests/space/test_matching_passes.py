"""The passes of a match, one by one: the results of each, as on the pages that draw them."""

import copy

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import BlockSpace, FullAttention, MissCause, RecurrentState, SlidingWindow
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.contract.keys import NO_KEYS
from pagedkv.space.hits import NO_IDS, Known, prepare_prompt
from pagedkv.space.matching import find_known, follow_all, longest_boundary
from tests.space.spaces import allocate, cache, hit, named, new_space, run_step, tokens

pytestmark = pytest.mark.interpreted

PROMPT = tokens(33)


def known_of(space: BlockSpace, prompt: npt.NDArray[np.int32]) -> Known:
    """What is known of a prompt without extra keys behind the first pass."""
    state = space._state
    asked = prepare_prompt(state, prompt, NO_KEYS, None, 0)
    extra_ids = [NO_IDS for _ in state.lanes]
    return find_known(state, asked, extra_ids, follow_all(state, asked, extra_ids))


def drop(space: BlockSpace, group: int, *places: int) -> None:
    """Let a group lose the blocks of the prompt under test at some places."""
    blocks = named(space, PROMPT, group)
    for place in places:
        drop_name(space._state.groups[group].pool.arrays, blocks[place])


def drawn_space() -> BlockSpace:
    """The space that is drawn where matching is described."""
    groups = FullAttention(4), SlidingWindow(8, 4), RecurrentState(8)
    space = new_space(*groups, num_blocks={"device": 60, "state": 10}, shed_windows=False, explain=True)
    cache(space, PROMPT)
    drop(space, 0, 7)
    drop(space, 1, 0, 1, 5, 6, 7)
    return space


def test_each_pass_says_what_is_drawn() -> None:
    space = drawn_space()
    known = known_of(space, PROMPT)
    assert [chain.num_tokens for chain in known.chains.values()] == [28]
    assert (known.limit, known.aligned(known.limit)) == (28, 24)
    ending = longest_boundary(known)
    assert (ending.num_tokens, ending.tails) == (16, ())
    assert [(blocks > 0).tolist() for blocks in ending.block_ids] == [
        [True] * 4,
        [False, False, True, True],
        [False, True],
    ]
    assert hit(space, PROMPT) == 16


def test_what_a_pass_lacks_is_what_is_explained() -> None:
    """Give back what the window lacks, and the hit is as long as the last common end of blocks allows."""
    space = drawn_space()
    miss = space.explain(PROMPT)
    assert (miss.num_hit_tokens, miss.group, miss.position, miss.cause) == (16, 1, 20, MissCause.WINDOW_GONE)
    cache(space, PROMPT[:25])
    assert hit(space, PROMPT) == 24


def test_the_hit_that_is_drawn_where_misses_are_explained() -> None:
    space = new_space(FullAttention(4), SlidingWindow(4, 4), shed_windows=False, explain=True)
    cache(space, PROMPT[:17])
    drop(space, 1, 2)
    assert hit(space, PROMPT[:13]) == 8
    miss = space.explain(PROMPT[:13])
    assert (miss.num_hit_tokens, miss.group, miss.position, miss.cause) == (8, 1, 8, MissCause.WINDOW_GONE)


def test_a_hit_ends_before_what_is_pending_if_a_settled_block_is_behind() -> None:
    """As drawn where boundaries are: the window still has a block behind those that are computed again."""
    space = new_space(FullAttention(4), SlidingWindow(4, 4), shed_windows=False)
    cache(space, PROMPT[:21])
    drop(space, 0, 2, 3, 4)
    drop(space, 1, 2, 3)
    allocate(space, PROMPT[:20])
    known = known_of(space, PROMPT[:21])
    (chain,) = known.chains.values()
    assert (len(chain.blocks), chain.num_settled) == (5, 2)
    assert (longest_boundary(known).num_tokens, hit(space, PROMPT[:21])) == (8, 8)
    run_step(space)
    assert hit(space, PROMPT[:21]) == 20


def test_pending_blocks_hit_where_a_row_could_compute_them() -> None:
    space = new_space(FullAttention(4), SlidingWindow(4, 4))
    allocate(space, PROMPT[:20])
    (chain,) = known_of(space, PROMPT[:21]).chains.values()
    assert (len(chain.blocks), chain.num_settled) == (5, 0)
    ending = longest_boundary(known_of(space, PROMPT[:21]))
    assert ending.num_tokens == 20
    assert (ending.block_ids[1] > 0).all(), "all of the window's, since it may have to compute from 0 on"


def test_passes_change_nothing_that_was_handed_to_them() -> None:
    space = drawn_space()
    known = known_of(space, PROMPT)
    before = copy.deepcopy([lookup.arguments[2:] for lookup in known.lookups.values()]), known.chain_blocks(28)
    assert longest_boundary(known).num_tokens == longest_boundary(known).num_tokens == 16
    after = [lookup.arguments[2:] for lookup in known.lookups.values()], known.chain_blocks(28)
    np.testing.assert_equal(after, before)
