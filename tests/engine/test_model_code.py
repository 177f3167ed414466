"""Tiers know a model by its code too: one that computes otherwise misses, whatever it was that changed."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, Final

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedkv import FullAttention
from pagedkv.device import Companion, KeyValueShape, LatentShape
from pagedkv.engine import LLM
from pagedkv.engine.identity import code_digest, identity_of, model_digest
from pagedkv.errors import UnsupportedModelError
from pagedkv.tiers import FolderTier
from tests.engine.families import make_model
from tests.engine.serving import compare, reference, serve
from tests.engine.test_tiers import NUM_NEW, PARAMS, PROMPTS, SECONDS, loaded, stored, with_tiers

Change = Callable[[Any], object]


def with_doubled_layer(model: Any) -> None:  # noqa: ANN401 - of transformers
    """Change one object's method."""
    layer, plain = model.model.layers[0].mlp, type(model.model.layers[0].mlp).forward
    layer.forward = MethodType(lambda self, hidden: 2 * plain(self, hidden), layer)


def with_other_norm_class(model: Any) -> None:  # noqa: ANN401 - of transformers
    """Give a norm a class of the same name that computes otherwise."""
    norm = model.model.layers[0].input_layernorm
    plain = type(norm)
    norm.__class__ = type(plain.__name__, (plain,), {"forward": lambda self, hidden: 2 * plain.forward(self, hidden)})


CHANGES: Final[dict[str, Change]] = {
    "scaling of attention": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.9),
    "epsilon of a norm": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "scaling of rotary embeddings": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5),
    "activation module": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "activation function": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU().forward),
    "method of an object": with_doubled_layer,
    "method of a class": with_other_norm_class,
}


def with_function_for_activation(function: Callable[..., torch.Tensor]) -> PreTrainedModel:
    model: Any = make_model("llama")
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = function
    assert isinstance(model, PreTrainedModel)
    return model


def changed(change: Change) -> PreTrainedModel:
    model: Any = make_model("llama")
    if change is CHANGES["activation function"]:
        del model.model.layers[0].mlp.act_fn  # a module may not be replaced by what is none
    change(model)
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that has the prompts of the unchanged model."""
    root = tmp_path_factory.mktemp("tier")
    stored(make_model("llama"), with_tiers(FolderTier(root, "64MiB")))
    return root


def engine(model: PreTrainedModel, folder: Path) -> LLM:
    return LLM(model, with_tiers(FolderTier(folder, "64MiB", loads="always", deadline_s=SECONDS)))


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_changed_model_loads_nothing_of_the_unchanged_one(change: Change, folder: Path) -> None:
    model = changed(change)
    llm = engine(model, folder)
    requests, _ = serve(llm, PROMPTS, PARAMS)
    assert loaded(requests) == [0, 0, 0, 0]
    compare(requests, reference(model, PROMPTS, NUM_NEW))
    assert llm.close()


def test_the_unchanged_model_loads_what_it_stored(folder: Path) -> None:
    llm = engine(make_model("llama"), folder)
    requests, _ = serve(llm, PROMPTS, PARAMS)
    assert loaded(requests) == [64, 32, 0, 0]
    assert llm.close()


DIGEST: Final = (
    "from tests.engine.families import make_model\n"
    "from pagedkv.engine.identity import model_digest\n"
    "print(model_digest(make_model('llama')).hex())"
)


@pytest.mark.long
def test_the_digest_is_that_of_another_process_whatever_the_order_of_its_sets() -> None:
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    assert done.stdout.strip() == model_digest(make_model("llama")).hex()


@pytest.mark.parametrize("shape", [KeyValueShape(2, 2, 8), KeyValueShape(2, 2, 8, 4), LatentShape(2, 8)])
def test_what_blocks_hold_beside_is_part_of_their_name(shape: KeyValueShape | LatentShape) -> None:
    model, spec = make_model("llama"), FullAttention(4)
    told = [
        identity_of(model, bytes(32), [spec], [replace(shape, companions=companions)], 8, ((),))
        for companions in ((), (Companion("keys", 1, 8),), (Companion("keys", 1, 8, torch.float16),))
    ]
    assert told[0] == identity_of(model, bytes(32), [spec], [shape], 8, ((),))
    assert len({each.groups for each in told}) == 3


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "lfm2", "nemotron_h"])
def test_the_digest_is_that_of_the_loaded_model_and_running_does_not_change_it(family: str, tmp_path: Path) -> None:
    model: Any = make_model(family)
    before = code_digest(model)
    model.save_pretrained(tmp_path / "some folder")
    assert code_digest(AutoModelForCausalLM.from_pretrained(tmp_path / "some folder").eval()) == before
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)
    assert code_digest(model) == before


def test_what_a_function_encloses_and_calls_is_part_of_it() -> None:
    def scaled(factor: float) -> Callable[..., torch.Tensor]:
        return lambda hidden: factor * hidden

    digests = {code_digest(with_function_for_activation(scaled(factor))) for factor in (1.0, 2.0)}
    assert len(digests) == 2
    again = code_digest(with_function_for_activation(scaled(2.0)))
    assert again in digests


@pytest.fixture(params=["register_forward_hook", "register_forward_pre_hook"])
def hooked(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return a model with a hook."""
    model = make_model("llama")
    getattr(model.model.layers[1].mlp, request.param)(doubling)
    return model


def doubling(*arguments: Any) -> Any:  # noqa: ANN401 - of a hook
    """Double what is given: input or output."""
    given = arguments[-1]
    return (2 * given[0],) if isinstance(given, tuple) else 2 * given


def test_a_model_with_a_hook_has_no_tiers_and_is_told_which(hooked: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp \(LlamaMLP\) has a hook .* doubling"):
        engine(hooked, tmp_path)


def test_a_hook_of_all_modules_is_refused_too() -> None:
    handle = nn.modules.module.register_module_forward_hook(doubling)
    try:
        with pytest.raises(UnsupportedModelError, match="every module of torch has a hook"):
            model_digest(make_model("llama"))
    finally:
        handle.remove()


def test_a_hook_that_comes_with_new_weights_ends_the_tiers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = make_model("llama")
    llm = engine(model, folder)
    llm.set_weights_epoch("second", change=lambda: model.model.layers[1].mlp.register_forward_hook(doubling))
    assert "all tiers are left out after new weights: model.layers.1.mlp" in caplog.text
    requests, _ = serve(llm, PROMPTS[:1], PARAMS)
    assert loaded(requests) == [0]
    compare(requests, reference(model, PROMPTS[:1], NUM_NEW))
    assert llm.tier_statistics() == ()
