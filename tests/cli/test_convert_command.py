"""``pagedkv convert``: what it writes, that it writes it whole, and what bad input gets."""

import gzip
import json
import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from pagedkv.cli import trace_options
from pagedkv.planner.traces import Request
from pagedkv.planner.traces.merging import sorted_by_arrival
from pagedkv.planner.traces.reader import TraceReader
from tests.cli.command import run, start
from tests.traces.random_requests import as_values
from tests.traces.test_samples import FIELDS
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

pytestmark = pytest.mark.plain_only

PATIENCE_S: Final = 300  # the first run in a fresh checkout compiles
UNSORTED: Final = "arrived_s,input_length,output_length\n2.5,1,0\n0.5,2,0\n2.5,3,0\n0.0,4,0\n0.5,5,0\n"


def read(path: Path) -> list[Request]:
    with TraceReader(path) as trace:
        return list(trace)


def trace_of(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def converted(trace: Path, *options: object) -> Path:
    output = trace.with_name("converted.jsonl")
    result = run("convert", trace, "-o", output, *options)
    assert (result.exit_code, result.stdout) == (0, "")
    assert re.fullmatch(rf"\d+ requests written to {re.escape(str(output))}, read as .+\n", result.stderr)
    return output


def refused(*arguments: object) -> str:
    """Run a conversion that must fail, and return the one line it says."""
    result = run("convert", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (message,) = result.stderr.splitlines()
    return message


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the system refuse to write files beyond ``nbytes``, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("text", [HASH_IDS, HASH_RUNS, LENGTHS, PAGEDKV, TOKENS])
def test_the_requests_stay_as_they_are_and_converting_again_changes_nothing(tmp_path: Path, text: str) -> None:
    trace = trace_of(tmp_path, text)
    output = converted(trace)
    assert as_values(read(output)) == as_values(read(trace))
    content = output.read_bytes()
    assert content.startswith(b'{"format":"pagedkv-trace","version":1')
    assert converted(output).read_bytes() == content  # onto itself
    assert sorted(tmp_path.iterdir()) == [output, trace]


def test_a_name_that_ends_in_gz_is_compressed_always_to_the_same_bytes(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, HASH_IDS)
    for name in ("one.jsonl.gz", "two.gz"):
        assert run("convert", trace, "--output", tmp_path / name).exit_code == 0
    compressed = (tmp_path / "one.jsonl.gz").read_bytes()
    assert compressed == (tmp_path / "two.gz").read_bytes()
    assert compressed[4:8] == bytes(4)  # RFC 1952: the time of modification
    assert gzip.decompress(compressed) == converted(trace).read_bytes()


def test_a_dash_is_the_standard_output(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, HASH_IDS)
    result = run("convert", trace, "-o", "-")
    told = "3 requests written to -, read as Mooncake's hash_ids of 512 tokens, times in ms\n"
    assert (result.exit_code, result.stderr) == (0, told)
    assert result.stdout == converted(trace).read_text()


def test_a_pipe_is_converted_to_a_pipe() -> None:
    process = start("convert", "/dev/stdin", "-o", "/dev/stdout")
    stdout, stderr = process.communicate(gzip.compress(HASH_IDS.encode()), timeout=PATIENCE_S)
    assert process.returncode == 0
    assert stderr.startswith(b"3 requests written to /dev/stdout, read as ")
    assert [json.loads(row)["input_length"] for row in stdout.splitlines()[1:]] == [1100, 1536, 13]


def test_the_limit_counts_requests_of_the_output(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, UNSORTED)
    assert [request.input_length for request in read(converted(trace, "--sort", "--limit", 2))] == [4, 2]
    assert "--limit must be from 1 to" in refused(trace, "-o", tmp_path / "out", "--limit", 0)


def test_sorting_is_asked_for_and_stable(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, UNSORTED)
    message = refused(trace, "-o", tmp_path / "out")
    assert message == (
        f"pagedkv: {trace}:3: arrives at 0.5 s, after line 2 at 2.5 s. "
        f"Put the requests in order of arrival: --sort; or, once for several commands, pagedkv convert {trace} --sort "
        "-o sorted.jsonl.gz"
    )
    assert [request.input_length for request in read(converted(trace, "--sort"))] == [4, 2, 5, 1, 3]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "converted.jsonl", trace]


def test_sessions_are_interleaved_at_the_interval_asked_for(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, SESSIONS)
    requests = read(converted(trace, "--session-interval", 1))
    assert [(request.session, request.arrival_s) for request in requests] == [("one", 0.0), ("two", 2.0), ("one", 2.5)]
    assert [request.block_ids.tolist() for request in requests if request.block_ids is not None] == [
        [1, 2],
        [11],
        [1, 2, 9],
    ]
    cut = read(converted(trace, "--session-interval", 1, "--max-gap", 0.5))
    assert [(request.session, request.arrival_s) for request in cut] == [("one", 0.0), ("one", 0.5), ("two", 2.0)]


def test_a_session_out_of_order_is_sorted_before_its_gaps_are_cut(tmp_path: Path) -> None:
    rows: list[object] = [{"t": t, "input_length": t + 1, "output_length": 0, "hash_runs": []} for t in (50, 0, 3)]
    trace = trace_of(tmp_path, as_text({"session": "s", "block_size": 64, "requests": rows}))
    requests = read(converted(trace, "--session-interval", 1, "--max-gap", 5, "--sort"))
    assert [(request.input_length, request.arrival_s) for request in requests] == [(1, 0.0), (4, 3.0), (51, 8.0)]


def test_sessions_need_an_interval_and_only_sessions_have_one(tmp_path: Path) -> None:
    output = tmp_path / "out"
    sessions = trace_of(tmp_path, SESSIONS)
    for options in ([], ["--sort"]):
        assert "State the seconds between the starts of two sessions: --session-interval" in refused(
            sessions, "-o", output, *options
        )
    assert "give --session-interval, too" in refused(sessions, "-o", output, "--max-gap", 5)
    assert "must be at least 0 seconds" in refused(sessions, "-o", output, "--session-interval", -1)
    assert "must be at least 0 seconds" in refused(sessions, "-o", output, "--session-interval", 1, "--max-gap", "nan")
    lengths = trace_of(tmp_path, LENGTHS)
    assert "one common clock already" in refused(lengths, "-o", output, "--session-interval", 1)
    assert not output.exists()


def test_tokens_become_block_ids_that_can_be_curved(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0, "token_ids": [1, 2, 3, 4, 5], "output_token_ids": [6]},
        {"arrival_s": 1, "token_ids": [1, 2, 3, 3], "output_length": 2},
        {"arrival_s": 2, "token_ids": [1, 2, 3, 4, 9, 9], "output_length": 0},
    ]
    output = converted(trace_of(tmp_path, as_text({"format": "pagedkv-trace", "version": 1}, *rows)), "--block-size", 2)
    assert output.read_text().splitlines() == [
        '{"format":"pagedkv-trace","version":1,"block_size":2}',
        '{"arrival_s":0.0,"input_length":5,"output_length":1,"block_runs":[[0,2]]}',
        '{"arrival_s":1.0,"input_length":4,"output_length":2,"block_runs":[[0,1],[2,1]]}',
        '{"arrival_s":2.0,"input_length":6,"output_length":0,"block_runs":[[0,2],[3,1]]}',
    ]
    result = run("curve", output, "--capacities", 100, "--eviction", "lru", "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["num_block_refs"] == 7


def test_block_ids_are_made_of_tokens_only(tmp_path: Path) -> None:
    output = tmp_path / "out"
    message = refused(trace_of(tmp_path, HASH_IDS), "-o", output, "--block-size", 16)
    assert message.endswith(
        "request 1 has no tokens to make block ids of. Give --block-size only for a log with texts or a trace with "
        "token_ids"
    )
    assert "--block-size must be at least 1" in refused(trace_of(tmp_path, TOKENS), "-o", output, "--block-size", 0)


def test_the_traces_block_size_can_be_named(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2, 3]}
    (request,) = read(converted(trace_of(tmp_path, as_text(row)), "--trace-block-size", 48))
    assert request.block_size == 48


