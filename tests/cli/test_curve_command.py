"""``pagedkv curve``: what it prints and writes, and what bad input gets."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.blocks.eviction.registry import POLICIES
from pagedkv.cli.commands import curve as driver, curve as tables
from pagedkv.planner.capacity import curve as measuring
from pagedkv.planner.capacity.curve import BY_DEFAULT, with_multiples
from tests.cli.command import run, start
from tests.traces.trace_files import BROKEN, HASH_IDS, HASH_RUNS, LENGTHS, SESSIONS, BrokenTrace, as_text

pytestmark = pytest.mark.plain_only

TRACE = as_text(
    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1536, "output_length": 20, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 13, "output_length": 20, "hash_ids": [4]},
    {"timestamp": 3000, "input_length": 13, "output_length": 20, "hash_ids": [4]},
)
GOLDEN = """\
{
  "trace": "TRACE",
  "read_as": "Mooncake's hash_ids of 512 tokens, times in ms",
  "warnings": [],
  "block_size": 512,
  "num_requests": 5,
  "num_block_refs": 11,
  "num_unique_blocks": 5,
  "ideal_hits": 6,
  "ideal_block_ratio": 0.5454545454545454,
  "ideal_token_ratio": 0.5680489101541734,
  "policies": {
    "lru": {
      "1": 3,
      "3": 5,
      "4": 6
    },
    "adaptive": {
      "1": 3,
      "3": 5,
      "4": 6
    },
    "optimal": {
      "1": 3,
      "3": 6,
      "4": 6
    }
  },
  "capacity_for": {
    "0.9": 4,
    "0.99": 4,
    "1.0": 4
  },
  "gaps": {
    "content_ceiling": 0.45454545454545453,
    "capacity_gap": {
      "1": 0.2727272727272727,
      "3": 0.0,
      "4": 0.0
    },
    "policy_gap": {
      "lru": {
        "1": 0.0,
        "3": 0.09090909090909091,
        "4": 0.0
      },
      "adaptive": {
        "1": 0.0,
        "3": 0.09090909090909091,
        "4": 0.0
      }
    }
  },
  "gains": [
    {
      "capacity": 1,
      "factor": 4,
      "by_policy": {
        "lru": 0.2727272727272727,
        "adaptive": 0.2727272727272727,
        "optimal": 0.2727272727272727
      }
    },
    {
      "capacity": 3,
      "factor": 2,
      "by_policy": {
        "lru": 0.09090909090909091,
        "adaptive": 0.09090909090909091,
        "optimal": 0.0
      }
    },
    {
      "capacity": 3,
      "factor": 4,
      "by_policy": {
        "lru": 0.09090909090909091,
        "adaptive": 0.09090909090909091,
        "optimal": 0.0
      }
    },
    {
      "capacity": 4,
      "factor": 2,
      "by_policy": {
        "lru": 0.0,
        "adaptive": 0.0,
        "optimal": 0.0
      }
    },
    {
      "capacity": 4,
      "factor": 4,
      "by_policy": {
        "lru": 0.0,
        "adaptive": 0.0,
        "optimal": 0.0
      }
    }
  ]
}
"""
"""Worked out by hand: 2 + 3 + 1 blocks of 1024 + 1100 + 13 tokens come again, of 11 blocks and 3762 tokens."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def test_the_json_is_golden_whatever_the_order_of_the_capacities(tmp_path: Path, trace: Path) -> None:
    for name, capacities in (("first.json", "1,3,4"), ("second.json", "4, 1,3,3")):
        result = run("curve", trace, "--capacities", capacities, "--json", tmp_path / name)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "Capacity curve of trace.jsonl" in result.stdout
        lines = (tmp_path / name).read_text().splitlines(keepends=True)
        assert lines.pop(2).startswith('  "command": "pagedkv')
        written = json.loads("".join(lines))
        assert "".join(lines) == json.dumps(written, indent=2) + "\n"
        need = written.pop("need")
        assert (need["live"], need["cache"]["num_blocks"], need["cache"]["nbytes"]) == (None, 4, None)
        assert " ".join(result.stdout.split()).startswith(f"{need['sentence']}. Capacity curve of")
        gains = [gain["by_policy"] for gain in written["gains"]]
        for by_policy in (written["policies"], written["gaps"]["policy_gap"], *gains):
            for further in by_policy.keys() - {"lru", "adaptive", "optimal"}:
                del by_policy[further]
        assert json.dumps(written, indent=2) + "\n" == GOLDEN.replace("TRACE", str(trace))


