"""Engines with draft models: how they are served, and what the draft models computed."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, cast

import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineRequest, SamplingParams
from tests.engine.serving import CONFIG, poison
from tests.engine.test_speculation import prompt_of

__all__ = ["ROOMY", "accepted_at_most", "counting_tokens", "counts_of", "near", "run", "serve_drafted"]

ROOMY: Final = replace(CONFIG, num_blocks=200, max_batched_tokens=40)


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


def serve_drafted(llm: LLM, wishes: Sequence[SamplingParams]) -> list[EngineRequest]:
    """Serve prompts that arrive one after the other, over blocks of NaN."""
    poison(llm)
    requests: list[EngineRequest] = []
    num_steps = 0
    while len(requests) < len(wishes) or llm.core.has_work:
        if len(requests) < len(wishes) and num_steps % 2 == 0:
            requests += llm.submit([prompt_of(len(requests))], wishes[len(requests)])
        record = llm.step()
        assert record.num_tokens <= llm.core.config.max_batched_tokens
        assert record.failure is None
        llm.core.space.check()
        num_steps += 1
    assert llm.core.space.num_live_blocks() == 0
    return requests


def run(llm: LLM) -> None:
    while llm.core.has_work:
        assert llm.step().failure is None
        llm.core.space.check()


def counts_of(requests: Sequence[EngineRequest]) -> tuple[int, int]:
    """Return how many tokens were drafted, and how many of them were accepted."""
    return sum(each.num_drafted for each in requests), sum(each.num_accepted for each in requests)


def accepted_at_most(request: EngineRequest) -> int:
    """Count the drafts of a request but those behind the token that ended it, which nothing could accept."""
    ended_early = request.output().completions[0].finish_reason == "stop"
    return request.num_accepted if ended_early else request.num_drafted
