"""``pagedkv replay --inspect``: the page has the numbers of the report, and changes none of them."""

import base64
import json
import signal
import socket
from pathlib import Path
from typing import Any, Final

import pytest

from pagedkv.contract.answers import MissCause
from pagedkv.simulation.meters import KIND_OF, MISS_LABELS
from tests.cli.command import run
from tests.cli.inspecting.pages import EXAMPLE, ShownReplay, events, replaying

SMALL: Final = ("--limit", 60, "--num-blocks", 500, "--max-sequences", 12)
FAST: Final = ("--inspect-speed", "max")


def report(trace: Path, *options: object) -> dict[str, Any]:
    """Replay a trace without a page."""
    result = run("replay", trace, "--json", "-", *options)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return {**found, "command": None}


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--overlap",), id="overlap"),
        pytest.param(("--preemption", "swap", "--host-blocks", 800, "--samples", 3), id="swap"),
        pytest.param(("--host-memory", "64MiB", "--model", "llama-3.1-8b"), id="tiers"),
    ],
)
def test_a_report_is_the_same_with_a_page_and_without(tmp_path: Path, more: tuple[object, ...]) -> None:
    written = tmp_path / "result.json"
    with replaying(EXAMPLE, *SMALL, *more, *FAST, "--json", written) as shown:
        told = next(events(shown))[1]
        shown.wait_for_end()
        assert shown.end()[0] == 0
    assert told["pools"]
    assert {**json.loads(written.read_text()), "command": None} == report(EXAMPLE, *SMALL, *more)


def test_the_page_has_the_numbers_of_the_report(tmp_path: Path) -> None:
    """It changes none of them, and stays until a signal when the replay has ended."""
    expected, written = report(EXAMPLE, *SMALL), tmp_path / "result.json"
    with replaying(EXAMPLE, *SMALL, *FAST, "--json", written) as shown:
        shown.wait_for_end()
        watching = events(shown)
        name, told = next(watching)
        history = shown.get("history?from=0")
        tree = shown.get("prefixes")
        code, printed = shown.end(signal.SIGTERM)
        assert list(watching)[-1][0] == "end"
    assert (name, code) == ("snapshot", 0)
    assert "Replay of conversations.jsonl.gz" in printed
    assert {**json.loads(written.read_text()), "command": None} == expected
    replay, requests, misses = told["replay"], expected["requests"], expected["misses"]
    assert (replay["is_over"], replay["is_paused"], replay["speed"]) == (True, False, None)
    assert (replay["requests"], replay["finished"], replay["rejected"]) == (60, 60, 0)
    assert (replay["prompt"], replay["hit"]) == (requests["num_prompt_tokens"], expected["hits"]["num_hit_tokens"])
    assert dict(replay["missed"]) == {MISS_LABELS[kind]: tokens for kind, tokens in misses["by_cause"].items()}
    buckets, causes = history["buckets"], told["causes"]
    by_kind = dict.fromkeys(misses["by_cause"], 0)
    for _, cause, tokens in buckets["misses"]:
        by_kind[KIND_OF.get(MissCause(causes[int(cause)]), "other")] += tokens
    assert by_kind == misses["by_cause"]
    assert sum(buckets["steps"]) == expected["steps"]["num_steps"]
    assert sum(buckets["prefilled"]) + sum(buckets["decoded"]) == expected["steps"]["num_computed_tokens"]
    assert sum(buckets["forward_s"]) == pytest.approx(expected["steps"]["busy_s"])
    assert sum(buckets["recomputed"]) == expected["preemptions"]["num_recompute"]
    served = history["requests"]
    assert len(served) == 60
    assert {each["state"] for each in served} == {"length"}
    assert sum(each["prompt"] for each in served) == requests["num_prompt_tokens"]
    assert sum(each["hit"] for each in served) == expected["hits"]["num_hit_tokens"]
    assert sum(each["generated"] for each in served) == requests["num_output_tokens"]
    assert sum(each["preemptions"] for each in served) == expected["preemptions"]["num_recompute"] > 0
    assert told["now_s"] == history["now_s"] == pytest.approx(expected["steps"]["virtual_s"], abs=1e-3)
    assert told["pools"][0]["counts"]["live"] == 0
    assert tree["num_blocks"] == told["pools"][0]["counts"]["cached"] > 0
    assert sum(told["pools"][0]["counts"].values()) == 499


