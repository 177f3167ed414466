"""PendingTokens: what a step has sampled, while the device may still be at it.

The token ids are on the device at once, for the step behind. Their copy on the host is awaited when it is needed.
"""

from collections.abc import Sequence
from typing import final

import torch

from pagedkv.serving.engine.sampling.adjusting import Place
from pagedkv.serving.engine.sampling.choosing import chosen_greatest, greatest_words
from pagedkv.serving.engine.sampling.sampled_tokens import SampledTokens

__all__ = ["PendingTokens"]


@final
class PendingTokens:
    """Tokens of rows.

    Args:
        token_ids: integers ``[rows]``, on the device.
        sampled: all that was sampled; None: it is still to be copied.

    Attributes:
        token_ids: the same.
    """

    def __init__(self, token_ids: torch.Tensor, sampled: SampledTokens | None) -> None:
        self.token_ids = token_ids
        self._sampled = sampled
        self._places: Sequence[Place] = ()
        self._words: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    @classmethod
    def greatest(cls, scores: torch.Tensor, places: Sequence[Place]) -> "PendingTokens":
        """Choose the first of the greatest scores of every row, without waiting for the device."""
        words = greatest_words(scores)
        pending = cls(words[0], None)
        pending._places = places
        pending._words = words.to("cpu", non_blocking=True)  # into pinned memory
        if words.is_cuda:
            pending._copied = torch.cuda.Event()
            pending._copied.record()
        return pending

    def wait(self) -> SampledTokens:
        """Wait for the copy on the host; return what was sampled."""
        if self._sampled is None:
            assert self._words is not None, "tokens that are neither sampled nor on their way"
            if self._copied is not None:
                self._copied.synchronize()
            chosen = chosen_greatest(self._words, self._places)
            self._sampled = SampledTokens(chosen.token_ids, failures=chosen.failures)
        return self._sampled
