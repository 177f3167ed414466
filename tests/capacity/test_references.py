"""What is collected of a trace: counts, ideal hits in blocks and tokens, and what is refused."""

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.errors import TraceError
from pagedkv.planner.capacity.references import ReferenceCollector
from pagedkv.planner.traces.request import Request
from tests.capacity.naive_cache import ideal_hits
from tests.capacity.prompts import Prompt, prompts, references_of, request_of


@pytest.mark.interpreted
@settings(deadline=None)
@given(prompts())
def test_counts_and_ideal_hits_are_those_of_a_set_of_seen_blocks(trace: list[Prompt]) -> None:
    references = references_of(trace)
    assert references.num_requests == len(trace)
    assert references.num_block_refs == sum(map(len, trace))
    assert references.num_unique_blocks == len({block_id for prompt in trace for block_id in prompt})
    assert references.longest_prompt == max(map(len, trace))
    assert references.ideal_hits().tolist() == ideal_hits(trace)


@pytest.mark.interpreted
@settings(deadline=None)
@given(trace=prompts(), block_size=st.integers(1, 4), full_blocks_only=st.booleans())
def test_tokens_of_ideal_hits_are_those_that_the_blocks_have(
    trace: list[Prompt], block_size: int, *, full_blocks_only: bool
) -> None:
    """The last block of an odd prompt lacks a token: its id is then a third one, that only its like has."""
    collector = ReferenceCollector("trace", full_blocks_only=full_blocks_only)
    seen: set[tuple[int, int]] = set()
    num_hit_tokens, num_refs = 0, 0
    for number, prompt in enumerate(trace):
        lacks = 1 if number % 2 and prompt and block_size > 1 else 0
        ids = [*prompt[:-1], prompt[-1] + 2**50] if lacks else prompt
        sizes = [block_size] * len(ids)
        if lacks:
            sizes[-1] -= 1
        collector.add(request_of(ids, max(1, sum(sizes)), block_size))
        counted = [pair for pair in zip(ids, sizes, strict=True) if not full_blocks_only or pair[1] == block_size]
        num_refs += len(counted)
        num_hit_tokens += sum(size for block_id, size in counted if (block_id, size) in seen)
        seen.update(counted)
    if num_refs == 0:
        with pytest.raises(TraceError, match="every prompt is shorter than a block"):
            collector.references()
        return
    references = collector.references()
    assert references.num_block_refs == num_refs
    assert references.ideal_hit_tokens().sum() == num_hit_tokens


def test_requests_without_ids_are_refused() -> None:
    collector = ReferenceCollector("trace.csv")
    with pytest.raises(
        TraceError,
        match=r"^trace.csv: request 1 has lengths, and no content .* is told by pagedkv replay and pagedkv plan; ",
    ):
        collector.add(Request(0.0, 5, 0))


def test_ids_that_name_no_prefixes_are_refused() -> None:
    collector = ReferenceCollector("trace")
    collector.add(request_of([1, 2]))
    with pytest.raises(TraceError, match=r"^trace: request 2 repeats a block id after other blocks than before. Give"):
        collector.add(request_of([2, 1]))


def test_blocks_of_two_sizes_are_refused() -> None:
    collector = ReferenceCollector("trace")
    for block_size in (0, 64, 64):  # 0: the trace has not told yet
        collector.add(request_of([], 9, block_size))
    with pytest.raises(TraceError, match="request 4 has blocks of 32 tokens, those before it of 64"):
        collector.add(request_of([1], 40, 32))


def test_a_trace_without_a_block_is_refused() -> None:
    collector = ReferenceCollector("trace")
    collector.add(request_of([], 9, 16))
    with pytest.raises(TraceError, match=r"^trace: every prompt is shorter than a block"):
        collector.references()
