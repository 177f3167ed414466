"""PendingTokens: the sampled tokens of a step, which the device may still be computing.

The next step reads the token ids on the device. The host waits for its copy only when it needs it.
"""

from collections.abc import Sequence
from typing import final

import torch

from pagedkv.engine.sampling.adjusting import Place
from pagedkv.engine.sampling.choosing import chosen_of_words
from pagedkv.engine.sampling.logprobs import LogprobColumns
from pagedkv.engine.sampling.sampled_tokens import SampledTokens
from pagedkv.engine.sampling.sending import fetched

__all__ = ["PendingTokens"]


@final
class PendingTokens:
    """Tokens of rows.

    Args:
        token_ids: integers ``[rows]``, on the device.
        sampled: the tokens on the host, with failures and log-probabilities; None: their copy is under way.

    Attributes:
        token_ids: the same.
    """

    def __init__(self, token_ids: torch.Tensor, sampled: SampledTokens | None) -> None:
        self.token_ids = token_ids
        self._sampled = sampled
        self._places: Sequence[Place] = ()
        self._words: torch.Tensor | None = None
        self._logprobs: LogprobColumns | None = None
        self._copied: torch.cuda.Event | None = None

    @classmethod
    def on_their_way(
        cls, words: torch.Tensor, places: Sequence[Place], logprobs: LogprobColumns | None = None
    ) -> "PendingTokens":
        """Begin to copy tokens to the host, which does not wait for the device to sample them.

        Args:
            words: int32 ``[2, rows]``: token ids, and the bits of each row's greatest score.
            places: the sequence of each row.
            logprobs: log-probabilities of some rows' tokens; None: no row has any.
        """
        pending = cls(words[0], None)
        pending._places = places
        pending._words = fetched(words)
        if logprobs is not None:
            rows, counts, *columns = logprobs
            pending._logprobs = LogprobColumns(rows, counts, *map(fetched, columns))
        if words.is_cuda:
            pending._copied = torch.cuda.Event()
            pending._copied.record()
        return pending

    def wait(self) -> SampledTokens:
        """Wait until the copy is complete, and return the tokens on the host."""
        if self._sampled is None:
            assert self._words is not None, "tokens that are neither sampled nor being copied"
            if self._copied is not None:
                self._copied.synchronize()
            chosen = chosen_of_words(self._words, self._places)
            logprobs = {}
            if self._logprobs is not None:
                by_row = self._logprobs.by_row(chosen.token_ids[list(self._logprobs.rows)].tolist())
                logprobs = {row: each for row, each in by_row.items() if row not in chosen.failures}
            self._sampled = SampledTokens(chosen.token_ids, failures=chosen.failures, logprobs=logprobs)
        return self._sampled
