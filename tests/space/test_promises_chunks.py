"""Promise 22 of prompts that come in chunks: if the whole prompt is given, the cache keeps as much as at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import Allocation, BlockSpace, FullAttention, RequestKeys, SlidingWindow
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import TokenError
from tests.space.spaces import cache, found, new_space, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

CHUNK = 16
SHARED = tokens(40)
Say = Callable[[BlockSpace, Int32Array], dict[str, Any]]


def out_of_date(space: BlockSpace, whole: Int32Array) -> dict[str, Any]:
    answer = space.match(whole)
    space.advance(0.0)  # any action will do
    return {"match": answer}


SAID: dict[str, Say] = {
    "match": lambda space, whole: {"match": space.match(whole)},
    "match that is out of date": out_of_date,
    "prompt": lambda _, whole: {"prompt": whole},
    "both": lambda space, whole: {"match": space.match(whole), "prompt": whole},
}


PLENTY = 60
SCARCE = 32


def windowed(num_blocks: int = PLENTY) -> BlockSpace:
    return new_space(FullAttention(4), SlidingWindow(window=8, block_size=4), num_blocks=num_blocks, max_tokens=256)


def hits(say: Say | None, chunk: int = CHUNK, num_blocks: int = PLENTY) -> list[int]:
    """Serve questions after one shared prompt; return what each hits. ``say`` None: the whole is not given."""
    space = windowed(num_blocks)
    sizes = []
    for number in range(12):
        whole = np.concatenate([SHARED, tokens(13, first=1_000 + 100 * (number % 5))])
        hit = space.match(whole).num_tokens
        first = max(chunk, hit + 1)
        said = {} if say is None else say(space, whole)
        answer = space.allocate(whole[:first], **said)
        assert isinstance(answer, Allocation)
        sizes.append(answer.num_hit_tokens)
        run_step(space)
        for start in range(first, len(whole), chunk):
            part = whole[start : start + chunk]
            space.append([answer.row], part, [len(part)])
            run_step(space)
        for token in range(20):
            space.append([answer.row], [5_000 + token])
            run_step(space)
        space.free([answer.row])
        space.check()
    return sizes


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("chunk", [CHUNK, 5])
def test_promise_22_a_prompt_in_chunks_hits_as_one_that_comes_at_once(said: str, chunk: int) -> None:
    at_once = hits(SAID["match"], chunk=100)
    assert sum(at_once) > 0
    assert hits(SAID[said], chunk) == at_once


def test_promise_22_all_ways_to_say_the_whole_prompt_are_one_where_blocks_are_scarce() -> None:
    by_match, *others = (hits(say, num_blocks=SCARCE) for say in SAID.values())
    assert others == [by_match] * len(others)


def test_promise_22_negative_control_a_first_chunk_alone_hits_less() -> None:
    assert 2 * sum(hits(None, num_blocks=SCARCE)) < sum(hits(SAID["prompt"], num_blocks=SCARCE))


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        (tokens(10), "prompt has 10 tokens, fewer than the 16"),
        (np.append(tokens(12), tokens(20, first=900)), "its token 12 is 900, not"),
    ],
)
def test_promise_22_what_does_not_begin_the_prompt_is_refused(whole: Int32Array, message: str) -> None:
    space = windowed()
    with unchanged(space), pytest.raises(TokenError, match=message):
        space.allocate(tokens(CHUNK), prompt=whole)


def test_promise_22_an_answer_for_another_prompt_is_refused() -> None:
    space = windowed()
    whole = tokens(30)
    with unchanged(space), pytest.raises(TokenError, match="another prompt"):
        space.allocate(whole[:CHUNK], match=space.match(tokens(31)), prompt=whole)


def test_promise_22_the_whole_prompt_goes_by_the_keys_of_its_request() -> None:
    space = windowed()
    keys = RequestKeys(salt=b"a")
    sizes = []
    for _ in range(2):
        answer = space.allocate(SHARED[:36], prompt=SHARED, keys=keys)
        assert isinstance(answer, Allocation)
        sizes.append(answer.num_hit_tokens)
        run_step(space)
        space.append([answer.row], SHARED[36:], [4])
        run_step(space)
    assert sizes[0] == 0 < sizes[1]
    assert space.match(SHARED).num_tokens == 0


def test_promise_22_an_answer_that_is_out_of_date_knows_a_junction_behind_the_chunk() -> None:
    space = windowed()
    whole = np.concatenate([SHARED, tokens(13, first=900)])
    cache(space, np.concatenate([SHARED, tokens(13, first=500)]))
    said = out_of_date(space, whole)
    answer = space.allocate(whole[:CHUNK], **said)
    assert isinstance(answer, Allocation)
    assert (said["match"].num_tokens, answer.num_hit_tokens) == (40, 12)
    run_step(space)
    space.append([answer.row], whole[CHUNK:], [len(whole) - CHUNK])
    run_step(space)
    space.free([answer.row])
    assert found(space, whole) == [8, 9, 11, 12], "the junction, and the end"


def test_promise_22_a_chunk_of_which_a_part_is_brought_says_the_whole_prompt() -> None:
    space = windowed()
    whole = tokens(41)
    answer = space.allocate(whole[:CHUNK], prompt=whole, num_external_tokens=8)
    assert isinstance(answer, Allocation)
    run_step(space)
    space.append([answer.row], whole[CHUNK:], [len(whole) - CHUNK])
    run_step(space)
    space.append([answer.row], tokens(30, first=700), [30])
    run_step(space)
    assert found(space, whole) == [8, 9]
