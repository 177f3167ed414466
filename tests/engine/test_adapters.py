"""Requests of several LoRA adapters in one batch answer as ``generate`` with each adapter, and share nothing."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedkv.contract.answers import MissCause
from pagedkv.contract.keys import RequestKeys
from pagedkv.engine import LLM, EngineConfig, Intent, PromptLookup, SamplingParams
from pagedkv.engine.adapters import Adapters
from pagedkv.errors import ConfigurationError, RequestError
from pagedkv.tiers import FolderTier
from tests.choosing import long_but
from tests.engine.adapters import ASKED, answered, make_adapter, make_adapters, references
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, NUM_NEW, PROMPTS, compare, poison, reference, serve

pytest.importorskip("peft")
ROOMY = replace(CONFIG, num_blocks=300)
PARAMS = SamplingParams(max_tokens=NUM_NEW)
FAMILIES = ["llama", "mistral", "deepseek_v3", "bamba"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_adapters(tmp_path_factory.mktemp("adapters"), "llama")


@pytest.mark.parametrize("family", long_but(("llama", "bamba"), FAMILIES))
def test_mixed_requests_answer_as_generate_with_each_adapter(family: str, tmp_path: Path) -> None:
    folders = make_adapters(tmp_path, family)
    expected = references(family, folders)
    assert len({tuple(each.token_ids) for each in expected}) > len(PROMPTS) * 2, "the adapters change little"
    llm = LLM(make_model(family), replace(CONFIG, adapters=folders))
    poison(llm)
    first = answered(llm)
    compare(first, expected)
    again = answered(llm, ASKED[-3:])
    compare(again, expected[-3:])
    assert any(each.num_cached_tokens for each in (*first, *again))
    if family == "llama":  # windows and states leave room
        assert sum(each.num_preemptions for each in first) > 0
        assert sum(pool.num_evictions for pool in llm.core.space.statistics().pools) > 0


MODES: dict[str, EngineConfig] = {
    "overlap": replace(CONFIG, overlap=True),
    "swap": replace(CONFIG, preemption="swap", num_host_blocks=40, min_partial_hit=1),
    "guesses": replace(ROOMY, speculation=PromptLookup(3)),
    "whole prompts": replace(ROOMY, max_batched_tokens=512, max_sequences=20),
}


@pytest.mark.parametrize("mode", long_but(("swap", "overlap"), MODES))
def test_mixed_requests_answer_alike_in_all_modes(mode: str, folders: dict[str, str]) -> None:
    llm = LLM(make_model("llama"), replace(MODES[mode], adapters=folders))
    poison(llm)
    compare(answered(llm), references("llama", folders))


def test_forks_beams_and_scores_are_those_of_the_adapter(folders: dict[str, str]) -> None:
    llm = LLM(make_model("llama"), replace(ROOMY, adapters=folders))
    alone = LLM(make_model("llama"), replace(ROOMY, adapters={"red": folders["red"]}))
    wishes = [
        replace(PARAMS, n=3, temperature=1.0, seed=7),
        replace(PARAMS, num_beams=3, n=2),
        replace(PARAMS, prompt_logprobs=1, logprobs=1),
    ]
    intents = [Intent(adapter=name) for name in ("red", None, "blue/v2", "red")]
    mixed = llm.generate([PROMPTS[1]] * 4, wishes[0], intents)
    assert {each.token_ids for each in mixed[0].completions} == {each.token_ids for each in mixed[3].completions}
    for params in wishes:
        many = llm.generate([PROMPTS[0]] * 4, params, intents)
        (one,) = alone.generate([PROMPTS[0]], params, Intent(adapter="red"))
        assert [each.token_ids for each in many[0].completions] == [each.token_ids for each in one.completions]
        assert many[1].completions[0].token_ids != many[0].completions[0].token_ids
        scores = [[each.logprob for each in output.prompt_logprobs or () if each] for output in (many[0], one)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    (request,) = llm.submit([PROMPTS[3]], PARAMS, Intent(adapter="red"))
    while request.num_generated_tokens < 5:
        llm.step()
    child, other = request.fork(params=PARAMS), request.fork(params=PARAMS, intent=Intent())
    while llm.core.has_work:
        llm.step()
    assert child.num_missing_tokens == 1
    assert other.num_missing_tokens == len(other.prompt_token_ids), "a fork of another adapter shares no blocks"
    compare([request], references("llama", folders, [(PROMPTS[3], "red")]))


def compute_without(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    adapters: Any = llm.core._parts.adapters
    monkeypatch.setattr(adapters, "_compute_with", lambda _: None)


def compute_with_the_last(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    adapters: Any = llm.core._parts.adapters
    adapters._compute_with("red")
    monkeypatch.setattr(adapters, "_compute_with", lambda _: None)


@pytest.mark.parametrize("break_it", [compute_without, compute_with_the_last])
def test_a_pass_with_another_adapter_is_noticed(
    break_it: Callable[..., None], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(make_model("llama"), replace(ROOMY, adapters=folders))
    break_it(monkeypatch, llm)
    with pytest.raises(AssertionError):
        compare(answered(llm), references("llama", folders))


def test_without_the_extra_key_blocks_of_other_adapters_are_hit(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestKeys, "first_block_key", lambda *_: b"")
    llm = LLM(make_model("llama"), replace(ROOMY, adapters=folders))
    with pytest.raises(AssertionError):
        compare(answered(llm), references("llama", folders))


def test_a_miss_behind_another_adapter_is_explained(folders: dict[str, str]) -> None:
    llm = LLM(make_model("llama"), replace(ROOMY, adapters=folders))
    llm.generate([PROMPTS[0]], PARAMS, Intent(adapter="red"))
    (output,) = llm.generate([PROMPTS[0]], PARAMS, Intent(adapter="blue/v2"))
    assert output.num_cached_tokens == 0
    assert output.explanation is not None
    assert output.explanation.cause is MissCause.OTHER_ADAPTER


def test_a_name_with_other_weights_hits_nothing_of_the_old_ones(folders: dict[str, str], tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "kept", "64MiB", loads="always", deadline_s=30.0)
    prompt, intent = PROMPTS[3], Intent(adapter="red")

    def hit_by(given: dict[str, str]) -> int:
        llm = LLM(make_model("llama"), replace(ROOMY, adapters=given, tiers=(tier,)))
        (output,) = llm.generate([prompt], PARAMS, intent)
        assert llm.close()
        return output.num_cached_tokens

    moved = {**folders, "red": make_adapter(tmp_path / "moved", make_model("llama"), 17)}
    assert [hit_by(folders), hit_by(folders), hit_by(moved), hit_by(folders)] == [0, 32, 0, 32]


def test_a_prompt_is_forgotten_of_all_adapters(folders: dict[str, str]) -> None:
    llm = LLM(make_model("llama"), replace(ROOMY, adapters=folders))
    intents = [Intent(), Intent(adapter="red")]
    llm.generate([PROMPTS[3]] * 2, PARAMS, intents)
    assert llm.forget(PROMPTS[3]) == 2 * ((len(PROMPTS[3]) + NUM_NEW - 1) // 4)
    assert [each.num_cached_tokens for each in llm.generate([PROMPTS[3]] * 2, PARAMS, intents)] == [0, 0]


@pytest.mark.long
def test_other_engines_over_the_model_have_no_adapter(folders: dict[str, str]) -> None:
    model = make_model("llama")
    expected = reference(model, PROMPTS)
    adapted, plain = LLM(model, replace(ROOMY, adapters=folders)), LLM(model, ROOMY)
    compare(answered(adapted), references("llama", folders))
    compare(serve(plain)[0], expected)
    compare(serve(adapted)[0], expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"bias": "all"}, "has bias 'all': only LoRA"),
    "saved modules": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "has modules_to_save"),
    "the head itself": ({"saves_head": True}, "has weights besides those of LoRA, base_model.model.lm_head"),
    "another model": ({}, "adapter 'red'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_more_than_lora_of_this_model_is_refused(what: str, tmp_path: Path) -> None:
    changes, message = REFUSED[what]
    folder = make_adapter(tmp_path, make_model("llama"), 0, **changes)
    model = make_model("llama") if what != "another model" else make_model("llama", num_attention_heads=8)
    with pytest.raises(ConfigurationError, match=message):
        LLM(model, replace(CONFIG, adapters={"red": folder}))


def test_what_reads_weights_once_is_refused_with_adapters(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="compile_model read weights once"):
        replace(CONFIG, adapters=folders, compile_model=True)
    with pytest.raises(ConfigurationError, match="absorb_latents read weights once"):
        replace(CONFIG, adapters=folders, absorb_latents=True)
    model = make_model("llama")
    with pytest.raises(ConfigurationError, match="not its own draft model"):
        LLM(model, replace(CONFIG, adapters=folders), draft_model=model)
    with pytest.raises(ConfigurationError, match="is no folder of PEFT with adapter_config"):
        LLM(model, replace(CONFIG, adapters={"red": str(tmp_path)}))
    with pytest.raises(ConfigurationError, match="adapters must be folders by name"):
        replace(CONFIG, adapters={"": "here"})
    llm = LLM(model, replace(CONFIG, adapters=folders, compile_model=None))
    assert "is not compiled" in llm.core.choices
    with pytest.raises(ConfigurationError, match="has adapters already"):
        LLM(model, replace(CONFIG, adapters=folders))
    with pytest.raises(RequestError, match="no adapter 'green': it has 'red', 'blue/v2'"):
        llm.generate([PROMPTS[0]], PARAMS, Intent(adapter="green"))
    with pytest.raises(RequestError, match="no adapter 'red': it has none"):
        LLM(make_model("llama"), CONFIG).generate([PROMPTS[0]], PARAMS, Intent(adapter="red"))


def test_the_self_test_covers_each_adapter(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[str | None] = []
    activate = Adapters.active

    def noted(self: Adapters, name: str | None) -> Any:  # noqa: ANN401 - a context
        tested.append(name)
        return activate(self, name)

    monkeypatch.setattr(Adapters, "active", noted)
    LLM(make_model("llama"), replace(CONFIG, adapters=folders, self_test=True))
    assert tested == list(folders)


def test_an_adapter_of_another_shape_is_refused_and_names_its_first_tensor(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "wide", make_model("llama"), 0)
    path = Path(folder) / "adapter_model.safetensors"
    weights = load_file(path)
    name = next(name for name in sorted(weights) if name.endswith("q_proj.lora_A.weight"))
    weights[name] = torch.zeros(4, 7)
    save_file(weights, path)
    with pytest.raises(
        ConfigurationError, match=rf"its {re.escape(name)} is \[4, 7\], for a layer that takes 7 features"
    ):
        LLM(make_model("llama"), replace(CONFIG, adapters={"wide": folder}))
