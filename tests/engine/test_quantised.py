"""Weights that were quantised by others run as they are: the engine calls modules, and reads the type of no weight."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, compare, reference, serve

ROOMY = replace(CONFIG, num_blocks=200, self_test=True)


def by_torchao(model: PreTrainedModel) -> PreTrainedModel:
    """Keep weights as int8 tensors of a class of their own (torchao)."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


class Int8Linear(torch.nn.Module):
    """A linear layer in the place of torch's, as quantising libraries have them: int8 rows, and a scale for each."""

    scale: torch.Tensor
    rows: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("rows", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply by the rows as they are, then by their scales."""
        product: torch.Tensor = hidden @ self.rows.to(hidden.dtype).T
        return product * self.scale.squeeze(1)


def by_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Put other modules in the place of linear layers (as bitsandbytes does)."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


WAYS: dict[str, Callable[[Any], PreTrainedModel]] = {"torchao": by_torchao, "modules": by_modules}


@pytest.mark.parametrize("way", WAYS)
def test_quantised_weights_answer_as_they_do_dense(way: str) -> None:
    model = WAYS[way](make_model("llama"))
    references = reference(model, PROMPTS)
    assert [each.token_ids for each in references] != [
        each.token_ids for each in reference(make_model("llama"), PROMPTS)
    ]
    llm = LLM(model, ROOMY)
    assert llm.self_test is not None
    requests, _ = serve(llm)
    compare(requests, references)
