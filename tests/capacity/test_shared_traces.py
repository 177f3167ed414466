"""Recorded traces, where they are at hand: pool, stack distances, and counts known from elsewhere agree."""

from itertools import islice
from pathlib import Path

import pytest

from pagedkv.planner.capacity.curve import default_capacities, measure_curve
from pagedkv.planner.capacity.pool_hits import lru_hits_by_capacity
from pagedkv.planner.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.planner.traces.reader import TraceReader
from tests.capacity import naive_cache

TRACES = Path(__file__).parents[3] / "shared" / "traces"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")

NUM_REQUESTS = {
    "mooncake_conversation.jsonl.gz": 12_031,
    "mooncake_synthetic.jsonl.gz": 3_993,
    "agentic_coding_interleaved.jsonl.gz": 1_545,
    "agent_text_blk16.jsonl.gz": 1_566,
}


def references_in(name: str, *, full_blocks_only: bool = False) -> BlockReferences:
    collector = ReferenceCollector(name, full_blocks_only=full_blocks_only)
    with TraceReader(TRACES / name) as trace:
        for request in trace:
            collector.add(request)
    return collector.references()


@pytest.mark.long
@pytest.mark.parametrize("name", NUM_REQUESTS)
def test_pool_and_stack_distances_agree_at_the_default_capacities(name: str) -> None:
    """``measure_curve`` compares them too; a test must not lean on that."""
    references = references_in(name)
    by_capacity = lru_hits_by_capacity(references)
    result = measure_curve(references, default_capacities(references))
    assert result.num_requests == NUM_REQUESTS[name]
    assert len(result.capacities) == 12, "ten, and two and four times the one in the middle"
    for capacity in result.capacities:
        assert result.hits["lru"][capacity] == by_capacity[capacity] <= result.hits["optimal"][capacity]
    assert by_capacity[-1] == result.ideal_hits == result.hits["optimal"][references.num_unique_blocks]


@pytest.mark.parametrize("capacity", [300, 3_000])
def test_the_beginning_of_a_trace_is_counted_as_with_lists(capacity: int) -> None:
    with TraceReader(TRACES / "mooncake_synthetic.jsonl.gz") as trace:
        requests = list(islice(trace, 300))
    collector = ReferenceCollector("trace")
    for request in requests:
        collector.add(request)
    prompts = [request.block_ids.tolist() for request in requests if request.block_ids is not None]
    result = measure_curve(collector.references(), [capacity])
    assert result.hits["lru"][capacity] == naive_cache.lru_hits(prompts, capacity)
    assert result.hits["optimal"][capacity] == naive_cache.min_hits(prompts, capacity)


def test_full_blocks_leave_out_one_id_of_every_odd_prompt() -> None:
    everything = references_in("mooncake_conversation.jsonl.gz")
    full = references_in("mooncake_conversation.jsonl.gz", full_blocks_only=True)
    num_partial = int((everything.input_lengths % 512 != 0).sum())
    assert full.num_block_refs == everything.num_block_refs - num_partial
    assert (full.num_prompt_blocks == full.input_lengths // 512).all()
