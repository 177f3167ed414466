"""``pagedkv calibrate``: what it prints and writes, and what bad input gets."""

import json
from pathlib import Path

import pytest

from pagedkv.simulation.cost import CostModel, read_cost_model
from pagedkv.tiers import parse_nbytes
from tests.cli.command import run
from tests.server.serving import Script, make_service, running
from tests.simulation.calibration.measured import drawn_steps, write_csv

KNOWN = CostModel(fixed_s=2e-3, token_compute_s=4e-5, weights_s=8e-3, context_token_s=5e-8)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "steps.csv", drawn_steps(KNOWN))


def test_it_writes_a_file_that_a_replay_takes(steps: Path, tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    result = run("calibrate", steps, "-o", output)
    assert result.exit_code == 0
    assert read_cost_model(str(output)).token_compute_s == pytest.approx(4e-5, rel=1e-3)
    assert "Error on steps that were left out of the fit" in result.stdout
    assert "all 400" in " ".join(result.stdout.split())


def test_json_has_the_errors_too(steps: Path, tmp_path: Path) -> None:
    result = run("calibrate", steps, "-o", tmp_path / "cost.json", "--base", "llama-3.1-8b/h100", "--json", "-")
    document = json.loads(result.stdout)
    assert document["read_as"] == "CSV of steps"
    assert document["base"] == "llama-3.1-8b/h100"
    assert document["cost_model"]["swap_token_s"] == read_cost_model("llama-3.1-8b/h100").swap_token_s
    assert document["errors"]["overall"]["num_steps"] == 400
    written = json.loads((tmp_path / "cost.json").read_text())
    assert written.pop("calibration").items() >= document["errors"]["overall"].items()
    assert document["cost_model"] == written


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,0.5\n2,0.5\n", "2 steps are too few"),
        ("4,0.5\n" * 30, "all 30 steps compute 4 tokens"),
        ("1,0.5\n2,-3\n", ":3: a step of -3 seconds"),
    ],
)
def test_what_cannot_be_fitted_gets_one_line_and_writes_nothing(rows: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("num_new_tokens,seconds\n" + rows)
    result = run("calibrate", path, "-o", tmp_path / "cost.json")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "cost.json").exists()


def test_a_tier_is_measured_in_what_a_replay_takes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    result = run("calibrate", "--tier", f"folder:{root}:32MiB", "--json", tmp_path / "rate.json")
    assert result.exit_code == 0, result.stderr
    told = json.loads((tmp_path / "rate.json").read_text())
    assert (told["medium"], told["nbytes"]) == ("folder", 16 * 2**20)
    assert min(told["read_bandwidth"], told["write_bandwidth"], told["latency_s"]) > 0
    bandwidth, latency = told["options"].split()[1::2]
    assert told["options"] == f"--disk-bandwidth {bandwidth} --disk-latency {latency}"
    assert parse_nbytes(bandwidth) == pytest.approx(told["read_bandwidth"], rel=0.01)
    assert "for replay and plan" in result.stdout
    assert list(root.rglob("*.frame")) == []


def test_a_tier_that_cannot_be_measured_gets_one_line(steps: Path, tmp_path: Path) -> None:
    refused = {
        ("--tier", "host:1GiB"): "host memory is not measured",
        ("--tier", f"folder:{tmp_path}/root:1MiB"): "at least 33,554,432 bytes as its cap",
        ("--tier", "tape:1GiB"): "a tier is host:SIZE",
        ("--tier", f"redis:///{tmp_path}"): "does not answer",
        ("--tier", "host:1GiB", steps): "--tier measures a tier, and takes no steps",
        ("--tier", "host:1GiB", "-o", tmp_path / "c"): "--tier measures a tier",
        (): "give --output for a cost model, or --tier",
        (steps,): "give --output for a cost model",
    }
    for given, message in refused.items():
        result = run("calibrate", *given)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


def test_a_running_server_is_measured_or_its_steps_are_refused(tmp_path: Path) -> None:
    """On a machine that is busy with other things, steps of one size differ too much."""
    output = tmp_path / "cost.json"
    with running(make_service(Script(), longest=400)) as url:
        result = run("calibrate", "--url", url, "--seconds", 2, "-o", output)
    if result.exit_code:
        assert "the fitted cost model is off by" in result.stderr
        assert not output.exists()
    else:
        assert f"Cost model fitted to the server at {url}" in " ".join(result.stdout.split())
        assert read_cost_model(str(output)).step_s(1, 1, 1, 1) > 0
        assert json.loads(output.read_text())["calibration"]["read_as"] == f"the server at {url}"


def test_options_of_measuring_a_server_are_checked(steps: Path, tmp_path: Path) -> None:
    output = ("-o", tmp_path / "c")
    assert "give STEPS, or --url" in run("calibrate", steps, "--url", "http://127.0.0.1:1", *output).stderr
    assert "give STEPS, or --url" in run("calibrate", *output).stderr
    assert "give --url as well" in run("calibrate", steps, "--seconds", 3, *output).stderr
    refused = run("calibrate", "--url", "http://127.0.0.1:1", *output)
    assert refused.exit_code == 2
    assert "http://127.0.0.1:1: ClientConnectorError" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_options_are_checked(steps: Path, tmp_path: Path) -> None:
    assert "must be from 1" in run("calibrate", steps, "-o", tmp_path / "c", "--block-size", 0).stderr
    assert "neither a cost model's name" in run("calibrate", steps, "-o", tmp_path / "c", "--base", "nothing").stderr
    assert "cannot both be" in run("calibrate", steps, "-o", "-", "--json", "-").stderr
    assert "would overwrite" in run("calibrate", steps, "-o", steps).stderr
