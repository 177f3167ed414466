"""A trace as an engine serves it: requests that its model can be asked, and a sampler that answers as the trace does.

The model computes every token, and what it would have said is put aside. So the engine's work is the trace's, step by
step, whatever the weights are. Knows nothing of clocks: when a request comes is for others to say.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import numpy as np
import torch

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.planner.simulation.scripted_sampler import sequence_tokens
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.serving.engine import EngineRequest, SamplingParams
from pagedkv.serving.engine.core import EngineCore
from pagedkv.serving.engine.sampling import Place, SampledTokens, WaitingRow

__all__ = ["Script", "let_in", "within_vocabulary"]


@final
class Script:
    """Answers as the trace does, whatever the model says. A sampler of the engine.

    Args:
        vocabulary: tokens that the model knows.

    Attributes:
        answers: the tokens of each request's samples, int32 ``[samples, tokens]``, by the seed that it came with.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.answers: dict[int, Int32Array] = {}

    def write(self, number: int, request: TokenizedRequest) -> None:
        """Lay out what the samples of a request say, as the simulation does, in tokens that the model knows."""
        tokens = request.output_token_ids
        if request.num_samples > 1:
            tokens = sequence_tokens(tokens, request.num_samples, number)
        self.answers[number] = tokens.reshape(request.num_samples, -1) % np.int32(self._vocabulary)

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Give each row its next token."""
        tokens = [
            self.answers[sequence.params.seed or 0][sequence.sample, len(sequence.generated_ids)]
            for sequence in (place.sequence for place in places)
        ]
        return SampledTokens(torch.from_numpy(np.array(tokens, np.int32)).to(logits.device))

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Answer nobody: no row waits for a script."""
        assert not waiting, "a row waits for a script"
        return SampledTokens(torch.zeros(0, dtype=torch.int32))


def within_vocabulary(request: TokenizedRequest, vocabulary: int, num_samples: int | None = None) -> TokenizedRequest:
    """Give a request tokens that the model knows, and at least one to generate; nobody goes before others."""
    outputs = request.output_token_ids if request.output_length else np.zeros(1, np.int32)
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids % np.int32(vocabulary),
        output_token_ids=outputs % np.int32(vocabulary),
        num_samples=num_samples or request.num_samples,
        priority=0,
    )


def let_in(core: EngineCore, script: Script, request: TokenizedRequest, number: int) -> EngineRequest:
    """Let a request wait, and the script know its answers by its number. Raises RequestError where it never fits."""
    params = SamplingParams(
        max_tokens=request.output_length, n=request.num_samples, temperature=1.0, ignore_eos=True, seed=number
    )
    admitted = core.add(request.prompt_token_ids, params)
    script.write(number, request)
    return admitted
