"""Reading traces: every format, plain and gzip, and every fault with its line."""

import contextlib
import gzip
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces import Request, lines
from pagedkv.planner.traces.reader import TraceReader
from tests.traces.trace_files import (
    BROKEN,
    HASH_IDS,
    HASH_RUNS,
    LENGTHS,
    PAGEDKV,
    SESSIONS,
    TOKENS,
    BrokenTrace,
    as_text,
)


def plain(text: str) -> bytes:
    return text.encode()


def zipped(text: str) -> bytes:
    return gzip.compress(text.encode())


def read(path: Path, block_size: int | None = None) -> list[Request]:
    with TraceReader(path, block_size) as trace:
        return list(trace)


def ids(request: Request) -> list[int] | None:
    return None if request.block_ids is None else request.block_ids.tolist()


@pytest.fixture(params=[plain, zipped])
def trace_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Write a trace, plain or gzip, under a name that tells nothing."""

    def write(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(request.param(text))
        return path

    return write


def test_hash_ids_cover_a_partly_filled_last_block(trace_of: Callable[[str], Path]) -> None:
    first, second, third = read(trace_of(HASH_IDS))
    assert (first.arrival_s, first.input_length, first.output_length) == (0.0, 1100, 20)
    assert (first.block_size, ids(first), first.session) == (512, [0, 1, 2], None)
    assert (second.arrival_s, ids(second)) == (3.0, [0, 1, 3])
    assert ids(third) == [4]


def test_hash_runs_are_expanded_and_tell_the_block_size(trace_of: Callable[[str], Path]) -> None:
    first, second, third = read(trace_of(HASH_RUNS))
    assert (first.block_size, ids(first), first.session) == (0, [], "a")  # no row has had ids yet
    assert (second.block_size, ids(second), second.arrival_s) == (16, [7, 8, 9, 10, 11, 20], 0.5)
    assert (third.block_size, ids(third)) == (16, [])


def test_ids_of_sessions_are_moved_apart(trace_of: Callable[[str], Path]) -> None:
    requests = read(trace_of(SESSIONS))
    assert [request.session for request in requests] == ["one", "one", "two"]
    assert [ids(request) for request in requests] == [[1, 2], [1, 2, 9], [11]]
    assert [request.arrival_s for request in requests] == [0.0, 2.5, 0.0]
    assert {request.block_size for request in requests} == {64}


def test_lengths_alone_have_no_ids(trace_of: Callable[[str], Path]) -> None:
    first, second = read(trace_of(LENGTHS))
    assert (first.arrival_s, first.input_length, first.output_length) == (0.0, 374, 44)
    assert (first.block_size, ids(first)) == (0, None)
    assert (second.arrival_s, second.output_length) == (4.315, 0)


def test_our_own_format_says_everything(trace_of: Callable[[str], Path]) -> None:
    first, second, third, fourth = read(trace_of(PAGEDKV))
    assert (first.arrival_s, first.input_length, first.output_length) == (0.0, 40, 3)
    assert (first.block_size, ids(first), first.session) == (16, [5, 6], None)
    assert (first.num_samples, first.priority, first.prompt_token_ids, first.output_token_ids) == (1, 0, None, None)
    assert (second.num_samples, second.priority, second.session) == (2, -1, "s")
    assert (ids(second), ids(third), ids(fourth)) == ([5, 6, 9], [5], None)


def test_our_own_format_may_hold_tokens(trace_of: Callable[[str], Path]) -> None:
    first, second = read(trace_of(TOKENS))
    assert first.prompt_token_ids is not None
    assert first.output_token_ids is not None
    assert (first.input_length, first.output_length, first.block_size, ids(first)) == (5, 2, 0, None)
    assert (first.prompt_token_ids.tolist(), first.output_token_ids.tolist()) == ([5, 6, 7, 8, 9], [1, 2])
    assert first.prompt_token_ids.dtype == first.output_token_ids.dtype == np.int32
    assert (second.input_length, second.output_length, second.output_token_ids) == (4, 3, None)


def test_null_is_as_good_as_no_key(trace_of: Callable[[str], Path]) -> None:
    header = {"format": "pagedkv-trace", "version": 1, "block_size": None}
    row = {
        "arrival_s": 0,
        "input_length": 3,
        "output_length": 1,
        "session": None,
        "block_ids": None,
        "token_ids": [1, 2, 3],
    }
    (request,) = read(trace_of(as_text(header, row)))
    assert (request.session, ids(request), request.block_size) == (None, None, 0)


def test_columns_may_come_in_any_order_with_others_between(trace_of: Callable[[str], Path]) -> None:
    (request,) = read(trace_of("output_length, model ,input_length,arrived_s\r\n7,gpt,5,1.5\r\n"))
    assert (request.arrival_s, request.input_length, request.output_length) == (1.5, 5, 7)


def test_blank_lines_and_a_missing_last_line_end_are_accepted(trace_of: Callable[[str], Path]) -> None:
    assert len(read(trace_of("\n" + HASH_IDS.replace("\n", "\n\n").rstrip()))) == 3


def test_the_given_block_size_replaces_the_traces_own(trace_of: Callable[[str], Path]) -> None:
    row = {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2, 3]}
    (request,) = read(trace_of(as_text(row)), 48)
    assert (request.block_size, ids(request)) == (48, [1, 2, 3])
    runs = {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_runs": [[1, 2]]}
    assert read(trace_of(as_text(runs)), 48)[0].block_size == 48
    session = {"session": "s", "block_size": 64, "requests": [runs | {"t": 0}]}
    assert read(trace_of(as_text(session)), 48)[0].block_size == 48
    own = {"arrival_s": 0, "input_length": 100, "output_length": 1, "block_runs": [[1, 2]]}
    header = {"format": "pagedkv-trace", "version": 1}
    for named in ({}, {"block_size": 16}):
        assert read(trace_of(as_text(header | named, own)), 48)[0].block_size == 48


def test_a_given_block_size_is_checked_on_every_row(trace_of: Callable[[str], Path]) -> None:
    with pytest.raises(TraceError, match="0 block ids do not fit a prompt of 9 tokens at 8") as raised:
        read(trace_of(HASH_RUNS), 8)
    assert raised.value.line == 1


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_block_size_must_be_positive(tmp_path: Path, block_size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"at least 1 token, got {block_size}"):
        TraceReader(tmp_path / "never opened", block_size)


@pytest.mark.parametrize("broken", [pytest.param(broken, id=name) for name, broken in BROKEN.items()])
def test_what_is_broken_is_reported_with_its_line(tmp_path: Path, broken: BrokenTrace) -> None:
    path = tmp_path / "trace"
    path.write_bytes(broken.content)
    with pytest.raises(TraceError) as raised:
        read(path)
    assert (raised.value.path, raised.value.line) == (str(path), broken.line)
    assert broken.reason in raised.value.reason
    assert raised.value.remedy
    assert len(str(raised.value).splitlines()) == 1


@given(
    st.sampled_from([HASH_IDS, HASH_RUNS, SESSIONS, LENGTHS, PAGEDKV, TOKENS]).map(str.encode),
    st.integers(0, 10_000),
    st.integers(0, 40),
    st.binary(max_size=4)
    | st.sampled_from([b"-", b"0", b"9" * 30, b"1e999", b"NaN", b"null", b"true", b"[]", b"{", b","]),
    st.booleans(),
)
def test_damage_of_any_kind_is_reported_or_harmless(
    content: bytes,
    start: int,
    length: int,
    patch: bytes,
    compressed: bool,  # noqa: FBT001 - drawn by Hypothesis
) -> None:
    content = gzip.compress(content, mtime=0) if compressed else content
    start %= len(content)
    damaged = content[:start] + patch + content[start + length :]
    with tempfile.NamedTemporaryFile() as file:
        file.write(damaged)
        file.flush()
        with contextlib.suppress(TraceError):
            requests = read(Path(file.name))
            assert all(request.input_length >= 1 and request.output_length >= 0 for request in requests)


def test_requests_before_the_broken_line_are_delivered(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(HASH_IDS.encode()[:-20])
    with TraceReader(path) as trace:
        requests = iter(trace)
        assert [next(requests).input_length, next(requests).input_length] == [1100, 1536]
        with pytest.raises(TraceError):
            next(requests)


@pytest.mark.parametrize("name", [name for name in BROKEN if "unsorted" in name])
def test_arrivals_out_of_order_name_the_remedy_and_can_be_allowed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(BROKEN[name].content)
    with pytest.raises(TraceError, match=r"in order of arrival: `sorted_by_arrival\(.*\)`"):
        read(path)
    with TraceReader(path, any_order=True) as trace:
        arrivals = [request.arrival_s for request in trace]
    assert (arrivals == sorted(arrivals)) == name.startswith("session")  # a session's line is sorted as it is read


def test_sessions_can_be_drawn_from_while_later_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(SESSIONS)
    with TraceReader(path) as trace:
        assert trace.session_per_row
        one, none, two = trace.sessions()
        assert [(request.session, ids(request)) for request in two] == [("two", [11])]
        assert [ids(request) for request in one] == [[1, 2], [1, 2, 9]]
        assert list(none) == []


@pytest.mark.parametrize("text", [HASH_IDS, HASH_RUNS, LENGTHS, PAGEDKV, TOKENS])
def test_other_formats_have_one_clock(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with TraceReader(path) as trace:
        assert not trace.session_per_row
        with pytest.raises(TraceError, match="one common clock already"):
            next(trace.sessions())
        assert len(list(trace)) == len(text.splitlines()) - (text in {LENGTHS, PAGEDKV, TOKENS})


def test_a_file_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "missing", "No such file"), (tmp_path, "the folder has no file")):
        with pytest.raises(TraceError, match=reason) as raised:
            TraceReader(path)
        assert raised.value.line is None


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_NBYTES", 1000)
    path = tmp_path / "trace"
    path.write_text(HASH_IDS + " " * 2000)
    with pytest.raises(TraceError, match="longer than 1000 bytes") as raised:
        read(path)
    assert raised.value.line == 4


def test_reading_streams_and_tells_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("arrived_s,input_length,output_length\n" + "1.0,10,10\n" * 100_000)
    with TraceReader(path) as trace:
        assert trace.num_bytes == path.stat().st_size
        requests = iter(trace)
        next(requests)
        assert 0 < trace.num_bytes_read < 100_000
        assert len(list(requests)) == 99_999
        assert trace.num_bytes_read == trace.num_bytes


def test_a_pipe_is_read_without_seeking(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(zipped(HASH_IDS),))
    writer.start()
    with TraceReader(pipe) as trace:
        assert (trace.num_bytes, trace.num_bytes_read) == (None, 0)
        assert len(list(trace)) == 3
    writer.join()
