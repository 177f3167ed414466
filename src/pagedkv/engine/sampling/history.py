"""The different tokens of a sequence with their counts, for penalties; updated as tokens are appended and removed.

A penalty concerns the different tokens of a row, which are few beside a vocabulary. So each sequence keeps a list of
them, with counts, that costs O(1) a token, belongs to no row of a batch, and is copied by a fork; a dense count of the
vocabulary for each of 256 rows would be 128 MB, and a pass over it each step.

Entries stand in the order in which tokens first came, so taking back the last tokens takes entries from the end.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array

__all__ = ["TokenCounts", "TokenHistory"]

FIRST_ROOM: Final = 64


class TokenCounts(NamedTuple):
    """Different tokens, and how often the answer has them.

    Args:
        token_ids: int64 ``[n]``, each once.
        counts: float32 ``[n]``, 0 for tokens that only the prompt has.
    """

    token_ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.float32]


@final
class TokenHistory:
    """Counts of the tokens of one answer, and which tokens its prompt has.

    Args:
        prompt_ids: int32; empty where only the answer counts. Cost: O(n log n).
    """

    def __init__(self, prompt_ids: Int32Array) -> None:
        different = np.unique(prompt_ids)
        self._num_of_prompt = self._num = len(different)
        self._token_ids = np.zeros(self._num + FIRST_ROOM, np.int64)
        self._token_ids[: self._num] = different
        self._counts = np.zeros(len(self._token_ids), np.float32)
        self._places = {int(token): place for place, token in enumerate(different)}

    def __len__(self) -> int:
        """Count the different tokens."""
        return self._num

    @property
    def counts(self) -> TokenCounts:
        """The entries as they are now: views that the next change overwrites."""
        return TokenCounts(self._token_ids[: self._num], self._counts[: self._num])

    def counts_with(self, token_ids: Iterable[int]) -> TokenCounts:
        """Return the entries with more tokens of the answer; changes nothing."""
        tokens = list(token_ids)
        self.append(tokens)
        counts = TokenCounts(self.counts.token_ids.copy(), self.counts.counts.copy())
        self.remove(tokens)
        return counts

    def append(self, token_ids: Iterable[int]) -> None:
        """Count tokens that the answer grows by. Cost: O(1) each."""
        for token in token_ids:
            place = self._places.get(token)
            if place is None:
                place = self._enter(token)
            self._counts[place] += 1

    def remove(self, token_ids: Iterable[int]) -> None:
        """Take back the last tokens of the answer, given in its order. Cost: O(1) each."""
        for token in reversed(list(token_ids)):
            place = self._places[token]
            self._counts[place] -= 1
            if self._counts[place] == 0 and place >= self._num_of_prompt:
                assert place == self._num - 1, "tokens are taken back in another order than they came"
                del self._places[token]
                self._num -= 1

    def fork(self) -> "TokenHistory":
        """Copy it. Cost: O(different tokens)."""
        copy = object.__new__(TokenHistory)
        copy._num_of_prompt, copy._num = self._num_of_prompt, self._num
        copy._token_ids, copy._counts = self._token_ids.copy(), self._counts.copy()
        copy._places = self._places.copy()
        return copy

    def check(self) -> None:
        """Prove that list and places agree."""
        ids = self._token_ids[: self._num].tolist()
        assert self._places == {token: place for place, token in enumerate(ids)}
        assert (self._counts[self._num_of_prompt : self._num] > 0).all()

    def _enter(self, token: int) -> int:
        if self._num == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        place = self._num
        self._token_ids[place], self._counts[place] = token, 0
        self._places[token] = place
        self._num += 1
        return place