def test_a_replay_pauses_and_goes_on() -> None:
    with replaying(EXAMPLE, *SMALL, "--inspect-speed", 2) as shown:
        told = events(shown)
        running = next(now for _, now in told if now["requests"])
        assert running["replay"]["is_over"] is False
        assert running["unit_s"] == 2
        assert shown.post("pause", '{"paused": true}').json() == {"paused": True}
        paused = next(now for _, now in told if now["replay"]["is_paused"])
        assert [next(told)[1]["now_s"] for _ in range(3)] == [paused["now_s"]] * 3
        live = shown.get(f"block/device/{_live_block(shown)}")
        assert live["state"] == "live"
        assert {each["number"] for each in live["holders"]} <= {each["number"] for each in paused["requests"]}
        assert live["holders"]
        assert shown.post("pause", '{"paused": false}').status_code == 200
        assert next(now["now_s"] for _, now in told if not now["replay"]["is_paused"]) >= paused["now_s"]
        later = next(now["now_s"] for _, now in told if now["now_s"] > paused["now_s"])
        assert later > paused["now_s"]
        for body, content_type, status in (
            ('{"paused": 1}', "application/json", 400),
            ("{", "application/json", 400),
            ('{"paused": true}', "text/plain", 415),
            (" " * 2000, "application/json", 413),
        ):
            assert shown.post("pause", body, content_type).status_code == status
        code, printed = shown.end()
    assert code == 130
    assert printed == ""
    assert "interrupted after" in shown.lines[-1]


def _live_block(shown: ShownReplay) -> int:
    """Return a block that is in use."""
    told = next(events(shown))[1]
    states, live = base64.b64decode(told["pools"][0]["map"]), told["block_states"].index("live")
    return next(place for place, state in enumerate(states) if state & 7 == live)


@pytest.mark.long
def test_the_page_of_an_ended_replay_stays_until_it_is_interrupted() -> None:
    with replaying(EXAMPLE, "--limit", 5, *FAST) as shown:
        shown.wait_for_end()
        assert shown.get("history?from=0")["requests"]
        watching = events(shown)
        next(watching)
        assert shown.end(signal.SIGINT)[0] == 0
        assert list(watching)[-1][0] == "end"


# Whom it is shown to


@pytest.mark.long
def test_this_machine_needs_no_key() -> None:
    with replaying(EXAMPLE, "--limit", 5, *FAST) as shown:
        assert shown.url.startswith("http://127.0.0.1:")
        assert shown.key is None
        assert shown.status("events") == 200


@pytest.mark.long
def test_other_machines_need_the_key_that_is_printed() -> None:
    with replaying(EXAMPLE, "--limit", 5, "--inspect-host", "0.0.0.0", *FAST) as shown:  # noqa: S104 - what is tested
        assert shown.key
        shown.url = shown.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - as above
        for path in ("events", "history", "prefixes", "block/device/1"):
            assert shown.status(path) == 401
            assert shown.status(path, **{"x-api-key": "pk-another"}) == 401
            assert shown.status(path, **{"x-api-key": shown.key}) == 200
        assert shown.post("pause", '{"paused": true}').status_code == 401
        assert shown.post("pause", '{"paused": false}', **{"x-api-key": shown.key}).status_code == 200
        assert shown.status("page.js") == 200, "which has no data"
        shown.wait_for_end()
        assert shown.end()[0] == 0


@pytest.mark.long
def test_keys_of_a_file_hold_on_this_machine_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
    keys.write_text(f'[[keys]]\ntenant = "operations"\nsha256 = "{digest}"\nadmin = true\n')
    with replaying(EXAMPLE, "--limit", 5, *FAST, "--inspect-keys", keys) as shown:
        assert shown.status("history") == 401
        assert shown.status("history", **{"x-api-key": "secret"}) == 200
        assert not any("key is" in line for line in shown.lines)


