"""``pagedkv plan``: the source of its seconds, which loads hold, what tokens cost, and why no more."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pagedkv.simulation.cost import read_cost_origin
from tests.cli.command import run
from tests.cli.test_plan_command import COST
from tests.report.page_reader import read_page
from tests.traces.trace_files import as_text

ONE = ("--model", "llama-3.1-8b", "--block-size", "16", "--eviction", "lru", "--max-sequences", "1", "-j", 1)
SETTING = (*ONE, "--resamples", 0)
CALIBRATION = {"read_as": "CSV", "num_steps": 439, "median": 0.127, "p90": 0.344, "bias": -0.005}


@pytest.fixture
def cost(tmp_path: Path) -> Path:
    """Write a model of steps of half a second: a request of two tokens takes one."""
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(COST | {"fixed_s": 0.5, "token_compute_s": 0, "calibration": CALIBRATION}))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a request every two seconds, for five minutes."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000 * n, "input_length": 600, "output_length": 2, "hash_ids": [n % 3, 10 + n]}
        for n in range(150)
    ]
    path.write_text(as_text(*rows))
    return path


def loads_shown(*options: object) -> list[str]:
    """Return the cells of load and verdict of each row of the table."""
    result = run("plan", *options)
    assert result.exit_code == 0, result.stderr
    table = result.stdout.partition("answers/s")[2].partition("Latencies of")[0]
    return re.findall(r"\S+x +(?:yes|queue|undecided)", table)


def planned(*options: object) -> dict[str, Any]:
    result = run("plan", *options, "--json", "-")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_without_loads_the_highest_that_holds_is_searched_for(trace: Path, cost: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    options = (trace, *SETTING, "--memory", "1,2", "--cost-model", cost, "--ttft", 4, "--results", results)
    plan = planned(*options)
    assert plan["loads"] == "searched"
    for setting in plan["settings"]:
        assert (setting["held"], setting["ended"], setting["is_decided"]) == (2.0, 2.18, True)
        assert setting["sustained_per_s"] == pytest.approx(1, rel=0.02)
    searched = [1.0, 2.0, 2.18, 2.38, 2.83, 4.0]
    assert [point["load"] for point in plan["points"]] == [*searched, *searched]
    assert [point["verdict"] for point in plan["points"]][:6] == ["holds"] * 2 + ["fails"] * 4
    told = "sustains 1 answers a second within the bounds, 2 times the recorded traffic (2.18 times does not hold)"
    assert told in plan["headline"]
    kept = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    assert len(kept) == 12
    assert planned(*options)["points"] == plan["points"]
    assert planned(*options, "-j", 2)["points"] == plan["points"]
    assert [row.split() for row in loads_shown(*options)] == [["2x", "yes"]] * 2
    every = [[f"{load:g}x", "yes" if load <= 2 else "queue"] for load in searched]
    assert [row.split() for row in loads_shown(*options, "--every-load")] == every * 2
    given = planned(*options, "--load", ",".join(map(str, searched)))
    assert [point["figures"] for point in given["points"]] == [point["figures"] for point in plan["points"]]
    assert given["settings"] == plan["settings"]
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == kept, "nothing was run again"


def test_the_headline_has_an_interval_which_is_the_same_everywhere(trace: Path, cost: Path, tmp_path: Path) -> None:
    """The seconds are off by 12.7 %, so one of 2 and 2.18 times is a step of the search away on either side."""
    common = (trace, *ONE, "--memory", "1,2", "--cost-model", cost, "--ttft", 4, "--limit", 90, "--results", tmp_path)
    page = tmp_path / "plan.html"
    result = run("plan", *common, "--resamples", 3, "--report", page, "--json", tmp_path / "plan.json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    interval = plan["interval"]
    assert interval["likeliest_per_s"] == pytest.approx(1, rel=0.03)
    assert interval["low_per_s"] < 1 / 1.127 < 1 / (1 - 0.127) < interval["high_per_s"]
    assert (interval["error"], interval["num_resamples"]) == (0.127, 3)
    told = f"holds {interval['low_per_s']:.3g} to {interval['high_per_s']:.3g} answers a second within the bounds, "
    told += f"{interval['likeliest_per_s']:.3g} l"
    assert told in plan["headline"]
    read = read_page(page.read_text())
    assert told in read.texts("h1")[0]
    shown = " ".join(result.stdout.split())
    assert told in shown
    why, remedy = (each for each in plan["reasons"] if "interval: " in each or "narrow it: " in each)
    assert "seconds that are off by 12.7% move it by -" in why
    for each in (why, remedy):
        assert each[1:] in shown
        assert any(each[1:] in text for text in read.texts("p"))
    off = planned(*common, "--resamples", 0)
    assert off["interval"] is None
    assert "sustains 1 answers a second" in off["headline"]
    assert off["points"] == plan["points"]
    few = planned(*common, "--resamples", 2)["interval"]
    assert (few["arrivals"], few["slower"]) == (0, interval["slower"])
    assert planned(*common, "--load", "1,2")["interval"] is None
    assert "--resamples must be 0 to 200" in run("plan", *common, "--resamples", 201).stderr


def test_what_binds_and_what_would_have_to_change_is_told(trace: Path, cost: Path, tmp_path: Path) -> None:
    plan = planned(trace, *SETTING, "--memory", "1,2", "--cost-model", cost, "--ttft", 4, "--results", tmp_path / "r")
    last = plan["points"][2]
    assert last["binds"] in (["queue", "ttft"], ["ttft"], ["queue"])
    assert last["reason"].startswith("does not hold; ")
    assert last["change"].endswith(
        "a higher one (--max-sequences), where memory and the bounds leave room, or more GPUs"
    )
    assert plan["reasons"][0] == f"at 2.18 times the recorded traffic that setting {last['reason']}"
    assert plan["reasons"][1] == f"remedy: {last['change']}"
    assert plan["points"][0]["reason"].startswith("holds: 100.0% of the requests keep the bounds")
    assert plan["points"][0]["change"] == ""


def test_a_trace_too_short_is_said_to_be(cost: Path, tmp_path: Path) -> None:
    """Its queue is drained within the bounds, which was told as a capacity of 80 times the traffic."""
    trace = tmp_path / "burst.jsonl"
    rows = [{"timestamp": 2.8 * n, "input_length": 60, "output_length": 2, "hash_ids": [n]} for n in range(200)]
    trace.write_text(as_text(*rows))
    options = ("--model", "llama-3.1-8b", "--memory", "1,2", "--block-size", "16", "--eviction", "lru", "-j", 1)
    for loads in ((), ("--load", "1,80")):
        command = ("plan", trace, *options, "--cost-model", cost, "--ttft", 60, "--results", tmp_path / "r", *loads)
        result = run(*command, "--json", tmp_path / "plan.json", "--report", tmp_path / "plan.html")
        assert result.exit_code == 0, result.stderr
        plan = json.loads((tmp_path / "plan.json").read_text())
        assert {point["verdict"] for point in plan["points"]} == {"too short"}
        assert {(each["held"], each["sustained_per_s"]) for each in plan["settings"]} == {(None, None)}
        assert "the trace is too short to determine the sustained traffic" in plan["headline"]
        (warning,) = [each for each in plan["warnings"] if "too short" in each]
        assert warning.startswith(
            "the trace is too short to find the sustained load (too short to decide: after the warm-up"
        )
        shown = " ".join(result.stdout.split())
        assert f"Warning: {warning}" in shown
        assert "keeps up" not in shown
        assert "too short" in read_page((tmp_path / "plan.html").read_text()).texts("h1")[0]


def test_the_source_of_seconds_is_shown_everywhere(trace: Path, cost: Path, tmp_path: Path) -> None:
    common = (trace, "--model", "llama-3.1-8b", "--limit", 60, "--block-size", "16", "--eviction", "lru", "-j", 1)
    for options, name, told, warning in (
        (
            ("--memory", "1,2", "--cost-model", cost),
            "cost.json",
            "calibrated, error 12.7%",
            "calibrated on 439 measured steps, with an error of 12.7% in the median and 34.4% at p90",
        ),
        (("--gpu", "h100,2xh100"), "llama-3.1-8b/h100", "data sheet", "computed from the GPU's data sheet"),
        (
            ("--memory", "1,2", "--cost-model", "instant"),
            "instant",
            "stated, error unknown",
            "stated, with an unknown error",
        ),
    ):
        page, behind = tmp_path / "plan.html", tmp_path / "plan.json"
        result = run(
            "plan", *common, *options, "--load", "1", "--results", tmp_path / "r", "--report", page, "--json", behind
        )
        assert result.exit_code == 0, result.stderr
        plan = json.loads(behind.read_text())
        assert plan["headline"].endswith(f"(seconds: {name}, {told})")
        assert (plan["seconds"]["cost_model_name"], plan["seconds"]["in_short"]) == (name, told)
        (said,) = [each for each in plan["warnings"] if each.startswith("the seconds are those of") and warning in each]
        assert name in said
        shown = " ".join(result.stdout.split())
        assert plan["headline"] in shown
        assert f"Warning: {said}" in shown
        assert f"(seconds: {name}, {told})" in read_page(page.read_text()).texts("h1")[0]


def test_calibrate_writes_the_error_that_a_plan_tells(tmp_path: Path) -> None:
    steps = tmp_path / "steps.csv"
    rows = "".join(f"{n},{0.01 + n * 4e-5 * (1.1 if n % 2 else 0.9)}\n" for n in range(1, 200))
    steps.write_text(f"num_new_tokens,seconds\n{rows}")
    result = run("calibrate", steps, "-o", tmp_path / "cost.json", "--json", tmp_path / "told.json")
    assert result.exit_code == 0, result.stderr
    overall = json.loads((tmp_path / "told.json").read_text())["errors"]["overall"]
    origin = read_cost_origin(str(tmp_path / "cost.json"))
    assert (origin.kind, origin.num_steps) == ("calibrated", 199)
    assert (origin.median, origin.p90) == (overall["median"], overall["p90"])
    assert origin.median is not None
    assert origin.median > 0


def test_a_price_tells_what_tokens_cost(trace: Path, cost: Path, tmp_path: Path) -> None:
    options = (trace, *SETTING, "--gpu", "h100,2xh100", "--cost-model", cost, "--results", tmp_path / "r")
    plan = planned(*options, "--price", "H100=2.5")
    assert plan["prices"] == {"h100": 2.5}
    for setting, gpus in zip(plan["settings"], (1, 2), strict=True):
        held = setting["held"]
        first_s, last_s = 0.0, 2.0 * 149 / held
        arrivals = [2.0 * n / held for n in range(150)]
        num_measured = sum(each >= first_s + last_s / 4 for each in arrivals)
        hours = 0.75 * last_s / 3600
        assert setting["cost"]["an_hour"] == 2.5 * gpus
        assert setting["cost"]["a_million_output_tokens"] == pytest.approx(
            2.5 * gpus * hours / (2 * num_measured) * 1e6
        )
        assert setting["cost"]["a_million_tokens"] == pytest.approx(2.5 * gpus * hours / (602 * num_measured) * 1e6)
    (told,) = [reason for reason in plan["reasons"] if "a million generated tokens" in reason]
    assert "by --price h100=2.5 an hour" in told
    assert told.endswith("; h100 costs the least")
    assert not any("cost" in reason for reason in planned(*options)["reasons"])
    assert {setting["cost"] for setting in planned(*options)["settings"]} == {None}
