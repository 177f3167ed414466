"""``pagedkv replay --engine``: the simulation beside the engine, which must go the same way step by step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from pagedkv.cli import engine_replay
from tests.cli.command import run
from tests.engine.families import make_model
from tests.traces.trace_files import LENGTHS, SESSIONS

GOLDEN = Path(__file__).with_name("golden") / "trace.jsonl"
TIGHT = ("--load", 100, "--block-size", 4, "--num-blocks", 12, "--max-sequences", 6, "--max-batched-tokens", 16)


def replayed(*arguments: object) -> dict[str, Any]:
    ended = run("replay", *arguments, "--engine", "--json", "-")
    assert (ended.exit_code, ended.stderr) == (0, "")
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def require_agreement(document: dict[str, Any]) -> None:
    assert document["differing"] == document["warnings"] == []
    for name in engine_replay.COUNTS:
        assert document["predicted"][name] == document["measured"][name]
    assert document["predicted"]["token_hit_ratio"] == document["measured"]["token_hit_ratio"]


@pytest.mark.parametrize("overlap", [(), ("--overlap",)])
@pytest.mark.parametrize("preemption", [(), ("--preemption", "swap", "--host-blocks", 20)])
def test_a_tight_pool_hits_and_preempts_exactly_as_predicted(
    preemption: tuple[object, ...], overlap: tuple[object, ...]
) -> None:
    document = replayed(GOLDEN, *TIGHT, *preemption, *overlap, "--cost-model", "per-token")
    require_agreement(document)
    measured = document["measured"]
    assert measured["num_hit_tokens"] > 0
    assert measured["num_swap" if preemption else "num_recompute"] > 0
    assert measured["num_output_tokens"] == document["simulation"]["requests"]["num_output_tokens"]
    assert measured["busy_s"] > 0
    assert document["cost_model"]["name"] == "per-token"


def test_seconds_are_predicted_by_what_was_measured_here(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(SESSIONS)
    document = replayed(trace, "--num-blocks", 400, "--block-size", 8, "--limit", 3)
    require_agreement(document)
    assert document["cost_model"]["name"] == "measured here"
    assert document["cost_model"]["fixed_s"] >= 0  # noise may hide so little
    assert document["predicted"]["tokens_per_s"] > 0
    assert document["model"] == "the demonstration's model"


def test_another_model_has_its_own_groups(tmp_path: Path) -> None:
    make_model("gemma3_text").save_pretrained(tmp_path)
    document = replayed(GOLDEN, *TIGHT, "--num-blocks", 40, "--cost-model", "per-token", "--model-path", tmp_path)
    require_agreement(document)
    assert len(document["simulation"]["pools"]) == 2


@pytest.mark.parametrize("overlap", [(), ("--overlap",)])
def test_samples_branch_alike(overlap: tuple[object, ...]) -> None:
    document = replayed(GOLDEN, *TIGHT, "--num-blocks", 60, "--samples", 2, *overlap, "--cost-model", "per-token")
    require_agreement(document)


def test_steps_that_overlap_are_as_predicted_at_any_load() -> None:
    for load in (1, 10, 1000):
        for num_blocks in (12, 40, 200):
            tight = (*TIGHT, "--num-blocks", num_blocks, "--load", load, "--cost-model", "per-token")
            require_agreement(replayed(GOLDEN, *tight, "--overlap"))


def test_steps_that_overlap_on_one_side_alone_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    make = engine_replay._engine_config
    monkeypatch.setattr(engine_replay, "_engine_config", lambda config: replace(make(config), overlap=False))
    assert "num_steps" in replayed(GOLDEN, *TIGHT, "--overlap", "--cost-model", "per-token")["differing"]


def test_a_table_has_both_sides() -> None:
    ended = run("replay", GOLDEN, *TIGHT, "--engine", "--cost-model", "per-token", "--limit", 3)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert "predicted" in ended.stdout
    assert "measured" in ended.stdout
    assert "generated tokens a second" in ended.stdout


def test_an_engine_that_goes_another_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an engine that shares no blocks."""
    make = engine_replay._engine_config

    def without_cache(config: Any) -> Any:  # noqa: ANN401 - as they are

        return replace(make(config), prefix_caching=False)

    monkeypatch.setattr(engine_replay, "_engine_config", without_cache)
    document = replayed(GOLDEN, *TIGHT, "--cost-model", "per-token")
    assert "num_hit_tokens" in document["differing"]
    assert document["warnings"][0].startswith("engine and simulation differ in ")


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text(LENGTHS)
    make_model("llama", max_position_embeddings=16).save_pretrained(tmp_path / "model")
    for arguments, message in (
        ((GOLDEN, "--model-path", tmp_path), "--model-path names the model of --engine"),
        ((GOLDEN, "--engine", "--beams", 2), "--engine runs a model of its own, without beams"),
        ((GOLDEN, "--engine", "--model", "llama-3.1-8b"), "it takes no --model"),
        ((GOLDEN, "--engine", "--model-path", tmp_path / "gone"), "gone' is no folder"),
        ((tmp_path / "gone", "--engine"), "gone: "),
        ((lengths, "--engine", "--model-path", tmp_path / "model", "--cost-model", "instant"), "has 16 positions"),
    ):
        ended = run("replay", *arguments)
        assert (ended.exit_code, ended.stdout) == (2, ""), arguments
        (line,) = ended.stderr.splitlines()
        assert line.startswith("pagedkv: "), arguments
        assert message in line, arguments
