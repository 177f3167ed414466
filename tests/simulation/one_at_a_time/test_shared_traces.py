"""The replay of recorded traces against the naive computation, where the traces are at hand."""

from itertools import islice
from pathlib import Path

import pytest

from pagedkv.simulation.one_at_a_time import ReplayConfig, Replayer
from pagedkv.traces import tokenized
from pagedkv.traces.reader import TraceReader
from tests.simulation.one_at_a_time.naive import NaiveReplay, trace_keys

TRACES = Path(__file__).parents[4] / "shared" / "traces"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")

LIMITS = {
    "mooncake_conversation.jsonl.gz": 1500,
    "mooncake_synthetic.jsonl.gz": 1000,
    "agentic_coding_sessions.jsonl.gz": 200,
    "agentic_coding_interleaved.jsonl.gz": 200,
    "agent_text_blk16.jsonl.gz": 783,
    "azure_llm_2023_conv.csv.gz": 3000,
    "azure_llm_2023_code.csv.gz": 2000,
    "servegen_reason_5rps_30min.csv.gz": 2500,
}
"""Requests replayed, so that plain Python takes a second or two."""


@pytest.mark.parametrize("num_usable", [8_000, 1_000_000], ids=["tight", "ample"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_recorded_trace_is_counted_as_the_naive_computation_counts(name: str, num_usable: int) -> None:
    replayer = Replayer(ReplayConfig(num_usable + 1, 16), lambda: 0)
    naive = NaiveReplay(num_usable, 16)
    with TraceReader(TRACES / name) as trace:
        requests = list(islice(trace, LIMITS[name]))
    for number, (request, with_tokens) in enumerate(zip(requests, tokenized(requests), strict=True)):
        replayer.serve(with_tokens)
        naive.serve(trace_keys(request, number, 16), request.input_length, request.output_length)
    summary = replayer.summary()
    assert summary.counts.num_requests == LIMITS[name]
    assert summary.counts.num_rejected == naive.num_rejected
    assert summary.counts.num_hit_blocks == naive.num_hit_blocks
    assert summary.num_evictions == naive.num_evictions
    assert summary.counts.peak_blocks_in_use == naive.peak
