"""What is written is read back the same, and written again to the same bytes."""

import tempfile
from collections.abc import Iterable
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces import Request, writer as trace_writer
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.writer import TraceWriter
from tests.traces.random_requests import as_values, traces
from tests.traces.trace_files import HASH_IDS, HASH_RUNS, LENGTHS, PAGEDKV, TOKENS


def written(requests: Iterable[Request]) -> bytes:
    sink = BytesIO()
    with TraceWriter(sink) as writer:
        for request in requests:
            writer.write(request)
    return sink.getvalue()


def read(content: bytes) -> list[Request]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        with TraceReader(file.name) as trace:
            return list(trace)


@given(traces())
def test_requests_come_back_as_they_were(requests: list[Request]) -> None:
    content = written(requests)
    again = read(content)
    assert as_values(again) == as_values(requests)
    assert written(again) == content


@pytest.mark.parametrize("text", [HASH_IDS, HASH_RUNS, LENGTHS, PAGEDKV, TOKENS])
def test_every_format_with_one_clock_comes_back(text: str) -> None:
    requests = read(text.encode())
    content = written(requests)
    assert as_values(read(content)) == as_values(requests)
    assert written(read(content)) == content


def test_the_bytes_never_change() -> None:
    assert written(read(PAGEDKV.encode())).decode() == (
        '{"format":"pagedkv-trace","version":1,"block_size":16}\n'
        '{"arrival_s":0.0,"input_length":40,"output_length":3,"block_runs":[[5,2]]}\n'
        '{"arrival_s":0.5,"session":"s","input_length":40,"output_length":0,"num_samples":2,"priority":-1,'
        '"block_runs":[[5,2],[9,1]]}\n'
        '{"arrival_s":0.5,"input_length":16,"output_length":1,"block_runs":[[5,1]]}\n'
        '{"arrival_s":0.75,"input_length":7,"output_length":1}\n'
    )
    assert written(read(TOKENS.encode())).decode() == (
        '{"format":"pagedkv-trace","version":1}\n'
        '{"arrival_s":0.0,"input_length":5,"output_length":2,"token_ids":[5,6,7,8,9],"output_token_ids":[1,2]}\n'
        '{"arrival_s":1.25,"input_length":4,"output_length":3,"token_ids":[5,6,7,7]}\n'
    )


def without_ids(block_size: int = 0) -> Request:
    return Request(0.0, 5, 1, np.zeros(0, np.int64), block_size)


@pytest.mark.parametrize("num_waiting", [1, 50])
def test_rows_wait_for_the_block_size_in_memory_or_on_disk(monkeypatch: pytest.MonkeyPatch, num_waiting: int) -> None:
    monkeypatch.setattr(trace_writer, "MAX_WAITING_NBYTES", 1000)
    requests = [without_ids()] * num_waiting + [Request(1.0, 8, 1, np.array([3]), 8)]
    sink = BytesIO()
    with TraceWriter(sink) as writer:
        for request in requests[:-1]:
            writer.write(request)
        assert sink.getvalue() == b""
        writer.write(requests[-1])
        assert sink.getvalue().count(b"\n") == num_waiting + 2
    header, first, *_ = sink.getvalue().splitlines()
    assert header == b'{"format":"pagedkv-trace","version":1,"block_size":8}'
    assert first == b'{"arrival_s":0.0,"input_length":5,"output_length":1,"block_runs":[]}'
    assert as_values(read(sink.getvalue())) == as_values(requests)


def test_a_trace_whose_prompts_are_all_shorter_than_a_block_needs_no_block_size() -> None:
    content = written([without_ids(), without_ids()])
    assert content.startswith(b'{"format":"pagedkv-trace","version":1}\n')
    assert as_values(read(content)) == as_values([without_ids(), without_ids()])


def test_blocks_of_two_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="request 3 has blocks of 8 tokens, those before it of 4"):
        written([without_ids(), without_ids(4), without_ids(8)])
    with pytest.raises(ConfigurationError, match="request 2 has blocks of 8 tokens, those before it of no known size"):
        written([Request(0.0, 1, 1), without_ids(8)])


def test_an_arrival_that_could_not_be_read_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"request 1 arrives at 100000000001.0 s"):
        written([Request(1e11 + 1, 1, 1)])


def test_after_an_error_nothing_more_is_written() -> None:
    sink = BytesIO()
    with pytest.raises(ZeroDivisionError), TraceWriter(sink) as writer:  # noqa: PT012 - the error comes from outside
        writer.write(without_ids())
        raise ZeroDivisionError
    assert sink.getvalue() == b""
