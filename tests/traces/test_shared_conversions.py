"""Recorded traces, where they are at hand, come through our format unchanged; sessions merge as known elsewhere."""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pagedkv.planner.traces import Request
from pagedkv.planner.traces.merging import interleave_sessions
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.writer import TraceWriter

TRACES = Path(__file__).parents[3] / "shared" / "traces"

pytestmark = [pytest.mark.plain_only, pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")]

NAMES = [
    "mooncake_conversation.jsonl.gz",
    "mooncake_synthetic.jsonl.gz",
    "agentic_coding_sessions.jsonl.gz",
    "agentic_coding_interleaved.jsonl.gz",
    "agent_text_blk16.jsonl.gz",
    "azure_llm_2023_conv.csv.gz",
    "azure_llm_2023_code.csv.gz",
    "servegen_reason_5rps_30min.csv.gz",
]
MAX_NUM_REQUESTS = 2_000
"""Of each trace, so that the test takes seconds."""


def beginning(trace: TraceReader) -> Iterator[Request]:
    """Read the first requests on one clock."""
    requests = interleave_sessions(trace.sessions(), 600.0) if trace.session_per_row else iter(trace)
    return islice(requests, MAX_NUM_REQUESTS)


def write(path: Path, requests: Iterable[Request]) -> int:
    with path.open("wb") as file, TraceWriter(file) as writer:
        for request in requests:
            writer.write(request)
    return writer.num_requests


def is_same(left: Request, right: Request) -> bool:
    """Compare all fields; what an id stands for only where there is one."""
    has_ids = left.block_ids is not None and len(left.block_ids) > 0
    return all(
        equal(getattr(left, field.name), getattr(right, field.name))
        for field in fields(Request)
        if has_ids or field.name != "block_size"
    )


def equal(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return left == right


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_trace_comes_through_unchanged(tmp_path: Path, name: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with TraceReader(TRACES / name) as trace:
        num_requests = write(first, beginning(trace))
    with TraceReader(TRACES / name) as trace, TraceReader(first) as again:
        assert all(is_same(left, right) for left, right in zip(beginning(trace), again, strict=True))
    with TraceReader(first) as again:
        assert write(second, again) == num_requests
    assert first.read_bytes() == second.read_bytes()


def test_sessions_are_interleaved_as_by_those_who_prepared_the_traces(tmp_path: Path) -> None:
    """The README of the traces says how; times there are whole milliseconds."""
    chosen = tmp_path / "sessions"
    with gzip.open(TRACES / "agentic_coding_sessions.jsonl.gz", "rt") as lines:
        chosen.write_text("".join(islice(filter(is_chosen, lines), 60)))
    with (
        TraceReader(chosen) as sessions,
        TraceReader(TRACES / "agentic_coding_interleaved.jsonl.gz") as golden,
    ):
        done = list(interleave_sessions(sessions.sessions(), 60.0, 60.0))
        assert len(done) == 1545
        for request, expected in zip(done, golden, strict=True):
            session = str(request.session).partition(" agent ")[0]  # there subagents have no names
            plain = replace(request, session=session, waits_for=(), pause_s=None)
            assert is_same(replace(plain, arrival_s=round(request.arrival_s, 3)), expected)


def is_chosen(line: str) -> bool:
    requests = json.loads(line)["requests"]
    num_refs = sum(count for request in requests for _, count in request["hash_runs"])
    return (
        len(requests) >= 5 and num_refs <= 120_000 and max(request["input_length"] for request in requests) <= 200_000
    )
