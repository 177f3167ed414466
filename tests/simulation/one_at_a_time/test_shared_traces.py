"""The replay of recorded traces against the naive computation, where the traces are at hand."""

from itertools import islice
from pathlib import Path

import pytest

from pagedkv.planner.simulation.one_at_a_time import ReplayConfig, Replayer
from pagedkv.planner.traces import tokenized
from pagedkv.planner.traces.reader import TraceReader
from tests.simulation.one_at_a_time.naive import NaiveReplay, trace_keys

TRACES = Path(__file__).parents[4] / "shared" / "traces"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")

LIMITS = {
    "mooncake_conversation.jsonl.gz": 500,
    "mooncake_synthetic.jsonl.gz": 350,
    "agentic_coding_sessions.jsonl.gz": 70,
    "agentic_coding_interleaved.jsonl.gz": 70,
    "agent_text_blk16.jsonl.gz": 400,
    "azure_llm_2023_conv.csv.gz": 1000,
    "azure_llm_2023_code.csv.gz": 700,
    "servegen_reason_5rps_30min.csv.gz": 800,
}
"""Requests replayed, so that plain Python takes less than a second; make test-long takes ten times as many."""


@pytest.mark.parametrize("num_usable", [4_000, 1_000_000], ids=["tight", "ample"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_recorded_trace_is_counted_as_the_naive_computation_counts(name: str, num_usable: int) -> None:
    count_both(name, num_usable, LIMITS[name])


@pytest.mark.long
@pytest.mark.parametrize("num_usable", [8_000, 1_000_000], ids=["tight", "ample"])
@pytest.mark.parametrize("name", LIMITS)
def test_ten_times_as_much_of_a_recorded_trace(name: str, num_usable: int) -> None:
    count_both(name, num_usable, 10 * LIMITS[name])


def count_both(name: str, num_usable: int, limit: int) -> None:
    replayer = Replayer(ReplayConfig(num_usable + 1, 16), lambda: 0)
    naive = NaiveReplay(num_usable, 16)
    with TraceReader(TRACES / name) as trace:
        requests = list(islice(trace, limit))
    for number, (request, with_tokens) in enumerate(zip(requests, tokenized(requests), strict=True)):
        replayer.serve(with_tokens)
        naive.serve(trace_keys(request, number, 16), request.input_length, request.output_length)
    summary = replayer.summary()
    assert summary.counts.num_requests == len(requests)
    assert summary.counts.num_rejected == naive.num_rejected
    assert summary.counts.num_hit_blocks == naive.num_hit_blocks
    assert summary.num_evictions == naive.num_evictions
    assert summary.counts.peak_blocks_in_use == naive.peak