def test_tiers_below_the_cache_are_shown_by_medium(trace: Path) -> None:
    """A block has 512 tokens of 256 KiB: host memory holds four, and has the one block that the third prompt lacks."""
    command = (
        "curve",
        trace,
        "--capacities",
        "1,3",
        "--eviction",
        "lru",
        "--host-memory",
        "512MiB,1GiB",
        "--disk",
        "0,1TB",
    )
    shown = run(*command).stdout
    assert "Hit ratio by block with host of 0.5 GiB; loads take no time" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["3", "0.375", "45.45%", "9.09%", "54.55%", "0.625"] in rows
    written = json.loads(run(*command, "--json", "-").stdout)["tiers"]
    assert [each["tiers"].keys() for each in written] == [{"host"}, {"host", "disk"}] * 2
    assert written[0]["hits"]["lru"] == {"1": {"device": 3, "host": 0}, "3": {"device": 5, "host": 1}}
    assert written[1]["hits"]["lru"]["3"] == {"device": 5, "host": 1, "disk": 0}
    assert written[0]["written_blocks"] == {"1": {"host": 2}, "3": {"host": 5}}


def test_a_model_gives_the_bytes_of_a_token(trace: Path) -> None:
    command = ("curve", trace, "--model", "llama-3.1-8b", "--memory", "1,0.1", "--eviction", "lru", "--disk", "1TB")
    (below,) = json.loads(run(*command, "--json", "-").stdout)["tiers"]
    assert below["block_nbytes"] == 512 * 131_072
    assert below["hits"]["lru"] == {"1": {"device": 3, "disk": 0}, "16": {"device": 6, "disk": 0}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host-memory", "much"), "--host-memory must be a size such as 16GiB"),
        (("--admission", "second-offer"), "--admission is for tiers: give --host-memory or --disk"),
        (("--disk", "1GB", "--admission", "never"), "admission"),
        (("--disk", ",".join(f"{size}GB" for size in range(1, 18))), "17 curves of tiers are more than 16"),
        (("--disk", "1GB", "--model", "gemma-3-27b", "--memory", "8"), "gemma-3-27b has windows or states"),
        (("--disk", "1GB", "--model", "llama-3.1-8b", "--memory", "0.01"), "--memory must hold at least one"),
    ],
)
def test_tiers_that_cannot_be_measured_are_refused(trace: Path, options: tuple[str, ...], message: str) -> None:
    result = run("curve", trace, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_table_shows_the_figures(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a policy more wraps no heading
    result = run("curve", trace, "--capacities", "1,3,4")
    shown = [line.split("  ") for line in result.stdout.splitlines()]
    rows = [tuple(cell.strip() for cell in line if cell.strip()) for line in shown]
    assert ("block references", "11") in rows
    assert ("ideal hit ratio by block", "54.55% (6 of 11)") in rows
    assert ("ideal hit ratio by token", "56.80% (2,137 of 3,762)") in rows
    assert ("content ceiling, never seen before", "45.45%") in rows
    assert ("LRU reaches 90% of the ideal at", "4 blocks") in rows
    for heading in (
        ("blocks", *BY_DEFAULT, "optimal, offline"),
        ("blocks", *BY_DEFAULT, "capacity gap"),
    ):
        assert heading in rows
    lru, adaptive = (1 + list(BY_DEFAULT).index(name) for name in ("lru", "adaptive"))
    for capacity, expected in (
        ("1", [["27.27%", "27.27%", "27.27%"], ["0.00%", "0.00%", "27.27%"]]),
        ("3", [["45.45%", "45.45%", "54.55%"], ["9.09%", "9.09%", "0.00%"]]),
    ):
        shown_there = [row for row in rows if row[:1] == (capacity,) and row[1].endswith("%")]
        assert [[row[lru], row[adaptive], row[-1]] for row in shown_there] == expected


def test_twice_and_four_times_the_memory_are_told_in_points(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = [line.split() for line in run("curve", trace, "--capacities", "1,3,4").stdout.splitlines()]
    assert ["1", "4x", *["+27.27"] * (len(BY_DEFAULT) + 1)] in shown
    (row,) = [row for row in shown if row[:2] == ["3", "2x"]]
    assert (row[2], row[-1]) == ("+9.09", "+0.00")


def test_by_default_twice_and_four_times_the_middle_are_measured() -> None:
    assert with_multiples([10, 20, 40], 15, 1000) == [10, 15, 20, 30, 40, 60]
    assert with_multiples([10], 400, 1000) == [10, 400, 800]
    assert with_multiples([10], 4000, 1000) == [10, 1000]


def test_the_default_capacities_span_the_trace(trace: Path) -> None:
    document = json.loads(run("curve", trace, "--json", "-").stdout)
    assert list(document["policies"]["lru"]) == ["1", "2", "3", "4", "5"]


def test_full_blocks_only_leaves_partly_filled_blocks_out(trace: Path) -> None:
    document = json.loads(run("curve", trace, "--full-blocks-only", "--json", "-").stdout)
    assert (document["num_requests"], document["num_block_refs"], document["ideal_hits"]) == (5, 7, 4)
    assert document["ideal_token_ratio"] == 2048 / 3762


@pytest.mark.parametrize(
    ("text", "num_block_refs", "block_size"), [(HASH_IDS, 7, 512), (HASH_RUNS, 6, 16), (SESSIONS, 6, 64)]
)
def test_every_format_with_ids_is_measured(tmp_path: Path, text: str, num_block_refs: int, block_size: int) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    document = json.loads(run("curve", trace, "--json", "-").stdout)
    assert (document["num_block_refs"], document["block_size"]) == (num_block_refs, block_size)


def test_the_trace_block_size_may_be_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(as_text({"timestamp": 0, "input_length": 100, "output_length": 0, "hash_ids": [1, 2]}))
    document = json.loads(run("curve", trace, "--trace-block-size", 50, "--json", "-").stdout)
    assert document["block_size"] == 50
    assert run("curve", trace).exit_code == 2


def test_sessions_come_one_after_the_other_or_interleaved(tmp_path: Path) -> None:
    rows = [
        {
            "session": name,
            "block_size": 4,
            "tool_tokens": 0,
            "system_tokens": 0,
            "requests": [
                {"t": t, "input_length": 4, "output_length": 1, "hash_runs": [[0, 1]], "agent": 0} for t in (0, 10)
            ],
        }
        for name in "ab"
    ]
    trace = tmp_path / "trace"
    trace.write_text(as_text(*rows))
    hits = [
        json.loads(run("curve", trace, "--capacities", "1", *order, "--json", "-").stdout)["policies"]["lru"]["1"]
        for order in ([], ["--session-interval", "5"], ["--session-interval", "50"])
    ]
    assert hits == [2, 0, 2]


def test_lines_beyond_the_limit_are_not_read(trace: Path) -> None:
    trace.write_text(TRACE + "broken\n")
    result = run("curve", trace, "--limit", 5, "--json", "-")
    assert (result.exit_code, json.loads(result.stdout)["num_requests"]) == (0, 5)
    assert run("curve", trace, "--limit", 6).exit_code == 2


def assert_one_line(trace: Path, arguments: list[object], expected: str) -> None:
    """Run a command that must fail, and leave nothing beside the trace."""
    result = run("curve", trace, *arguments, "--json", trace.with_name("result.json"))
    assert (result.exit_code, result.stdout) == (2, "")
    (message,) = result.stderr.splitlines()
    assert message.startswith("pagedkv: ")
    assert expected in message
    assert list(trace.parent.iterdir()) == [trace]


@pytest.mark.parametrize(
    "broken", [pytest.param(broken, id=name) for name, broken in BROKEN.items() if not name.startswith("csv")]
)
def test_a_broken_trace_gets_one_line_and_leaves_no_file(tmp_path: Path, broken: BrokenTrace) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(broken.content)
    place = trace if broken.line is None else f"{trace}:{broken.line}"
    assert_one_line(trace, [], f"pagedkv: {place}: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            LENGTHS,
            "request 1 has lengths, and no content that could hit: neither block ids nor tokens nor texts.",
        ),
        (
            TRACE + TRACE.replace('"timestamp": 0', '"timestamp": 3000').replace("[4]", "[1]"),
            "request 9 repeats a block id after other blocks than before",
        ),
        (HASH_RUNS.splitlines()[0], "every prompt is shorter than a block"),
        (
            SESSIONS
            + SESSIONS.replace("64", "32")
            .replace("130", "66")
            .replace("200", "98")
            .replace("one", "1")
            .replace("two", "2"),
            "blocks of 32 tokens",
        ),
    ],
)
def test_a_trace_that_has_no_curve_gets_one_line(tmp_path: Path, text: str, expected: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    assert_one_line(trace, [], expected)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--memory", "8", "need a model: give --model"),
        ("--kv-dtype", "fp8", "need a model: give --model"),
        ("--model", "gemma-3-27b", "name them, as in --memory 8,16,32"),
        ("--capacities", "0", "at least 1 block, got 0"),
        ("--capacities", "1000,-5", "at least 1 block, got -5"),
        ("--capacities", "many", "whole numbers separated by commas, got 'many'"),
        ("--capacities", "10,,20", "whole numbers separated by commas, got '10,,20'"),
        ("--capacities", "1.5", "whole numbers separated by commas, got '1.5'"),
        ("--capacities", "", "whole numbers separated by commas, got ''"),
        ("--trace-block-size", "0", "at least 1 token, got 0"),
        ("--limit", "0", "requests, got 0"),
        ("--limit", "-1", "requests, got -1"),
    ],
)
def test_a_number_out_of_range_gets_one_line(trace: Path, option: str, value: str, expected: str) -> None:
    assert_one_line(trace, [option, value], expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--memory", "8", "--capacities", "100"], "with --model give --memory instead"),
        (["--memory", "8,many"], "--memory must be a size such as 16GiB or 500MB, or 16, which is GiB; got 'many'"),
        (["--memory", "8,0"], "--memory must be over 0 and at most 1,048,576 GiB, got 0"),
        (["--memory", "nan"], "--memory must be a size such as 16GiB"),
        (["--memory", "0.0001"], "give more memory, or smaller blocks"),
        (["--memory", "8", "--block-size", "0"], "--block-size must be at least 1, got 0"),
    ],
)
def test_a_model_with_wrong_sizes_gets_one_line(trace: Path, options: list[str], expected: str) -> None:
    assert_one_line(trace, ["--model", "gemma-3-27b", *options], expected)


