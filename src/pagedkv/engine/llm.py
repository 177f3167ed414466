"""LLM: a model in, answers out.

>>> llm = LLM(model)  # doctest: +SKIP
>>> llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].token_ids  # doctest: +SKIP
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, final

import numpy as np

from pagedkv.arrays import Int32Array
from pagedkv.engine import compat
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.core import EngineCore
from pagedkv.engine.engine_request import EngineRequest, RequestOutput
from pagedkv.engine.grouping import EngineGroups, group_layers
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.probe import probe
from pagedkv.engine.records import StepRecord
from pagedkv.engine.refusals import require_supported
from pagedkv.engine.sampler import Sampler
from pagedkv.engine.self_test import self_test
from pagedkv.errors import RequestError

__all__ = ["LLM", "Prompt", "TokenUpdate", "Tokenizer"]

Prompt: TypeAlias = str | Sequence[int]


class Tokenizer(Protocol):
    """What turns text into tokens and back, as tokenizers of transformers do."""

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text."""


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """New tokens of one answer, while it is under way.

    Args:
        prompt: place of the prompt among those given; index: of the answer among the prompt's.
        token_ids: the new tokens.
        finish_reason: why it ended, with its last tokens; else None.
    """

    prompt: int
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None


@final
class LLM:
    """Serves prompts with one model, in memory made of blocks.

    Args:
        model: any decoder of transformers in evaluation mode, on a CPU; nobody else may use it during a step.
        config: memory, limits, policies.
        tokenizer: for prompts and answers as text; None: token ids alone.
        sampler: what chooses tokens; None: the most likely ones.

    Attributes:
        core: the loop, for whoever drives it step by step.
        groups: what the model's layers were found to keep.
        self_test: how far the model over blocks is from itself, dense; None where it was not asked for.

    Raises:
        UnsupportedModelError: the model would be answered for wrongly: which layer, why, what to do.
        ConfigurationError: memory or limits that cannot work.
    """

    def __init__(
        self,
        model: compat.Model,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        self.groups = find_groups(model, config)
        self.self_test = self_test(model, self.groups) if config.self_test or self.groups.states else None
        found = self.self_test
        self.core = EngineCore(
            model,
            self.groups,
            config,
            replays_steps=found is not None and found.replays_steps,
            continues=found is not None and found.continues,
            sampler=sampler,
        )
        self._tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts, together.

        Args:
            prompts: texts, or lists of token ids.
            params: what all of them ask for, or each; None: 16 tokens, the most likely ones.

        Returns:
            an output for each prompt, in their order.

        Raises:
            RequestError: one of them cannot be served; none is.
            EngineError: a step failed.
        """
        requests = self.submit(prompts, params)
        try:
            while not all(request.is_finished for request in requests):
                self.core.step()
        except BaseException:
            for request in requests:
                self.core.abort(request)
            raise
        return [self._with_text(request.output()) for request in requests]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[TokenUpdate]:
        """Answer prompts, together, and give tokens as they come; who stops listening ends the requests.

        Raises as :meth:`generate`.
        """
        requests = self.submit(prompts, params)
        num_told = [[0] * len(request.samples) for request in requests]
        try:
            while not all(request.is_finished for request in requests):
                self.core.step()
                for place, (request, told) in enumerate(zip(requests, num_told, strict=True)):
                    yield from _updates(place, request, told)
        finally:
            for request in requests:
                self.core.abort(request)

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[EngineRequest]:
        """Let prompts wait, all of them or none; whoever submits drives :attr:`core`. Raises RequestError."""
        if isinstance(prompts, str):
            raise RequestError("prompts is one text: give a list of prompts")
        each = (
            [params or SamplingParams()] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else params
        )
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts need as many SamplingParams, got {len(each)}")
        tokens = [self._token_ids(prompt, place) for place, prompt in enumerate(prompts)]
        requests: list[EngineRequest] = []
        try:
            for place, (prompt, wish) in enumerate(zip(tokens, each, strict=True)):
                requests.append(self._add(place, prompt, wish))
        except BaseException:
            for request in requests:
                self.core.abort(request)
            raise
        return requests

    def step(self) -> StepRecord:
        """Run one step. Raises EngineError."""
        return self.core.step()

    def _add(self, place: int, prompt: Int32Array, params: SamplingParams) -> EngineRequest:
        try:
            return self.core.add(prompt, params)
        except RequestError as problem:
            raise RequestError(f"prompt {place}: {problem}") from problem

    def _token_ids(self, prompt: Prompt, place: int) -> Int32Array:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    f"prompt {place} is text, but the engine has no tokenizer: give it one, or token ids"
                )
            prompt = self._tokenizer.encode(prompt)
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise RequestError(
                f"prompt {place} must be a text or a list of token ids, got {tokens.dtype} {tokens.shape}"
            )
        return tokens.astype(np.int32)

    def _with_text(self, output: RequestOutput) -> RequestOutput:
        if self._tokenizer is None:
            return output
        texts = [self._tokenizer.decode(list(each.token_ids)) for each in output.completions]
        completions = (replace(each, text=text) for each, text in zip(output.completions, texts, strict=True))
        return replace(output, completions=tuple(completions))


def find_groups(model: compat.Model, config: EngineConfig) -> EngineGroups:
    """Find out what a model's layers keep, and put them into groups.

    Raises:
        UnsupportedModelError: paged memory would answer wrongly for it.
    """
    require_supported(model)
    return group_layers(probe(model), config.block_size, config.checkpoint_interval)


def _updates(place: int, request: EngineRequest, told: list[int]) -> Iterator[TokenUpdate]:
    for sample in request.samples:
        new = tuple(sample.token_ids[told[sample.index] :])
        if new:
            told[sample.index] += len(new)
            yield TokenUpdate(place, sample.index, new, sample.finish_reason)
