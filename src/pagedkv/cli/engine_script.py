"""A trace for an engine: requests that fit its model, and a sampler that returns the trace's answers.

The model computes every token, but its own choice is dropped. So the engine's work is that of the trace, step by step,
for any weights. The caller decides when a request arrives.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import numpy as np
import torch

from pagedkv.contract.arrays import Int32Array
from pagedkv.engine import EngineRequest, SamplingParams
from pagedkv.engine.core import EngineCore
from pagedkv.engine.sampling import Place, SampledTokens, WaitingRow
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation.scripted_sampler import sequence_tokens

__all__ = ["Script", "submit_scripted", "within_vocabulary"]


@final
class Script:
    """A sampler of the engine that returns the trace's answers for any logits.

    Args:
        vocabulary: size of the model's vocabulary.

    Attributes:
        answers: tokens of each request's samples, int32 ``[samples, tokens]``, by the seed of the request.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.answers: dict[int, Int32Array] = {}

    def write(self, number: int, request: TokenizedRequest) -> None:
        """Store the tokens of a request's samples, equal to the simulation's, within the model's vocabulary."""
        tokens = request.output_token_ids
        if request.num_samples > 1:
            tokens = sequence_tokens(tokens, request.num_samples, number)
        self.answers[number] = tokens.reshape(request.num_samples, -1) % np.int32(self._vocabulary)

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Return the next token of each row."""
        tokens = [
            self.answers[sequence.params.seed or 0][sequence.sample, len(sequence.generated_ids)]
            for sequence in (place.sequence for place in places)
        ]
        return SampledTokens(torch.from_numpy(np.array(tokens, np.int32)).to(logits.device))

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Resume no row, since no row waits for a script."""
        assert not waiting, "a row waits for a script"
        return SampledTokens(torch.zeros(0, dtype=torch.int32))


def within_vocabulary(request: TokenizedRequest, vocabulary: int, num_samples: int | None = None) -> TokenizedRequest:
    """Return a request with tokens of the vocabulary, at least one to generate, and the default priority."""
    outputs = request.output_token_ids if request.output_length else np.zeros(1, np.int32)
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids % np.int32(vocabulary),
        output_token_ids=outputs % np.int32(vocabulary),
        num_samples=num_samples or request.num_samples,
        priority=0,
    )


def submit_scripted(core: EngineCore, script: Script, request: TokenizedRequest, number: int) -> EngineRequest:
    """Queue a request, and store its answers in the script by its number. Raises RequestError if it never fits."""
    params = SamplingParams(
        max_tokens=request.output_length, n=request.num_samples, temperature=1.0, ignore_eos=True, seed=number
    )
    admitted = core.add(request.prompt_token_ids, params)
    script.write(number, request)
    return admitted
