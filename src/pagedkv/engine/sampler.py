"""The seam between the model and what chooses tokens: logits of a step's rows in, token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch

from pagedkv.arrays import Int32Array
from pagedkv.engine.engine_request import EngineRequest, Sample
from pagedkv.engine.params import SamplingParams
from pagedkv.errors import RequestError

__all__ = ["GreedySampler", "SampleRow", "Sampler"]


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """Whose token a row of logits is for.

    Args:
        request: the request: its prompt and what it asks for.
        sample: which of its answers, with the tokens so far.
    """

    request: EngineRequest
    sample: Sample


class Sampler(Protocol):
    """What chooses tokens."""

    def require_supported(self, params: SamplingParams) -> None:
        """Refuse what it cannot do, before a request is let in. Raises RequestError."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Int32Array:
        """Choose the next token of each row.

        Args:
            logits: float32 ``[rows, vocabulary]``, which may be changed.
            rows: what each row is for. The same object as in the step before while the same samples go on, in the same
                order: what is prepared for it may be kept.

        Returns:
            int32 ``[rows]``.
        """


@final
class GreedySampler:
    """The most likely token, the first of several."""

    def require_supported(self, params: SamplingParams) -> None:
        """Refuse temperatures. Raises RequestError."""
        if params.temperature:
            raise RequestError(f"temperature is {params.temperature}, but this engine's sampler is greedy: use 0")

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Int32Array:
        """Choose the largest logit of each row."""
        assert len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)} samples"
        tokens: Int32Array = logits.argmax(dim=1).cpu().numpy().astype(np.int32)
        return tokens
