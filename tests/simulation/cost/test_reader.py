"""Cost models by name and from files: exactly the fields, or a message that names file and key."""

import json
from pathlib import Path

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.models import read_model
from pagedkv.simulation.cost import CostModel, cost_model_names, derive_cost_model, find_gpu, read_cost_model


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cost.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_names_are_unique_and_each_can_be_read() -> None:
    names = cost_model_names()
    assert len(set(names)) == len(names)
    assert names[:2] == ("instant", "per-token")
    for name in names:
        assert read_cost_model(name.upper()) == read_cost_model(name)


def test_any_model_on_any_gpu_is_a_name() -> None:
    expected = derive_cost_model(read_model("qwen3-8b"), find_gpu("l4"), 4)
    assert read_cost_model("qwen3-8b/4xl4") == expected
    assert "qwen3-8b/4xl4" not in cost_model_names()


def test_a_file_is_read_back_as_written(tmp_path: Path) -> None:
    cost = read_cost_model("gemma-3-27b/h100")
    assert read_cost_model(write(tmp_path, json.dumps(cost.as_dict()))) == cost


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-3.1-8b/h1000", "unknown GPU 'h1000': nearest is h100"),
        ("llama-3.1-8b/0xh100", "unknown GPU '0xh100'"),
        ("llama-3.1-70b/h100", "use at least 2 of them, or larger ones"),
        ("llama-3.1-9b/h100", "neither a cost model's name nor a file. Nearest names: llama-3.1-8b/h100"),
        ("instnat", "Nearest names: instant"),
        ("no/such/file.json", "neither a cost model's name nor a file"),
        ("", "cannot be read: Is a directory"),
        ("x" * 10_000, "neither a cost model's name nor a file"),
        ("nul\0byte", "neither a cost model's name nor a file"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_near(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_cost_model(name)
    assert len(str(caught.value)) < 400


FIELDS = CostModel().as_dict()

REFUSED: dict[str, tuple[str, str]] = {
    "missing key": (json.dumps({"fixed_s": 1}), "missing key 'token_compute_s'. Write 0 for what costs nothing"),
    "misspelt key": (
        json.dumps({key: value for key, value in FIELDS.items() if key != "weights_s"} | {"weight_s": 1}),
        r"unknown key 'weight_s'. Did you mean weights_s\?",
    ),
    "further key": (json.dumps(FIELDS | {"comment": "mine"}), "unknown key 'comment'"),
    "negative": (json.dumps(FIELDS | {"fixed_s": -1}), "fixed_s must be a number of seconds .* got -1"),
    "NaN": (json.dumps(FIELDS | {"weights_s": float("nan")}), "weights_s .* got nan. Correct the value"),
    "infinite": (json.dumps(FIELDS | {"weights_s": float("inf")}), "weights_s .* got inf"),
    "beyond floats": (
        json.dumps(FIELDS).replace('"fixed_s": 0.0', '"fixed_s": 1e999'),
        "fixed_s .* got inf",
    ),
    "null": (json.dumps(FIELDS | {"sequence_s": None}), "sequence_s .* got None"),
    "text": (json.dumps(FIELDS | {"sequence_s": "5 us"}), "sequence_s .* got '5 us'"),
    "a list": (json.dumps(FIELDS | {"sequence_s": [1]}), r"sequence_s .* got \[1\]"),
    "share over 1": (json.dumps(FIELDS | {"expert_share": 2}), "expert_share must be over 0 and at most 1, got 2"),
    "window as fraction": (json.dumps(FIELDS | {"window": 0.5}), "window must be an integer, got 0.5"),
    "not an object": ("[]", "holds a JSON list"),
    "not JSON": ("fixed_s: 1", "not a JSON file"),
    "empty": ("", "not a JSON file"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_that_is_no_cost_model_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_cost_model(path)
    assert str(caught.value).startswith(f"{path}: ")
