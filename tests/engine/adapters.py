"""LoRA adapters of tiny models, made from seeds by PEFT itself, and requests that choose among them."""

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineRequest, Intent, SamplingParams
from tests.engine.families import make_model
from tests.engine.serving import NUM_NEW, PROMPTS, Reference, reference

__all__ = ["ASKED", "answered", "make_adapter", "make_adapters", "references"]

TARGETS: Final = ["q_proj", "v_proj", "kv_b_proj", "o_proj", "down_proj", "in_proj", "lm_head"]
NAMES: Final = ("red", "blue/v2")
ASKED: Final = [(prompt, name) for prompt, name in product(PROMPTS, (None, *NAMES))]
"""Each prompt of each adapter and of none, one behind the other, so that all of a step are mixed."""


def make_adapter(
    folder: Path,
    model: Any,  # noqa: ANN401 - of PEFT's own bases
    seed: int,
    *,
    saves_head: bool = False,
    **changes: Any,  # noqa: ANN401 - of PEFT's config
) -> str:
    """Write an adapter of a model, strong enough to change answers; the model is spoilt by it."""
    peft = pytest.importorskip("peft")
    config = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False, **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT uses names that transformers is to drop
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_" in name:
                    weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        adapted.save_pretrained(folder, save_embedding_layers=saves_head)
    return str(folder)


def make_adapters(folder: Path, family: str) -> dict[str, str]:
    """Write the adapters of :data:`NAMES`; return their folders by name."""
    return {name: make_adapter(folder / str(seed), make_model(family), seed) for seed, name in enumerate(NAMES)}


def references(
    family: str, folders: dict[str, str], asked: Sequence[tuple[Sequence[int], str | None]] = ASKED
) -> list[Reference]:
    """Answer prompts by ``generate`` of transformers, each with its adapter alone; each answer once for all tests."""
    return [_answer_with(family, None if name is None else folders[name], tuple(prompt)) for prompt, name in asked]


@cache
def _answer_with(family: str, folder: str | None, prompt: tuple[int, ...]) -> Reference:
    return reference(_model_with(family, folder), [prompt])[0]


@cache
def _model_with(family: str, folder: str | None) -> PreTrainedModel:
    model = make_model(family)
    if folder is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cast("Any", model).load_adapter(folder, adapter_name="only_one")
    return model


def answered(
    llm: LLM,
    asked: Sequence[tuple[Sequence[int], str | None]] = ASKED,
    params: SamplingParams | None = None,
) -> list[EngineRequest]:
    """Serve prompts with their adapters, which arrive one after the other; the space proves itself after each step."""
    params = params or SamplingParams(max_tokens=NUM_NEW)
    requests: list[EngineRequest] = []
    num_steps = 0
    while len(requests) < len(asked) or llm.core.has_work:
        if len(requests) < len(asked) and num_steps % 2 == 0:
            prompt, name = asked[len(requests)]
            requests += llm.submit([prompt], params, Intent(adapter=name))
        llm.step()
        llm.core.space.check()
        num_steps += 1
    return requests
