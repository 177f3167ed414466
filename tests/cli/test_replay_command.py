"""``pagedkv replay``: what it prints and writes, and what bad input gets."""

import json
import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from pagedkv.cli import serving
from pagedkv.cli.commands import curve as curve_command
from pagedkv.cli.engine_options import EngineOptions
from pagedkv.cli.options import DEFAULT_COST_MODEL
from pagedkv.cli.plan_axes import PlanAxes
from pagedkv.cli.serving import CLOSED_LOOP, ServingOptions
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.engine.config import EngineConfig
from pagedkv.planner.traces.merging import interleave_sessions
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.closed_loop import ClosedLoop, serve_closed
from pagedkv.simulation.cost import CostModel, read_cost_model
from tests.cli.command import run
from tests.report.page_reader import read_page
from tests.traces.trace_files import BROKEN, HASH_IDS, HASH_RUNS, LENGTHS, SESSIONS, BrokenTrace

pytestmark = pytest.mark.plain_only


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(HASH_IDS)
    return path


def library_result(trace: Path, num_blocks: int, block_size: int, *, is_closed: bool) -> dict[str, object]:
    config = ServingConfig(num_blocks, block_size, cost_model_name=DEFAULT_COST_MODEL)
    server = VirtualServer(config, read_cost_model(DEFAULT_COST_MODEL), is_closed=is_closed)
    with TraceReader(trace) as reader:
        requests = interleave_sessions(reader.sessions(), 60.0) if reader.session_per_row else reader
        if not is_closed:
            return server.run(requests).as_dict()
        serve_closed(server, server.take_ended, requests, loop=ClosedLoop(), load=1.0)
        return server.result().as_dict()


