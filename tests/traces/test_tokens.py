"""Tokens from block ids: fixed for ever, equal exactly where prefixes are equal."""

import numpy as np
from hypothesis import given, strategies as st

from pagedkv.planner.traces import Request, tokenized
from pagedkv.planner.traces.request import MAX_BLOCK_ID
from pagedkv.planner.traces.token_blocks import OUTPUT_PART, PROMPT_PART, block_token_ids, unique_token_ids

WORD = (1 << 64) - 1


def splitmix64_number(seed: int, index: int) -> int:
    """The generator as published, in plain integers."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & WORD
    return mixed(z)


def mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_splitmix64_as_written_here_is_the_published_one() -> None:
    # First numbers for the seed 1234567, as printed by the reference implementation.
    assert [splitmix64_number(1234567, index) for index in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_tokens_never_change() -> None:
    golden = [1896895516, 926699317, 56766092, 1610072088, 799708786, 941207521, 1196683274, 1437431571, 60004268]
    assert block_token_ids(np.array([0, 1, MAX_BLOCK_ID]), 3).tolist() == golden
    assert unique_token_ids(0, PROMPT_PART, 3).tolist() == [881083607, 2069860056, 380799153]
    assert unique_token_ids(0, OUTPUT_PART, 3).tolist() == [126053276, 2007354334, 86089307]


@given(st.lists(st.integers(0, MAX_BLOCK_ID), max_size=5), st.integers(1, 40))
def test_tokens_are_a_function_of_id_and_offset(block_ids: list[int], block_size: int) -> None:
    expected = [
        splitmix64_number(mixed(block_id), offset) >> 33 for block_id in block_ids for offset in range(block_size)
    ]
    token_ids = block_token_ids(np.array(block_ids, np.int64), block_size)
    assert token_ids.tolist() == expected
    assert token_ids.dtype == np.int32


@given(st.integers(0, 2**40), st.sampled_from([PROMPT_PART, OUTPUT_PART]), st.integers(0, 40))
def test_unique_tokens_are_a_function_of_request_part_and_offset(number: int, part: int, num_tokens: int) -> None:
    seed = mixed((1 << 63) + 2 * number + part)
    expected = [splitmix64_number(seed, offset) >> 33 for offset in range(num_tokens)]
    assert unique_token_ids(number, part, num_tokens).tolist() == expected


def request_of(input_length: int, block_ids: list[int] | None) -> Request:
    ids = None if block_ids is None else np.array(block_ids, np.int64)
    return Request(1.5, input_length, 3, ids, 4 if block_ids else 0, "session")


def test_prompts_share_the_tokens_that_their_ids_cover_and_no_others() -> None:
    left, right, other = tokenized([request_of(11, [5, 6]), request_of(11, [5, 6]), request_of(11, [5, 7])])
    assert (
        left.prompt_token_ids[:8].tolist()
        == right.prompt_token_ids[:8].tolist()
        == block_token_ids(np.array([5, 6]), 4).tolist()
    )
    assert left.prompt_token_ids[:4].tolist() == other.prompt_token_ids[:4].tolist()
    assert left.prompt_token_ids[4] != other.prompt_token_ids[4]
    assert left.prompt_token_ids[8] != right.prompt_token_ids[8]
    assert left.output_token_ids[0] != right.output_token_ids[0]
    assert (left.arrival_s, left.session, len(left.prompt_token_ids), len(left.output_token_ids)) == (
        1.5,
        "session",
        11,
        3,
    )


def test_a_partly_filled_block_with_an_id_is_cut_to_the_prompt() -> None:
    (request,) = tokenized([request_of(6, [5, 6])])
    assert request.prompt_token_ids.tolist() == block_token_ids(np.array([5, 6]), 4)[:6].tolist()


def test_prompts_without_ids_share_nothing() -> None:
    requests = list(tokenized([request_of(6, None), request_of(6, None), request_of(3, []), request_of(3, [])]))
    assert [len(request.prompt_token_ids) for request in requests] == [6, 6, 3, 3]
    assert len({int(request.prompt_token_ids[0]) for request in requests}) == 4
    assert all(request.prompt_token_ids.dtype == request.output_token_ids.dtype == np.int32 for request in requests)


def test_a_request_with_tokens_of_its_own_sends_these() -> None:
    prompt, output = np.array([3, 1, 2], np.int32), np.array([7], np.int32)
    both = Request(0.0, 3, 1, prompt_token_ids=prompt, output_token_ids=output, num_samples=4, priority=-2)
    prompt_only = Request(0.0, 3, 2, np.array([5]), 2, prompt_token_ids=prompt)
    output_only = Request(0.0, 2, 1, np.array([5]), 2, output_token_ids=output)
    first, second, third = tokenized([both, prompt_only, output_only])
    assert (first.prompt_token_ids.tolist(), first.output_token_ids.tolist()) == ([3, 1, 2], [7])
    assert (first.num_samples, first.priority) == (4, -2)
    assert second.prompt_token_ids.tolist() == [3, 1, 2]
    assert second.output_token_ids.tolist() == unique_token_ids(1, OUTPUT_PART, 2).tolist()
    assert third.prompt_token_ids.tolist() == block_token_ids(np.array([5]), 2).tolist()
    assert third.output_token_ids.tolist() == [7]
