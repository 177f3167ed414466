"""Block ids made from tokens: equal exactly where whole prefixes are equal."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces import Request
from pagedkv.planner.traces.token_blocks import TokenBlocks, with_block_ids

PROMPTS = st.lists(st.lists(st.integers(0, 1) | st.just(2**31 - 1), min_size=1, max_size=12), max_size=12)


def request_of(token_ids: list[int]) -> Request:
    tokens = np.array(token_ids, np.int32)
    return Request(0.5, len(token_ids), 2, None, 0, "s", 3, 4, tokens, np.array([1, 2], np.int32))


@given(PROMPTS, st.integers(1, 5))
def test_an_id_names_a_whole_prefix(prompts: list[list[int]], block_size: int) -> None:
    numbers: dict[tuple[int, ...], int] = {}
    for prompt, request in zip(prompts, with_block_ids("t", map(request_of, prompts), block_size), strict=True):
        ends = range(block_size, len(prompt) + 1, block_size)
        expected = [numbers.setdefault(tuple(prompt[:end]), len(numbers)) for end in ends]
        assert request.block_ids is not None
        assert request.block_ids.tolist() == expected
        assert request.block_ids.dtype == np.int64
        assert (request.block_size, request.prompt_token_ids, request.output_token_ids) == (block_size, None, None)
        assert (request.input_length, request.output_length, request.arrival_s) == (len(prompt), 2, 0.5)
        assert (request.session, request.num_samples, request.priority) == ("s", 3, 4)


def test_a_request_without_tokens_is_refused() -> None:
    others = Request(0.0, 1, 1, block_ids=np.array([3]), block_size=16)
    requests = with_block_ids("trace", [request_of([1]), others], 4)
    assert next(requests).input_length == 1
    with pytest.raises(TraceError, match=r"trace: request 2 has no tokens to make block ids of. Give `block_size`"):
        next(requests)
    with pytest.raises(TraceError, match=r"trace: no request has tokens to make block ids of. Give `block_size`"):
        list(with_block_ids("trace", [Request(0.0, 1, 1)], 4))


def test_a_request_of_unknown_content_among_others_keeps_its_lengths() -> None:
    unknown, known = with_block_ids("trace", [Request(0.0, 9, 1), request_of([1] * 9)], 4)
    assert (unknown.input_length, unknown.block_ids, unknown.block_size) == (9, None, 4)
    assert known.block_ids is not None
    assert known.block_ids.tolist() == [0, 1]


def test_a_block_has_tokens() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 token, got 0"):
        TokenBlocks(0)
