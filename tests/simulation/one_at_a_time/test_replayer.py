"""The replayer against the naive computation, and its counts against their definitions."""

from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.planner.simulation.one_at_a_time import ReplayConfig, Replayer, ReplaySummary
from pagedkv.planner.traces import ConversationWorkload, Request, TokenizedRequest, tokenized
from tests.simulation.one_at_a_time.naive import NaiveReplay, PrefixKeys, trace_keys


def ticks(step_ns: int = 1000) -> Iterator[int]:
    time_ns = 0
    while True:
        yield time_ns
        time_ns += step_ns


def replayer(num_usable: int, block_size: int) -> Replayer:
    clock = ticks()
    return Replayer(ReplayConfig(num_usable + 1, block_size), lambda: next(clock))


def request_of(prompt: Iterable[int], output: Iterable[int] = ()) -> TokenizedRequest:
    return TokenizedRequest(0.0, np.array(list(prompt), np.int32), np.array(list(output), np.int32))


def assert_same(summary: ReplaySummary, naive: NaiveReplay) -> None:
    assert summary.counts.num_rejected == naive.num_rejected
    assert summary.counts.num_hit_blocks == naive.num_hit_blocks
    assert summary.counts.num_hit_tokens == naive.num_hit_blocks * naive.block_size
    assert summary.num_evictions == naive.num_evictions
    assert summary.counts.peak_blocks_in_use == naive.peak


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@pytest.mark.interpreted
@settings(deadline=None)  # the first example may have to wait for loops to compile
@given(
    num_usable=st.integers(1, 12),
    block_size=st.integers(1, 4),
    requests=st.lists(st.tuples(token_lists, token_lists | st.just([])), max_size=12),
)
def test_tokens_are_counted_as_the_naive_computation_counts(
    num_usable: int, block_size: int, requests: list[tuple[list[int], list[int]]]
) -> None:
    tested, naive, keys = replayer(num_usable, block_size), NaiveReplay(num_usable, block_size), PrefixKeys(block_size)
    for prompt, output in requests:
        request = request_of(prompt, output)
        tested.serve(request)
        naive.serve(keys.of(request), len(prompt), len(output))
        assert_same(tested.summary(), naive)


@st.composite
def traces(draw: st.DrawFn, trace_block_size: int) -> list[Request]:
    """Draw prompts as paths in a small tree of blocks, so that equal ids mean equal prefixes."""
    children: dict[tuple[int, int], int] = {}
    requests = []
    for path in draw(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=12)):
        block_ids = [-1]
        for branch in path:
            block_ids.append(children.setdefault((block_ids[-1], branch), len(children)))
        input_length = max(1, len(path) * trace_block_size + draw(st.integers(0, trace_block_size - 1)))
        output_length = draw(st.integers(0, 2 * trace_block_size))
        ids = np.array(block_ids[1:], np.int64)
        requests.append(Request(0.0, input_length, output_length, ids, trace_block_size))
    return requests


@pytest.mark.interpreted
@settings(deadline=None)
@given(st.data(), st.sampled_from([2, 4, 6]), st.integers(1, 7), st.integers(1, 40))
def test_traces_are_counted_as_the_naive_computation_counts(
    data: st.DataObject, trace_block_size: int, block_size: int, num_usable: int
) -> None:
    requests = data.draw(traces(trace_block_size))
    tested, naive = replayer(num_usable, block_size), NaiveReplay(num_usable, block_size)
    for number, (request, with_tokens) in enumerate(zip(requests, tokenized(requests), strict=True)):
        tested.serve(with_tokens)
        naive.serve(trace_keys(request, number, block_size), request.input_length, request.output_length)
        assert_same(tested.summary(), naive)


@pytest.mark.parametrize("num_usable", [200, 1500, 100_000])
def test_conversations_are_counted_as_the_naive_computation_counts(num_usable: int) -> None:
    tested, naive, keys = replayer(num_usable, 16), NaiveReplay(num_usable, 16), PrefixKeys(16)
    for request in ConversationWorkload(num_sessions=60).requests():
        tested.serve(request)
        naive.serve(keys.of(request), len(request.prompt_token_ids), len(request.output_token_ids))
    assert_same(tested.summary(), naive)
    assert naive.num_hit_blocks > 0