@pytest.mark.parametrize(
    ("text", "more"), [(HASH_IDS, ()), (HASH_RUNS, ()), (SESSIONS, ("--open",)), (SESSIONS, ()), (LENGTHS, ())]
)
def test_the_json_holds_what_the_library_finds(tmp_path: Path, text: str, more: tuple[str, ...]) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    result = run("replay", trace, "--num-blocks", 100, "--block-size", 8, *more, "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document.pop("trace") == str(trace)
    assert document.pop("command").startswith("pagedkv")
    assert document.pop("read_as").endswith(("times in ms", "times in s", "own clock"))
    assert document.pop("warnings")[0].startswith(
        "the seconds are those of qwen3-32b/8xh200, since the hardware is not given"
    )
    assert document.pop("seconds")["in_short"] == "data sheet, assumed"
    is_closed = text is SESSIONS and not more
    assert document.pop("arrivals", "").startswith("closed loop" if is_closed else "")
    assert document == library_result(trace, 100, 8, is_closed=is_closed)


def test_sessions_of_agents_are_a_closed_loop_unless_recorded_times_are_wanted(tmp_path: Path) -> None:
    """The agent's second turn came 1 s after an answer of 9 s; here answers take less."""
    call = {"input_length": 40, "output_length": 2, "hash_runs": [[1, 5]]}
    rows = [{**call, "t": 0, "api_time": 9}, {**call, "t": 10, "api_time": 9}]
    trace = tmp_path / "trace"
    trace.write_text(json.dumps({"session": "s", "block_size": 8, "requests": rows}))
    arguments = ("replay", trace, "--num-blocks", 100, "--block-size", 8)
    closed, kept = (json.loads(run(*arguments, *more, "--json", "-").stdout) for more in ((), ("--open",)))
    assert 1 < closed["steps"]["virtual_s"] < 2
    assert 10 < kept["steps"]["virtual_s"] < 11
    assert closed["arrivals"] == CLOSED_LOOP
    assert CLOSED_LOOP.startswith(shown_by(*arguments)["arrivals"])
    assert "arrivals" not in shown_by(*arguments, "--open")
    twice = json.loads(run(*arguments, "--load", 2, "--json", "-").stdout)
    assert twice["steps"]["virtual_s"] == closed["steps"]["virtual_s"], "one session, whose pauses are its own"


def test_steps_overlap_by_an_option(trace: Path) -> None:
    arguments = ("replay", trace, "--num-blocks", 100, "--block-size", 8, "--json", "-")
    plain, ahead = (json.loads(run(*arguments, *more).stdout) for more in ((), ("--overlap",)))
    assert ahead["config"].pop("overlap") is True
    assert ahead["config"] == plain["config"]
    assert ahead["requests"] == plain["requests"]


def shown_by(*arguments: object) -> dict[str, str]:
    """Run a command and read the rows of its tables: first column, and the rest."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = (line.strip().split("  ", 1) for line in result.stdout.splitlines() if "  " in line.strip())
    return {name: value.strip() for name, value in rows}


def test_the_tables_show_the_figures(trace: Path) -> None:
    shown = shown_by("replay", trace)
    assert shown["requests"] == "3"
    assert shown["prompt tokens"] == "2,649"
    assert shown["output tokens"] == "25"
    assert shown["hit ratio by block"] == "39.26% (64 of 163)"
    assert shown["hit ratio by token"] == "38.66% (1,024 of 2,649)"
    assert (shown["preemptions by recompute"], shown["tokens computed again"]) == ("0", "0")
    assert shown["time of this run, in all"].endswith("ns a token")
    assert shown["blocks in use"].endswith("%")


def test_a_replay_evicts_as_an_engine_does_unless_told(trace: Path) -> None:
    document = json.loads(run("replay", trace, "--json", "-").stdout)
    every_field = (*fields(EngineConfig), *fields(SpaceConfig))
    assert [field.default for field in every_field if field.name == "eviction"] == 2 * ["lru"]
    assert document["config"]["policy"] == "lru"
    assert shown_by("replay", trace)["eviction policy (--eviction)"] == "lru"
    assert shown_by("replay", trace, "--eviction", "hazard")["eviction policy (--eviction)"] == "hazard"


def test_tails_have_the_length_that_is_typed(trace: Path) -> None:
    run_with = partial(run, "replay", trace, "--json", "-", "--eviction", "tlru")
    assert json.loads(run_with("--tail-tokens", "64").stdout)["config"]["tail_tokens"] == 64
    assert run_with("--tail-tokens", "-1").exit_code == 2
    options = {"eviction": "tlru", "tail_tokens": 64}
    replayed = ServingOptions(**options).configuration()[0]  # type: ignore[arg-type]
    axes = PlanAxes("llama-3.1-8b", gpus="h100", loads="1", evictions="tlru", tail_tokens=64)
    (planned, *_) = axes.points(2e3, 8000, has_content=True)
    assert replayed.space_config().tail_tokens == planned.point.config.space_config().tail_tokens == 64
    assert EngineOptions(**options).config().tail_tokens == 64  # type: ignore[arg-type]


def test_the_same_run_writes_the_same_bytes(tmp_path: Path, trace: Path) -> None:
    written = []
    for name in ("first.json", "second.json"):
        result = run("replay", trace, "--num-blocks", 500, "--beams", 3, "--json", tmp_path / name)
        assert result.exit_code == 0
        assert "hit ratio by token" in result.stdout
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


def test_requests_larger_than_the_pool_are_counted(trace: Path) -> None:
    result = run("replay", trace, "--num-blocks", 11, "--json", "-")
    document = json.loads(result.stdout)
    counts = document["requests"]
    assert (result.exit_code, counts["num_requests"], counts["num_rejected"]) == (0, 3, 2)


def test_a_limit_cuts_the_trace_short(trace: Path) -> None:
    document = json.loads(run("replay", trace, "--limit", 2, "--json", "-").stdout)
    assert document["requests"]["num_requests"] == 2


def test_a_model_and_a_gpu_give_groups_blocks_and_bytes(trace: Path) -> None:
    document = json.loads(run("replay", trace, "--model", "gemma-2-27b", "--gpu", "2xh100", "--json", "-").stdout)
    assert document["config"]["model"] == "gemma-2-27b"
    assert list(document["pools"]) == ["full", "window_4096"]
    assert all(pool["block_nbytes"] > 0 for pool in document["pools"].values())
    # Of the requests, 891 tokens long in the mean, a window keeps all, and the tokens that a step computes pass it.
    full, window = (document["pools"][pool]["num_blocks"] + 1 for pool in ("full", "window_4096"))
    mean = (1100 + 20 + 1536 + 13 + 5) / 3
    assert full * 16 / mean == pytest.approx((window * 16 - 8192 - 16) / (mean + 32), rel=0.001)
    assert document["waste"]["max_length"] == 8192
    assert document["config"]["cost_model_name"] == "gemma-2-27b/2xh100"
    assert [each.partition(", ")[2][:19] for each in document["warnings"]] == ["computed from the G"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            [],
            "those of qwen3-32b/8xh200, since the hardware is not given: name it by --model and --gpu or --cost-model",
        ),
        (
            ["--model", "llama-3.1-8b", "--memory", 4],
            "those of qwen3-32b/8xh200, not of llama-3.1-8b, since the hardware is not given",
        ),
        (
            ["--model", "llama-3.1-8b", "--memory", 4, "--cost-model", "qwen3-8b/h100"],
            "the seconds are those of qwen3-8b/h100, the memory is that of llama-3.1-8b",
        ),
    ],
)
def test_seconds_of_another_model_are_warned_of(trace: Path, options: list[object], told: str) -> None:
    result = run("replay", trace, *options)
    text = " ".join(result.stdout.split())
    before_the_tables = text.partition("Replay of ")[0]
    assert before_the_tables.startswith("KV memory needed: ")
    assert told in before_the_tables.partition("Warning: ")[2]
    assert "Seconds, by the cost model qwen3" in text
    first, second = json.loads(run("replay", trace, *options, "--json", "-").stdout)["warnings"][:2]
    assert told in first
    assert "computed from the GPU's data sheet and not measured" in second


@pytest.mark.parametrize(
    ("options", "name", "told", "sentence"),
    [
        (["--model", "llama-3.1-8b", "--gpu", "2xH100"], "llama-3.1-8b/2xh100", "data sheet", "computed from the GPU"),
        (["--cost-model", "instant"], "instant", "stated, error unknown", "stated, with an unknown error"),
        (["--cost-model", "cost.json"], "cost.json", "calibrated, error 12.7%", "calibrated on 439 measured steps"),
    ],
)
def test_replay_and_report_show_the_source_of_the_seconds(
    trace: Path, options: list[str], name: str, told: str, sentence: str
) -> None:
    if "cost.json" in options:
        file = trace.parent / "cost.json"
        calibration = {"num_steps": 439, "median": 0.127, "p90": 0.344}
        file.write_text(json.dumps({**CostModel(token_compute_s=1e-4).as_dict(), "calibration": calibration}))
        options = [options[0], str(file)]
    stdout = " ".join(run("replay", trace, *options).stdout.split())
    assert f"cost model of the seconds {name}, {told}" in stdout
    assert f"Seconds, by the cost model {name}, {told}" in stdout
    assert f"Warning: the seconds are those of {name}, {sentence}" in stdout
    page, behind = trace.parent / "page.html", trace.parent / "behind.json"
    assert run("report", trace, "-o", page, *options, "--json", behind).exit_code == 0
    replay = json.loads(behind.read_text())["runs"][0]["replay"]
    assert (replay["seconds"]["cost_model_name"], replay["seconds"]["in_short"]) == (name, told)
    shown = read_page(page.read_text())
    assert shown.texts("h1")[0].endswith(f"(seconds: {name}, {told})")
    assert shown.row("source of the seconds") == [f"{name}, {told}"]
    assert str(trace.parent) not in page.read_text()


def test_of_lengths_alone_nothing_is_claimed_to_hit_or_miss(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text(LENGTHS)
    stdout = " ".join(run("replay", trace).stdout.split())
    assert "hit ratio by token unknown, the trace has only lengths" in stdout
    hits = json.loads(run("replay", trace, "--json", "-").stdout)["hits"]
    assert (hits["token_hit_ratio"], hits["block_hit_ratio"]) == (None, None)
    assert "100" not in run("replay", trace).stdout.partition("by cause")[2].partition("Seconds")[0]
    assert "the trace has lengths but no content" in run("replay", trace).stdout


def test_a_run_that_serves_nobody_is_an_error(tmp_path: Path, trace: Path) -> None:
    trace.write_text(HASH_IDS.splitlines()[0])
    result = run("replay", trace, "--num-blocks", 11, "--json", tmp_path / "result.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "not one of 1 requests fits the pools, the largest of which has 10 blocks" in result.stderr
    assert list(tmp_path.iterdir()) == [trace]


def test_some_requests_that_are_rejected_are_warned_of(trace: Path) -> None:
    assert "2 of 3 requests (66.7%) were rejected" in run("replay", trace, "--num-blocks", 11).stdout


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("command", ["replay", "curve"])
def test_no_number_is_broken_on_a_narrow_terminal(
    trace: Path, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    options = ["--model", "gemma-2-27b", "--memory", "20,40"] if command == "curve" else ["--model", "gemma-2-27b"]
    monkeypatch.setenv("COLUMNS", "200")
    wide = run(command, trace, *options).stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = run(command, trace, *options).stdout
    assert {word for word in narrow.split() if word[0].isdigit()} >= {
        word for word in wide.split() if word[0].isdigit() and "ns" not in word and not word.endswith(".0")
    } - _times(wide)
    assert max(map(len, narrow.splitlines())) <= columns


def _times(text: str) -> set[str]:
    """Words of the one row that differs from run to run."""
    return {word for line in text.splitlines() if "time of this run" in line for word in line.split()}


def test_pools_can_have_blocks_of_their_own(trace: Path) -> None:
    blocks = "full=3000,window_4096=500"
    document = json.loads(run("replay", trace, "--model", "gemma-2-27b", "--num-blocks", blocks, "--json", "-").stdout)
    assert [pool["num_blocks"] for pool in document["pools"].values()] == [2999, 499]
    assert "GiB" in run("replay", trace, "--model", "gemma-2-27b", "--memory", "20").stdout


def test_a_cost_model_may_be_a_file(tmp_path: Path, trace: Path) -> None:
    cost_model = tmp_path / "cost.json"
    cost_model.write_text(json.dumps(CostModel(fixed_s=0.5).as_dict()))
    steps = json.loads(run("replay", trace, "--cost-model", cost_model, "--json", "-").stdout)["steps"]
    assert steps["busy_s"] == 0.5 * steps["num_steps"]


def test_a_load_divides_the_arrivals(trace: Path) -> None:
    slow, fast = (
        json.loads(run("replay", trace, "--cost-model", "instant", "--load", load, "--json", "-").stdout)["steps"]
        for load in (1, 10)
    )
    assert slow["virtual_s"] == 10 * fast["virtual_s"] > 0


def test_lines_beyond_the_limit_are_not_read(trace: Path) -> None:
    trace.write_text(HASH_IDS + "broken\n")
    assert run("replay", trace, "--limit", 3).exit_code == 0
    assert run("replay", trace, "--limit", 4).exit_code == 2


@pytest.mark.parametrize("broken", [pytest.param(broken, id=name) for name, broken in BROKEN.items()])
def test_a_broken_trace_gets_one_line_and_leaves_no_file(tmp_path: Path, broken: BrokenTrace) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(broken.content)
    result = run("replay", trace, "--json", tmp_path / "result.json")
    assert (result.exit_code, result.stdout) == (2, "")
    (message,) = result.stderr.splitlines()
    place = trace if broken.line is None else f"{trace}:{broken.line}"
    assert message.startswith(f"pagedkv: {place}: ")
    assert broken.reason in message
    assert list(tmp_path.iterdir()) == [trace]


def test_a_missing_trace_gets_one_line(tmp_path: Path) -> None:
    for trace, reason in (
        (tmp_path / "missing", "cannot be opened"),
        (tmp_path, "the folder has no file that ends in"),
    ):
        result = run("replay", trace)
        assert (result.exit_code, result.stdout) == (2, "")
        (message,) = result.stderr.splitlines()
        assert message.startswith(f"pagedkv: {trace}: {reason}")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--num-blocks", 0),
        ("--num-blocks", 1),
        ("--num-blocks", -5),
        ("--block-size", 0),
        ("--block-size", -16),
        ("--trace-block-size", 0),
        ("--limit", 0),
        ("--limit", -1),
        ("--limit", 10**20),
        ("--max-sequences", 0),
        ("--max-batched-tokens", 255),
        ("--watermark", "100%"),
        ("--watermark", "-5%"),
        ("--watermark", 0.01),
        ("--load", 0),
        ("--load", -2),
        ("--load", "nan"),
        ("--seed", -1),
        ("--samples", 0),
        ("--samples", 257),
        ("--beams", 0),
        ("--host-blocks", -3),
        ("--max-length", 0),
        ("--session-interval", -1),
        ("--eviction", "oldest"),
        ("--preemption", "drop"),
        ("--model", "lama-3.1-8b"),
        ("--cost-model", "lama-3.1-8b/h100"),
        ("--num-blocks", "many"),
    ],
)
def test_a_size_out_of_range_gets_one_line(tmp_path: Path, trace: Path, option: str, value: object) -> None:
    result = run("replay", trace, option, value, "--json", tmp_path / "result.json")
    assert (result.exit_code, result.stdout) == (2, "")
    (message,) = result.stderr.splitlines()
    assert message.startswith("pagedkv: ")
    assert str(value) in message
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize(
    "options",
    [
        ["--samples", 2, "--beams", 2],
        ["--num-blocks", "full=100"],
        ["--num-blocks", "full=100,full=50", "--model", "gemma-2-27b"],
        ["--num-blocks", 10**9],
        ["--max-sequences", 10**6, "--max-batched-tokens", 10**6],
        ["--host-blocks", 100],
        ["--preemption", "swap"],
        ["--memory", 3],
        ["--gpu", "h100"],
        ["--model", "llama-3.1-70b", "--gpu", "h100"],
        ["--model", "llama-3.1-8b", "--gpu", "z80"],
        ["--model", "llama-3.1-8b", "--memory", 0.001],
        ["--model", "llama-3.1-8b", "--memory", 3, "--num-blocks", 100],
    ],
)
def test_options_that_contradict_each_other_get_one_line(tmp_path: Path, trace: Path, options: list[object]) -> None:
    result = run("replay", trace, *options, "--json", tmp_path / "result.json")
    assert (result.exit_code, result.stdout) == (2, "")
    (message,) = result.stderr.splitlines()
    assert message.startswith("pagedkv: ")
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize("arguments", [["--block-size", "many"], ["--nonsense"], []])
def test_a_wrong_command_line_is_refused(trace: Path, arguments: list[str]) -> None:
    result = run("replay", *([trace, *arguments] if arguments else []))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


def test_an_unwritable_result_is_refused_before_the_trace_is_read(tmp_path: Path) -> None:
    for target in (tmp_path / "missing" / "result.json", tmp_path):
        result = run("replay", tmp_path / "no trace", "--json", target)
        assert (result.exit_code, result.stdout) == (2, "")
        (message,) = result.stderr.splitlines()
        assert message.startswith(f"pagedkv: {target}: cannot be written")


@pytest.mark.parametrize("command", [["replay"], ["curve"]])
def test_a_result_never_replaces_its_trace(tmp_path: Path, trace: Path, command: list[str]) -> None:
    (tmp_path / "link").symlink_to(trace)
    for target in (trace, tmp_path / "link"):
        result = run(*command, trace, "--json", target)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "would overwrite a file that it is made from" in result.stderr
    assert trace.read_text() == HASH_IDS


@pytest.mark.parametrize("memory", ["nan", "inf", "-inf", "0", "-1", "1e300", "9999999"])
def test_memory_that_cannot_be_gets_one_line(trace: Path, memory: str) -> None:
    result = run("replay", trace, "--model", "llama-3.1-8b", f"--memory={memory}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.match(r"pagedkv: --memory must be (a size such as|over 0 and at most 1,048,576 GiB, got) ", result.stderr)


def test_a_reservation_is_never_smaller_than_the_longest_request(trace: Path) -> None:
    waste = json.loads(run("replay", trace, "--max-length", 1, "--json", "-").stdout)["waste"]
    assert waste["max_length"] > 1
    assert 0 <= waste["contiguous"]["exact"] <= waste["contiguous"]["maximum"] < 1


def test_a_block_size_changes_the_blocks_and_not_the_memory(trace: Path) -> None:
    for block_size in (8, 16, 64):
        document = json.loads(run("replay", trace, "--block-size", block_size, "--json", "-").stdout)
        assert document["config"]["num_blocks"] * block_size == 4_194_304


def test_names_of_files_may_hold_anything(tmp_path: Path) -> None:
    trace = tmp_path / "[bold]x"
    trace.write_text("\ufeff" + HASH_IDS)  # with the mark that some editors put first
    assert "Replay of [bold]x" in run("replay", trace).stdout
    result = run("replay", tmp_path / "new\nline\x1b")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert r"new\nline\x1b" in result.stderr


def test_an_empty_file_is_refused_before_anything_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "empty"
    trace.write_text("")
    for module in (serving, curve_command):
        monkeypatch.setattr(module, "prepare", lambda _: pytest.fail("loops are compiled for nothing"))
    for command in (("replay",), ("replay", "--engine"), ("curve",)):
        result = run(*command, trace)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert "the file is empty. Name a trace with at least one request" in result.stderr


def test_presets_fit_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = run("presets").stdout.splitlines()
    for name in ("gemma-3-27b", "qwen3-next-80b-a3b", "b200", "llama-3.1-70b/8xh100"):
        place = next(place for place, line in enumerate(lines) if line.split()[:1] == [name])
        assert lines[place][:3].strip(), "the row begins with its name"
        assert lines[place + 1][:3].strip() or not lines[place + 1].strip(), f"the row of {name} goes on below"


def test_all_presets_are_listed() -> None:
    listed = run("presets").stdout.split()
    assert {"llama-3.1-8b", "h100", "llama-3.1-70b/8xh100", "instant"} <= set(listed)


def test_presets_say_where_they_come_from() -> None:
    document = json.loads(run("presets", "--json", "-").stdout)
    assert document["models"]["llama-3.1-8b"]["source"] == "meta-llama/Llama-3.1-8B"
    assert all(each["source"] for kind in ("models", "gpus") for each in document[kind].values())
    shown = " ".join(run("presets").stdout.split())
    assert "peaks of the data sheet, at shares of them; not measured" in shown
    assert "meta-llama/Llama-3.1-8B" in shown
