"""SampledTokens: what a step sampled; WaitingRow: a row that has no token yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pagedkv.engine.sampling.adjusting import Place
from pagedkv.engine.sampling.logprobs import TokenLogprobs

__all__ = ["SampledTokens", "WaitingRow"]


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row that its foreign processors have not answered yet.

    Args:
        row: its place in the batch that it came with; place: whose it is.
        scores: float32 ``[1, vocabulary]``, with bias, penalties and bans: a copy of its own.
        logits: float32 ``[1, vocabulary]`` as the model gave them, where log-probabilities are wanted.
    """

    row: int
    place: Place
    scores: torch.Tensor
    logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step.

    Args:
        token_ids: int32 ``[rows]``, on the logits' device, or on the host where the device chose them alone;
            NO_TOKEN where a row waits or failed.
        waiting: rows whose foreign processors were not ready.
        failures: errors of failed rows, by row: a SamplingError, or that of a foreign processor.
        logprobs: of rows with ``logprobs`` and a token, by row.
    """

    token_ids: torch.Tensor
    waiting: tuple[WaitingRow, ...] = ()
    failures: Mapping[int, Exception] = field(default_factory=dict)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