# What a trace tells


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    head = {"format": "pagedkv-trace", "version": 1, "block_size": 16}
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (head, *rows)))
    return path


@pytest.mark.long
def test_tokens_of_a_trace_are_shown_and_made_up_ones_are_not(tmp_path: Path) -> None:
    own = [{"arrival_s": 0.0, "input_length": 40, "output_length": 2, "token_ids": list(range(40))}]
    with replaying(_write(tmp_path / "tokens.jsonl", own), "--num-blocks", 50, *FAST) as shown:
        shown.wait_for_end()
        assert next(events(shown))[1]["has_texts"] is True
        blocks = [shown.get(f"block/device/{number}") for number in range(1, 4)]
        assert [each["token_ids"] for each in blocks] == [[*range(16)], [*range(16, 32)], []]
        assert [each["parent"] for each in blocks] == [None, 1, None]
    with replaying(EXAMPLE, "--limit", 5, *FAST) as shown:
        shown.wait_for_end()
        assert next(events(shown))[1]["has_texts"] is False
        assert "token_ids" not in shown.get("block/device/1")


@pytest.mark.long
def test_a_trace_with_tenants_has_the_same_report(tmp_path: Path) -> None:
    blocks = [[0, 1], [2, 3]]
    rows = [
        {"arrival_s": 0.0, "input_length": 33, "output_length": 1, "tenant": tenant, "block_ids": own}
        for own, tenant in zip(blocks, ("a", "b"), strict=True)
    ]
    trace = _write(tmp_path / "tenants.jsonl", rows)
    with replaying(trace, "--num-blocks", 50, *FAST, "--json", tmp_path / "result.json") as shown:
        shown.wait_for_end()
        assert next(events(shown))[1]["tenants"] == [""]
        assert shown.end()[0] == 0
    expected = report(trace, "--num-blocks", 50)
    assert {**json.loads((tmp_path / "result.json").read_text()), "command": None} == expected
    assert [part["name"] for part in expected["by_tenant"]] == ["a", "b"]


@pytest.mark.long
def test_a_request_that_cannot_be_served_is_told(tmp_path: Path) -> None:
    rows = [{"arrival_s": 0.0, "input_length": length, "output_length": 1} for length in (5000, 50)]
    with replaying(_write(tmp_path / "large.jsonl", rows), "--num-blocks", 50, *FAST) as shown:
        shown.wait_for_end()
        told = next(events(shown))[1]
        served = shown.get("history?from=0")["requests"]
    assert (told["replay"]["requests"], told["replay"]["finished"], told["replay"]["rejected"]) == (2, 1, 1)
    assert [(each["number"], each["state"]) for each in served] == [(1, "length"), (0, "rejected")]


# What is refused


def test_a_taken_port_is_refused_before_anything_is_loaded() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        result = run("replay", EXAMPLE, "--inspect", "--inspect-port", port)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"cannot listen at 127.0.0.1:{port}" in result.stderr
    assert result.stderr.endswith("name another --inspect-host or --inspect-port\n")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--inspect", "--inspect-speed", speed), "--inspect-speed must be 1e-06 to 1,000,000")
        for speed in ("0", "-1", "fast", "nan", "inf", "1e-7")
    ]
    + [
        (("--inspect", "--inspect-port", "65536"), "--inspect-port must be 0 to 65535, got 65536"),
        (("--inspect", "--engine"), "leave out --engine"),
        (("--inspect", "--inspect-keys", "no/such/file", "--inspect-port", "0"), "no/such/file cannot be read"),
        (("--inspect-speed", "5"), "--inspect-speed is an option of the page: give --inspect, too"),
        (("--inspect-host", "::1"), "--inspect-host is an option of the page: give --inspect, too"),
        (("--inspect", "--num-blocks", "0"), "needs at least 2 blocks"),
    ],
)
def test_bad_options_are_refused(options: tuple[str, ...], told: str) -> None:
    result = run("replay", EXAMPLE, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def test_one_trace_is_shown() -> None:
    result = run("replay", EXAMPLE, EXAMPLE, "--inspect")
    assert result.exit_code == 2
    assert "unexpected extra argument" in result.stderr