def test_a_model_hits_as_its_windows_serve_it(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # room for all policies in one table
    result = run("curve", trace, "--model", "gemma-3-27b", "--memory", "20,4", "--json", tmp_path / "result.json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads((tmp_path / "result.json").read_text())
    assert (document["model"], document["num_requests"], document["num_prompt_tokens"]) == ("gemma-3-27b", 5, 11 * 512)
    assert document["ideal_hit_tokens"] == 6 * 512
    assert [point["memory_gib"] for point in document["points"]] == [4.0, 20.0]
    for point in document["points"]:
        assert list(point["num_blocks"]) == ["full", "window_1024"]
        # 1,024 tokens of the second prompt; all but the blocks with the last token of the third and of the fifth
        assert point["hit_tokens"] == dict.fromkeys(BY_DEFAULT, 1024 + (3 * 512 - 16) + (512 - 16))
        assert point["num_unserved"] == dict.fromkeys(BY_DEFAULT, 0)
    assert "ideal hit ratio" in result.stdout
    assert ("GiB", "full", "window_1024", *BY_DEFAULT, "not served") in [
        tuple(cell.strip() for cell in line.split("  ") if cell.strip()) for line in result.stdout.splitlines()
    ]


def test_a_missing_trace_and_an_unwritable_result_get_one_line(tmp_path: Path, trace: Path) -> None:
    for arguments in ([tmp_path / "missing"], [trace, "--json", tmp_path / "no folder" / "result.json"]):
        result = run("curve", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1


def test_points_are_the_same_however_many_run_at_once(trace: Path) -> None:
    """And a number of threads that makes no sense is refused before anything is read."""
    one, four = (run("curve", trace, "--jobs", jobs, "--json", "-") for jobs in ("1", "4"))
    assert (one.exit_code, four.exit_code) == (0, 0)
    assert one.stdout == four.stdout
    refused = run("curve", trace, "--jobs", "0")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--jobs must be from 1 to 1,024, got 0" in refused.stderr


def test_ctrl_c_between_two_points_tells_how_far_it_came(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, show: Callable[[int], None], **_options: object) -> None:
        show(3)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "measure_curve", interrupted)
    result = run("curve", trace, "--capacities", "1,2", "--json", trace.with_name("result.json"))
    assert (result.exit_code, result.stdout) == (130, "")
    assert (
        result.stderr
        == f"pagedkv: interrupted after 3 of {2 * (len(BY_DEFAULT) + 1)} points of the curve; nothing was written\n"
    )
    assert list(trace.parent.iterdir()) == [trace]


def test_ctrl_c_while_reading_tells_how_far_it_came(tmp_path: Path) -> None:
    process = start("curve", "/dev/stdin", "--json", tmp_path / "result.json")
    assert process.stdin is not None
    request = b'{"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1]}'
    process.stdin.write(request + b"\n" * 400_000)  # more than a pipe holds: when it is written, the command is reading
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (130, b"")
    assert re.fullmatch(r"pagedkv: interrupted after [01] requests; nothing was written\n", stderr.decode())
    assert list(tmp_path.iterdir()) == []


def test_the_help_has_examples() -> None:
    result = run("curve", "--help")
    assert result.exit_code == 0
    assert " pagedkv curve mooncake_conversation.jsonl.gz " in result.stdout.replace("\n", " ")


def test_policies_are_chosen_by_name(trace: Path) -> None:
    document = json.loads(
        run("curve", trace, "--capacities", "3", "--eviction", "adaptive, hazard", "--json", "-").stdout
    )
    assert list(document["policies"]) == ["adaptive", "hazard", "optimal"]
    for names, message in (
        ("lru,lru", "a list of different policies"),
        ("oldest", "must be one of"),
        ("", "must be one of"),
    ):
        refused = run("curve", trace, "--eviction", names)
        assert (refused.exit_code, message in refused.stderr, refused.stderr.count("\n")) == (2, True, 1)


def test_of_very_many_requests_policies_are_left_out_and_that_is_said(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MOST_FOR_ALL", 4)
    monkeypatch.setattr(tables, "MOST_FOR_ALL", 4)
    result = run("curve", trace, "--capacities", "3")
    others = ", ".join(name for name in POLICIES if name not in measuring.FOR_MANY_REQUESTS)
    assert f"{others}, since there are many requests: --eviction selects others" in " ".join(result.stdout.split())
    assert "hazard" in json.loads(run("curve", trace, "--eviction", "hazard", "--json", "-").stdout)["policies"]
    assert list(json.loads(run("curve", trace, "--json", "-").stdout)["policies"]) == ["lru", "adaptive", "optimal"]


def test_what_the_trace_was_taken_for_is_said(trace: Path) -> None:
    read_as = json.loads(run("curve", trace, "--json", "-").stdout)["read_as"]
    assert read_as == "Mooncake's hash_ids of 512 tokens, times in ms"
    assert read_as in " ".join(run("curve", trace).stdout.split())
    by_model = run("curve", trace, "--model", "llama-3.1-8b", "--memory", "1", "--json", "-")
    assert json.loads(by_model.stdout)["read_as"] == read_as


def test_where_nothing_comes_again_no_capacity_reaches_a_share_of_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        as_text(*({"timestamp": n, "input_length": 9, "output_length": 1, "hash_ids": [n]} for n in range(3)))
    )
    shown = " ".join(run("curve", trace).stdout.split())
    assert "ideal hit ratio by block 0.00% (0 of 3)" in shown
    assert "LRU reaches" not in shown
