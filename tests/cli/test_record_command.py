"""``pagedkv record`` against a real publisher: the trace that it writes, what it says, and how it ends."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.cli.command import run
from tests.recording.events import as_arrays, as_maps, cleared, removed, stored
from tests.recording.publisher import Publisher, doing
from tests.recording.test_metrics import VLLM, page_server

BEGIN_S: Final = time.time()
PROMPTS: Final = ([1, 2, 3, 4, 5], [1, 2, 9, 9], [7])


def log_of(folder: Path, begin_s: float) -> Path:
    """A request log whose requests came now; one of them long before."""
    rows: list[dict[str, object]] = [{"event": "request.received", "rid": "old", "timestamp": begin_s - 9e5}]
    rows += [
        {"event": "request.received", "rid": str(number), "timestamp": begin_s + number / 1000}
        for number in range(len(PROMPTS))
    ]
    tokens = [[8, 8], *PROMPTS]
    for row, prompt in zip(list(rows), tokens, strict=True):
        done = {**row, "event": "request.finished", "obj": {"input_ids": prompt}}
        rows.append(done | {"out": {"meta_info": {"prompt_tokens": len(prompt), "completion_tokens": 2}}})
    path = folder / "server.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def session(publisher: Publisher, begin_s: float, encode: Callable[..., bytes] = as_maps) -> Callable[[], None]:
    """What an engine tells that serves the prompts above, from an empty cache."""

    def work() -> None:
        publisher.await_subscriber()
        publisher.send(encode(begin_s, cleared(), stored([70, 71], [1, 2, 3, 4])))
        publisher.send(encode(begin_s + 0.001, stored([72], [9, 9], parent=70), removed([71])))

    return work


@pytest.mark.parametrize("encode", [as_maps, as_arrays], ids=["vllm", "sglang"])
def test_events_and_a_log_become_a_trace(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    log, output, found = log_of(tmp_path, BEGIN_S), tmp_path / "trace.jsonl", tmp_path / "found.json"
    with Publisher() as publisher, doing(session(publisher, BEGIN_S, encode)):
        options = ("--log", log, "-o", output, "--limit", 2, "--json", found)
        result = run("record", publisher.endpoint, *options)
    assert result.exit_code == 0, result.stderr
    assert f"3 requests written to {output}, read as SGLang's request log" in result.stderr
    header, *rows = (json.loads(line) for line in output.read_text().splitlines())
    assert header == {"format": "pagedkv-trace", "version": 1, "block_size": 2}
    assert [(row["input_length"], row["output_length"], row.get("block_runs")) for row in rows] == [
        (5, 2, [[0, 2]]),
        (4, 2, [[0, 1], [2, 1]]),
        (1, 2, []),
    ]
    assert [row["arrival_s"] for row in rows] == [0.0, 0.001, 0.002]
    document = json.loads(found.read_text())
    assert document["ended_by"] == "limit"
    assert document["blocks"]["GPU"] | {"lifetimes": 0, "timeline": 0, "exact_s": 0, "mean": 0} == {
        "num_stored": 3,
        "num_copies": 0,
        "num_removed": 1,
        "num_removed_unseen": 0,
        "num_blocks": 2,
        "peak": 3,
        "mean": 0,
        "exact_s": 0,
        "lifetimes": 0,
        "timeline": 0,
    }
    assert (document["log"]["num_blocks"], document["log"]["num_stored"]) == (4, 4)
    assert "1 of 4 requests of the log arrived before or after the recording" in document["warnings"]
    assert "100.0% (4 of 4)" in result.stdout
    assert not any("alone" in each or "without a request log" in each for each in document["warnings"])


def test_the_trace_can_be_curved_and_replayed(tmp_path: Path) -> None:
    log, output = log_of(tmp_path, BEGIN_S), tmp_path / "trace.jsonl.gz"
    with Publisher() as publisher, doing(session(publisher, BEGIN_S)):
        assert run("record", publisher.endpoint, "--log", log, "-o", output, "--limit", 2).exit_code == 0
    curve = run("curve", output, "--capacities", 100, "--eviction", "lru", "--json", "-")
    assert json.loads(curve.stdout)["num_block_refs"] == 4
    replay = run("replay", output, "--num-blocks", 100, "--block-size", 2, "--json", "-")
    assert json.loads(replay.stdout)["requests"]["num_requests"] == 3


def test_events_alone_give_occupancy_and_lifetimes_and_say_so() -> None:
    with Publisher() as publisher, doing(session(publisher, BEGIN_S)):
        result = run("record", publisher.endpoint, "--limit", 2)
    assert result.exit_code == 0
    told = " ".join(result.stdout.split())
    assert "events show stored and removed blocks, never requests, hits or arrivals" in told
    assert "hit ratio" not in told
    assert "<=0.1s" in told
    assert "without a request log (--log) there is no trace" in told


def test_metrics_are_read_meanwhile() -> None:
    pages = [VLLM, VLLM.replace(" 1000.0", " 3000.0").replace(" 400.0", " 1900.0")]
    with page_server(pages) as url, Publisher() as publisher, doing(session(publisher, BEGIN_S)):
        result = run("record", publisher.endpoint, "--limit", 2, "--metrics", url, "--json", "-")
    assert result.exit_code == 0, result.stderr
    metrics = json.loads(result.stdout)["metrics"]
    assert (metrics["token_hit_ratio"], metrics["gained"]["queries"], metrics["num_blocks"]) == (0.75, 2000.0, 27_000)


def refused(*arguments: object) -> str:
    result = run("record", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("127.0.0.1:5557",), "'127.0.0.1:5557' is not an endpoint. Name the endpoint of KV events"),
        (("tcp://*:5557",), "means all addresses of a machine"),
        (("tcp://127.0.0.1:1", "--seconds", 0), "--seconds must be a number of seconds above 0, got 0.0"),
        (("tcp://127.0.0.1:1", "--seconds", "nan"), "--seconds must be"),
        (("tcp://127.0.0.1:1", "--limit", -1), "--limit must be at least 1 message, got -1"),
        (("tcp://127.0.0.1:1", "--patience", -1), "--patience must be at least 0 seconds, got -1.0"),
        (("tcp://127.0.0.1:1", "--metrics", "x"), "'x' is no address of a page"),
        (("tcp://127.0.0.1:1", "--metrics", "http://x", "--metrics-interval", 0), "--metrics-interval must be"),
        (("tcp://127.0.0.1:1", "-o", "trace"), "--output is a trace of requests, which events do not show"),
        (("tcp://127.0.0.1:1", "--log", "log"), "--log is joined into a trace: name the file to write (--output)"),
        (("tcp://127.0.0.1:1", "--log", "/no/log", "-o", "-"), "/no/log: cannot be opened"),
        (("tcp://127.0.0.1:1", "--block-size", 0), "--block-size must be at least 1 token"),
        (("tcp://127.0.0.1:1", "--utc-offset", 99), "--utc-offset must be from -14 to 14 hours"),
        (("tcp://127.0.0.1:1", "--json", "/no/such/file"), "there is no folder /no/such"),
        (("tcp://127.0.0.1:1", "--replay", "here"), "'here' is not an endpoint"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_recorded(arguments: tuple[object, ...], reason: str) -> None:
    assert reason in refused(*arguments)


def test_nobody_publishing_is_an_error(tmp_path: Path) -> None:
    with Publisher() as publisher:
        pass
    output = tmp_path / "trace"
    message = refused(publisher.endpoint, "--seconds", 0.01, "--log", log_of(tmp_path, 0.0), "-o", output)
    assert message.startswith(f"pagedkv: {publisher.endpoint}: no publisher sent messages there within ")
    assert not output.exists()


def test_a_publisher_that_dies_leaves_what_came(tmp_path: Path) -> None:
    log, output = log_of(tmp_path, BEGIN_S), tmp_path / "trace.jsonl"
    publisher = Publisher()
    work = session(publisher, BEGIN_S)

    def live() -> None:
        with publisher:
            work()

    with doing(live):
        result = run("record", publisher.endpoint, "--patience", 0, "--log", log, "-o", output)
    assert result.exit_code == 0
    assert "the publisher disconnected after message 2" in result.stdout
    assert len(output.read_text().splitlines()) == 4


def test_what_fails_late_is_told_behind_what_came(tmp_path: Path) -> None:
    output, found = tmp_path / "trace", tmp_path / "found.json"
    log = log_of(tmp_path, 1.6e9)
    with Publisher() as publisher, doing(session(publisher, BEGIN_S)):
        result = run("record", publisher.endpoint, "--limit", 2, "--log", log, "-o", output, "--json", found)
    assert result.exit_code == 2
    assert "none of its 4 requests arrived during the recording" in result.stderr.splitlines()[-1]
    assert "give its time zone: --utc-offset" in result.stderr
    assert not output.exists()
    assert json.loads(found.read_text())["messages"]["num_messages"] == 2


def test_another_rank_ends_the_recording_and_what_came_is_kept(tmp_path: Path) -> None:
    log, output = log_of(tmp_path, BEGIN_S), tmp_path / "trace.jsonl"
    with Publisher() as publisher:
        begin = session(publisher, BEGIN_S)

        def work() -> None:
            begin()
            publisher.send(as_maps(time.time(), rank=1))

        with doing(work):
            result = run("record", publisher.endpoint, "--log", log, "-o", output)
    assert result.exit_code == 2
    assert "sent by rank 1, those before by rank 0" in result.stderr.splitlines()[-1]
    assert len(output.read_text().splitlines()) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_recording_and_the_trace_is_whole(tmp_path: Path, number: signal.Signals) -> None:
    log, output = log_of(tmp_path, BEGIN_S), tmp_path / "trace.jsonl"
    with Publisher(kept=[]) as publisher:
        begin = session(publisher, BEGIN_S)

        def work() -> None:
            begin()
            publisher.send(as_maps(BEGIN_S + 1), number=9)
            publisher.answer_replay()  # so whatever was sent before was received
            os.kill(os.getpid(), number)
            publisher.answer_replay()  # what is asked for at the end

        with doing(work):
            options = ("--log", log, "-o", output, "--replay", publisher.replay)
            result = run("record", publisher.endpoint, *options)
    assert result.exit_code == 0, result.stderr
    assert "messages 2 to 8: were not received" in " ".join(result.stdout.split())
    assert len(output.read_text().splitlines()) == 4
