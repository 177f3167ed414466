"""Draft models for tests, and what they computed."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from transformers import PreTrainedModel

__all__ = ["counting_tokens", "near"]


def near(model: PreTrainedModel, scale: float = 0.05, seed: int = 7) -> PreTrainedModel:
    """Copy a model and shake its weights a little, so that it often agrees with it."""
    like = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in like.parameters():
            parameter.add_(scale * parameter.std(unbiased=False) * torch.randn(parameter.shape, generator=generator))
    return cast("PreTrainedModel", like.eval())


@contextmanager
def counting_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """List how many tokens each pass of a model takes."""
    counts: list[int] = []

    def note(_: object, __: object, options: dict[str, torch.Tensor]) -> None:
        counts.append(options["input_ids"].numel())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()
