"""``pagedkv plan``: what it prints, writes and keeps, and what bad input gets."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli.command import run, start
from tests.report.page_reader import read_page
from tests.traces.trace_files import HASH_IDS, as_text

pytestmark = pytest.mark.plain_only

COST = {
    "fixed_s": 0.01,
    "token_compute_s": 1e-5,
    "pair_compute_s": 0,
    "weights_s": 0,
    "experts_s": 0,
    "expert_share": 1,
    "context_token_s": 0,
    "window": 0,
    "window_pair_compute_s": 0,
    "window_token_s": 0,
    "sequence_state_s": 0,
    "sequence_s": 0,
    "several_s": 0,
    "chunk_s": 0,
    "swap_fixed_s": 0,
    "swap_token_s": 0,
}
SMALL = ("--model", "llama-3.1-8b", "--memory", "0.25,0.5", "--block-size", "16,64", "--load", "1")
PATIENCE_S = 300
NUM_POINTS = 2 * 2 * 2


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 200 * n, "input_length": 600, "output_length": 9, "hash_ids": [n % 3, 10 + n]} for n in range(24)
    ]
    path.write_text(as_text(*rows))
    return path


@pytest.fixture
def cost(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(COST))
    return path


def test_a_plan_ends_in_a_decision_and_keeps_its_points(trace: Path, cost: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    command = ("plan", trace, *SMALL, "--cost-model", cost, "--results", results, "-j", 2, "--ttft", 1, "--tpot", 0.5)
    first = run(*command, "--json", tmp_path / "plan.json")
    assert first.exit_code == 0, first.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["headline"].startswith(("Take ", "Stay with "))
    assert plan["headline"] in " ".join(first.stdout.split())
    assert " ".join(first.stdout.split()).startswith(f"{plan['need']['sentence']}. ")
    assert plan["need"]["live"]["num_blocks"] > 0
    assert plan["need"]["cache"]["gib"] == pytest.approx(plan["need"]["cache"]["nbytes"] / 2**30)
    assert len(plan["points"]) == NUM_POINTS
    assert [point["choices"] for point in plan["points"]][:2] == [
        {"memory": "0.25 GiB", "block size": "block 16", "policy": "lru"},
        {"memory": "0.25 GiB", "block size": "block 16", "policy": "hazard"},
    ]
    assert plan["points"][0]["kv_gib"] == pytest.approx(0.25, rel=0.02)
    assert plan["arrivals"].startswith("open loop")
    assert plan["bounds"] == {"ttft_s": 1.0, "tpot_s": 0.5}
    figures = plan["points"][0]["figures"]
    assert figures["num_finished"] == 24
    assert figures["hit_ratio"] > 0
    kept = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    assert len(kept) == NUM_POINTS
    again = run(*command, "--json", "-")
    assert json.loads(again.stdout)["points"] == plan["points"]
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == kept, "nothing was run again"


def test_a_page_is_written_with_the_headline(trace: Path, cost: Path, tmp_path: Path) -> None:
    options = ("--model", "llama-3.1-8b", "--memory", "0.25,0.5", "--eviction", "lru", "--block-size", "16")
    more = ("--cost-model", cost, "--results", tmp_path / "r", "-j", 1, "--load", "1")
    page = tmp_path / "plan.html"
    result = run("plan", trace, *options, *more, "--report", page)
    assert result.exit_code == 0, result.stderr
    assert read_page(page.read_text()).texts("h1")[0] in " ".join(result.stdout.split())
    refused = run("plan", trace, *options, *more, "--report", tmp_path / "plan.txt")
    assert (refused.exit_code, "name an .html file" in refused.stderr) == (2, True)


def test_a_longer_list_runs_what_is_new_and_a_damaged_point_again(trace: Path, cost: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    small = ("plan", trace, "--model", "llama-3.1-8b", "--memory", "0.25,0.5", "--load", "1", "--cost-model", cost)
    command = (*small, "--results", results, "--eviction", "lru", "-j", 1)
    assert run(*command, "--block-size", 16).exit_code == 0
    before = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    damaged = min(before)
    (results / damaged).write_text("{")
    assert run(*command, "--block-size", "16,32").exit_code == 0
    after = {path.name: path.stat().st_mtime_ns for path in results.iterdir()}
    assert len(after) == 4
    assert [name for name in before if after[name] == before[name]] == [max(before)]
    assert json.loads((results / damaged).read_text())["figures"]["num_finished"] == 24


def test_lengths_alone_claim_no_hits_and_try_one_policy(tmp_path: Path, cost: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("arrived_s,input_length,output_length\n" + "".join(f"{n / 5},300,5\n" for n in range(20)))
    result = run("plan", trace, *SMALL, "--cost-model", cost, "--results", tmp_path / "r", "-j", 1, "--json", "-")
    plan = json.loads(result.stdout)
    assert {point["figures"]["hit_ratio"] for point in plan["points"]} == {None}
    assert len(plan["points"]) == 4
    assert "lengths but no content" in plan["warnings"][2]
    assert not any("hit ratio" in reason for reason in plan["reasons"])


def test_sessions_in_a_closed_loop_are_said_to_be(trace: Path, cost: Path, tmp_path: Path) -> None:
    options = ("--model", "llama-3.1-8b", "--memory", "1,2", "--eviction", "lru", "--block-size", "16", "--load", "1")
    result = run(
        *("plan", trace, *options, "--cost-model", cost, "--results", tmp_path / "r", "--closed-loop", "-j", 1),
        *("--json", "-"),
    )
    assert json.loads(result.stdout)["arrivals"].startswith("closed loop: sessions begin as recorded")
    refused = run("plan", trace, *options, "--closed-loop", "--open")
    assert "--open keeps the recorded times, and --closed-loop does not" in refused.stderr


def test_sessions_of_agents_are_planned_in_a_closed_loop(cost: Path, tmp_path: Path) -> None:
    call = {"input_length": 40, "output_length": 2, "hash_runs": [[1, 5]], "api_time": 9}
    agents = tmp_path / "agents"
    session = {"session": "s", "block_size": 8, "requests": [{**call, "t": 0}, {**call, "t": 10}]}
    agents.write_text(json.dumps(session))
    options = ("--model", "llama-3.1-8b", "--memory", "1,2", "--eviction", "lru", "--block-size", "16", "--load", "1")
    common = ("plan", agents, *options, "--cost-model", cost, "--results", tmp_path / "r", "-j", 1, "--json", "-")
    closed, kept = (json.loads(run(*common, *more).stdout) for more in ((), ("--open",)))
    assert closed["arrivals"].startswith("closed loop: ")
    assert kept["arrivals"].startswith("open loop: ")
    assert closed["points"][0]["figures"]["span_s"] < kept["points"][0]["figures"]["span_s"] - 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "1,1"), "--memory must be a list of different values"),
        (("--memory", "a"), "--memory must be a size such as 16GiB or 500MB, or 16, which is GiB; got 'a'"),
        (("--memory", "-1"), "--memory must be a size such as 16GiB"),
        ((), "name the hardware to plan for: --gpu 8xh100, or --memory 40"),
        (("--gpu", "h100,h200", "--memory", "3"), "--memory goes with one --gpu"),
        (("--gpu", "h101"), "unknown GPU 'h101'"),
        (("--memory", "1", "--eviction", "none"), "none"),
        (("--memory", "1", "--load", "0"), "--load: at 0 times the recorded traffic no request ever arrives"),
        (
            ("--memory", "1", "--load", "1,1e9"),
            "--load: each must be over 0 and at most 1,000 times the recorded traffic",
        ),
        (("--memory", "1", "--load", "nan"), "--load: each must be over 0 and at most 1,000"),
        (("--memory", "1", "--load", "a"), "--load must be a list of values such as 16,64, got 'a'"),
        (("--gpu", "h100", "--price", "h100"), "--price must be the price of a GPU for an hour, as in h100=2.5,l4=0.7"),
        (("--gpu", "h100", "--price", "h100=0"), "--price must be the price of a GPU for an hour"),
        (("--gpu", "h100", "--price", "h101=2"), "unknown GPU 'h101'"),
        (("--gpu", "h100", "--price", "h200=2"), "--price names h200, and the plan is on h100: name a GPU of the plan"),
        (
            ("--memory", "1", "--price", "h200=2"),
            "--price names h200, and the plan is on no GPU that was named (--gpu)",
        ),
        (("--memory", "1", "--split", "0.5"), "--split is for models with several pools"),
        (("--memory", "1", "--ttft", "-1"), "--ttft must be over 0"),
        (("--gpu", "h100", "--tpot", "0.0001"), "--tpot 0.0001 cannot be met: by the cost model llama-3.1-8b/"),
        (("--memory", "1", "--jobs", "0"), "--jobs must be from 1"),
        (("--memory", "1", "--closed-loop", "--answer-speed", "0"), "--answer-speed must be positive"),
        (("--memory", ",".join(map(str, range(1, 500)))), "points are more than 1,000"),
    ],
)
def test_what_makes_no_sense_gets_one_line(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(HASH_IDS)
    result = run("plan", trace, "--model", "llama-3.1-8b", *options, "--results", tmp_path / "results")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_a_pipe_cannot_be_read_for_each_point(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = run("plan", tmp_path / "pipe", *SMALL)
    assert (result.exit_code, "name a file, not a pipe" in result.stderr) == (2, True)


def test_a_trace_that_is_not_there_is_named_with_the_reason(tmp_path: Path) -> None:
    gone = "cannot be opened: No such file or directory"
    empty = (
        "the folder has no file that ends in .jsonl or .json, also compressed. Name a folder of session files or logs"
    )
    for path, reason in ((tmp_path / "gone", gone), (tmp_path, f"{empty}, or a file")):
        result = run("plan", path, *SMALL)
        assert (result.exit_code, result.stderr) == (2, f"pagedkv: {path}: {reason}\n")


def test_a_fault_in_the_trace_is_told_by_whichever_process_finds_it(cost: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{n},30,5\n" for n in range(1100))
    trace.write_text("arrived_s,input_length,output_length\n" + rows + "2000,-5,3\n")
    result = run("plan", trace, *SMALL, "--cost-model", cost, "--results", tmp_path / "r", "-j", 2)
    assert result.exit_code == 2
    assert ":1102: input_length is -5" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_done_and_leaves_no_process(
    number: signal.Signals, code: int, cost: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_s,input_length,output_length\n" + "".join(f"{n},3,20\n" for n in range(300)))
    results = tmp_path / "results"
    memory = ",".join(str(n / 4) for n in range(2, 40))
    options = ("--model", "llama-3.1-8b", "--memory", memory, "--load", "1", "--block-size", "16", "--eviction", "lru")
    process = start("plan", trace, *options, "--cost-model", cost, "--results", results, "-j", 1)
    deadline = time.monotonic() + PATIENCE_S
    while not (results.is_dir() and list(results.glob("*.json"))) and time.monotonic() < deadline:
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (code, b"")
    (message,) = stderr.decode().splitlines()
    assert message.startswith("pagedkv: interrupted after ")
    assert message.endswith("points; they are kept, and the same command continues from there")
    assert list(results.glob("*.json"))
    assert not list(results.glob("*.partial"))