def test_blocks_of_two_sizes_are_refused(tmp_path: Path) -> None:
    request = {"t": 0, "input_length": 64, "output_length": 1}
    rows = [
        {"session": str(b), "block_size": b, "requests": [request | {"hash_runs": [[0, 64 // b]]}]} for b in (64, 32)
    ]
    message = refused(trace_of(tmp_path, as_text(*rows)), "-o", tmp_path / "out", "--session-interval", 1)
    assert "request 2 has blocks of 32 tokens, those before it of 64" in message


@pytest.mark.parametrize("broken", [pytest.param(broken, id=name) for name, broken in BROKEN.items()])
def test_a_broken_trace_gets_one_line_and_leaves_the_old_file(tmp_path: Path, broken: BrokenTrace) -> None:
    trace, output = tmp_path / "trace", tmp_path / "out.gz"
    trace.write_bytes(broken.content)
    output.write_text("old")
    interval = ["--session-interval", 1] if b'"requests"' in broken.content else []
    message = refused(trace, "-o", output, *interval)
    place = trace if broken.line is None else f"{trace}:{broken.line}"
    assert message.startswith(f"pagedkv: {place}: ")
    assert broken.reason in message
    assert output.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [output, trace]


def test_a_missing_trace_gets_one_line(tmp_path: Path) -> None:
    for trace, reason in (
        (tmp_path / "missing", "cannot be opened"),
        (tmp_path, "the folder has no file that ends in"),
    ):
        assert refused(trace, "-o", tmp_path / "out").startswith(f"pagedkv: {trace}: {reason}")


def test_an_output_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "missing" / "out"):
        assert refused(tmp_path / "missing trace", "-o", output).startswith(f"pagedkv: {output}: cannot be written")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, "arrived_s,input_length,output_length\n" + "1,1,1\n" * 10_000)
    output = tmp_path / "out"
    output.write_text("old")
    with largest_file(10_000):
        assert refused(trace, "-o", output) == f"pagedkv: {output}: cannot be written: File too large"
    assert output.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [output, trace]


def test_no_room_for_sorting_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_options, "sorted_by_arrival", partial(sorted_by_arrival, max_run_nbytes=1_000_000))
    trace = trace_of(tmp_path, "arrived_s,input_length,output_length\n" + "1,1,1\n" * 10_000)
    with largest_file(10_000):
        message = refused(trace, "-o", tmp_path / "out", "--sort")
    assert message.startswith("pagedkv: sorting cannot write its temporary files: File too large. ")
    assert message.endswith("TMPDIR")
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize("options", [[], ["--sort"]])
def test_ctrl_c_tells_how_far_it_came_and_leaves_no_file(tmp_path: Path, options: list[str]) -> None:
    process = start("convert", "/dev/stdin", "-o", tmp_path / "out.gz", *options)
    assert process.stdin is not None
    # More than a pipe holds: when it is written, most has been read.
    process.stdin.write(b"arrived_s,input_length,output_length,padding\n" + 400 * (b"0,20,5," + b"x" * 1000 + b"\n"))
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (130, b"")
    told = re.fullmatch(rb"pagedkv: interrupted after (\d+) requests; nothing was written\n", stderr)
    assert told is not None
    assert 250 < int(told[1]) <= 400
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    result = run("convert", trace_of(tmp_path, HASH_IDS), "-o", os.devnull)
    assert (result.exit_code, result.stdout) == (0, "")
    assert Path(os.devnull).is_char_device()


def test_the_help_has_examples() -> None:
    result = run("convert", "--help")
    assert result.exit_code == 0
    assert " pagedkv convert mooncake_conversation.jsonl.gz " in result.stdout.replace("\n", " ")


SAMPLES = Path(__file__).parents[1] / "traces" / "samples"


def test_a_log_becomes_a_trace_without_its_texts(tmp_path: Path) -> None:
    output = tmp_path / "trace.jsonl"
    result = run("convert", SAMPLES / "openai.jsonl", "--anonymize", "--salt", "s", "--block-size", 4, "-o", output)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "2 requests written" in result.stderr
    assert "read as an OpenAI style request log, times in ISO 8601, lengths of its usage, content of its texts" in (
        result.stderr
    )
    header, first, second = map(json.loads, output.read_text().splitlines())
    assert header["block_size"] == 4
    assert [row["arrival_s"] for row in (first, second)] == [0.0, 20.5]  # on a clock that begins with the trace
    assert not {"token_ids", "output_token_ids"} & (first.keys() | second.keys())
    assert first["session"] == second["session"] != "u1"
    runs = [[each[0] for each in row["block_runs"]] for row in (first, second)]
    assert runs[1][: len(runs[0])] == runs[0]
    again = tmp_path / "again.jsonl"
    run("convert", SAMPLES / "openai.jsonl", "--anonymize", "--salt", "other", "--block-size", 4, "-o", again)
    assert not {tuple(each) for each in json.loads(again.read_text().splitlines()[1])["block_runs"]} & {
        tuple(each) for each in first["block_runs"]
    }


@pytest.mark.parametrize("sample", sorted(path.name for path in SAMPLES.iterdir() if path.suffix != ".md"))
def test_a_newcomer_with_any_log_has_a_result_in_two_commands(tmp_path: Path, sample: str) -> None:
    trace = tmp_path / "trace.jsonl"
    options: list[object] = (
        ["--columns", "arrival=when_ms,input=tokens in,output=out"] if sample == "columns.csv" else []
    )
    options += ["--fields", FIELDS] if sample == "fields.jsonl" else []
    options += ["--session-interval", 60] if sample in {"sharegpt.json", "weka.json"} else []
    options += ["--arrivals", "poisson:1"] if sample == "batch-input.jsonl" else []
    assert run("convert", SAMPLES / sample, "-o", trace, *options, "--anonymize").exit_code == 0
    result = run("replay", trace, "--cost-model", "instant", "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["steps"]["virtual_s"] < 200
    assert document["requests"]["num_finished"] == document["requests"]["num_requests"] > 1


def test_times_since_1970_begin_at_0(tmp_path: Path) -> None:
    trace = tmp_path / "epoch.csv"
    trace.write_text("arrived_s,input_length,output_length\n1772355600,5,1\n1772355601.5,5,1\n")
    for options in ([], ["--sort"]):
        rows = converted(trace, *options).read_text().splitlines()[1:]
        assert [json.loads(row)["arrival_s"] for row in rows] == [0.0, 1.5]
    replayed = json.loads(run("replay", trace, "--cost-model", "instant", "--json", "-").stdout)
    assert replayed["steps"]["virtual_s"] == 1.5
    assert replayed["read_as"] == "CSV of lengths, times in s"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--time-unit", "h"], "--time-unit must be one of s, ms, us, ns, got 'h'"),
        (["--columns", "arrival"], "--columns must be what=column, of arrival, input,"),
        (["--columns", "arrival=a,input=b"], "--columns must name the column of output or answer"),
        (["--columns", "arrival=a,arrival=b,input=c,output=d"], "--columns names something twice"),
        (["--columns", "when=a,input=c,output=d"], "got 'when=a'"),
        (["--chars-per-token", 0], "--chars-per-token must be from 1 to 1,000, got 0.0"),
        (["--tokenizer", "nowhere.json"], "--tokenizer"),
        (["--tokenizer", "a", "--chars-per-token", 4], "give one of them"),
        (["--salt", "x"], "--salt is a text for --anonymize: give both"),
    ],
)
def test_what_a_file_is_said_to_be_is_checked_before_it_is_read(
    tmp_path: Path, options: list[object], told: str
) -> None:
    assert told in refused(tmp_path / "missing", "-o", tmp_path / "out.jsonl", *options)


def test_a_column_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    message = refused(
        SAMPLES / "azure.csv",
        "--columns",
        "arrival=timestamp,input=ContextToken,output=GeneratedTokens",
        "-o",
        tmp_path / "out.jsonl",
    )
    assert "has no column 'timestamp'" in message
    assert "it has TIMESTAMP, ContextTokens, GeneratedTokens" in message
