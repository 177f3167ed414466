"""``pagedkv calibrate``: what it prints and writes, and what bad input gets."""

import json
from pathlib import Path

import pytest

from pagedkv.planner.simulation.cost import CostModel, read_cost_model
from tests.cli.command import run
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


def test_options_are_checked(steps: Path, tmp_path: Path) -> None:
    assert "must be from 1" in run("calibrate", steps, "-o", tmp_path / "c", "--block-size", 0).stderr
    assert "neither a cost model's name" in run("calibrate", steps, "-o", tmp_path / "c", "--base", "nothing").stderr
    assert "cannot both be" in run("calibrate", steps, "-o", "-", "--json", "-").stderr
    assert "would overwrite" in run("calibrate", steps, "-o", steps).stderr