class EvictsHeadsFirst(NaiveReplay):
    """A wrong rule: the head of a sequence goes before its tail."""

    def _free(self, keys: Sequence[Hashable]) -> None:
        super()._free(keys[::-1])


class ForgetsOutput(NaiveReplay):
    """A wrong rule: generated blocks are not cached."""

    def serve(self, keys: Sequence[Hashable], input_length: int, output_length: int) -> None:
        """Serve the request with names of its own for all blocks that hold output."""
        num_prompt_keys = input_length // self.block_size
        forgotten = [object() for _ in keys[num_prompt_keys:]]
        super().serve([*keys[:num_prompt_keys], *forgotten], input_length, output_length)


@pytest.mark.parametrize("wrong", [EvictsHeadsFirst, ForgetsOutput])
def test_a_wrong_rule_would_be_noticed(wrong: type[NaiveReplay]) -> None:
    naive, keys = wrong(1500, 16), PrefixKeys(16)
    tested = replayer(1500, 16)
    for request in ConversationWorkload(num_sessions=60).requests():
        tested.serve(request)
        naive.serve(keys.of(request), len(request.prompt_token_ids), len(request.output_token_ids))
    with pytest.raises(AssertionError):
        assert_same(tested.summary(), naive)


def test_generated_blocks_hit_in_the_next_turn() -> None:
    tested = replayer(100, 4)
    tested.serve(request_of(range(6), range(100, 110)))
    tested.serve(request_of([*range(6), *range(100, 110), 7]))
    assert tested.summary().counts.num_hit_tokens == 16


def test_the_last_prompt_token_is_never_a_hit() -> None:
    tested = replayer(100, 4)
    for _ in range(2):
        tested.serve(request_of(range(8)))
    assert tested.summary().counts.num_hit_tokens == 4
    assert tested.summary().counts.num_prompt_blocks == 2  # (8 - 1) // 4 of each prompt


def test_what_exceeds_the_pool_is_rejected_and_changes_nothing() -> None:
    fitting = request_of(range(8), range(4))  # to the last slot
    tested, undisturbed = replayer(3, 4), replayer(3, 4)
    for request in (fitting, request_of(range(13)), request_of(range(12), [0]), fitting):
        tested.serve(request)
    for request in (fitting, fitting):
        undisturbed.serve(request)
    counts = tested.summary().counts
    assert (counts.num_requests, counts.num_rejected, counts.num_served) == (4, 2, 2)
    expected = undisturbed.summary().as_dict() | {"num_requests": 4, "num_with_content": 4, "num_rejected": 2}
    assert tested.summary().as_dict() == expected


@pytest.mark.interpreted
def test_every_figure_follows_its_definition() -> None:
    tested = replayer(10, 4)
    tested.serve(request_of(range(9), range(100, 102)))  # 11 tokens in 3 blocks
    tested.serve(request_of(range(9), range(200, 206)))  # 15 tokens in 4 blocks, 2 of them hit
    summary = tested.summary()
    assert summary.as_dict() == {
        "num_blocks": 11,
        "block_size": 4,
        "num_requests": 2,
        "num_with_content": 2,
        "num_rejected": 0,
        "num_prompt_tokens": 18,
        "num_output_tokens": 8,
        "num_prompt_blocks": 4,
        "num_hit_tokens": 8,
        "num_hit_blocks": 2,
        "peak_blocks_in_use": 4,
        "sum_blocks_in_use": 7,
        "num_evictions": 0,
        "block_hit_ratio": 0.5,
        "token_hit_ratio": 8 / 18,
        "mean_blocks_in_use": 3.5,
        "waste": 2 / 28,
    }
    assert (summary.timing.bookkeeping_s, summary.timing.ns_per_token) == (4e-6, 4000 / 26)


def test_a_replay_of_nothing_divides_by_nothing() -> None:
    summary = replayer(10, 4).summary()
    assert (summary.block_hit_ratio, summary.token_hit_ratio, summary.mean_blocks_in_use, summary.waste) == (0, 0, 0, 0)
    assert summary.timing.ns_per_token == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (1, 16), (-5, 16), (100, 0), (100, -1)])
def test_sizes_out_of_range_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigurationError):
        Replayer(ReplayConfig(num_blocks, block_size), lambda: 0)
