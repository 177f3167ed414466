"""Drafts without a draft model: from a request's own tokens, and from a prediction of its answer.

:class:`PromptLookup` drafts the next tokens from an earlier occurrence of the last ones. Text that repeats (edited
code, a quoted document, a table) also repeats what followed it (A. Saxena, "Prompt Lookup Decoding", 2023)::

    prompt and answer    ... red kite : locker 7 . tiny drum : attic 31 .   Where ? red kite :
    last 3 tokens            `--------'                                             `--------'
    guessed                           locker 7 . tiny

Unlike there, the latest occurrence is used and not the first, since an answer repeats itself more than its prompt. A
draft that reaches the end of the tokens continues with its own tokens, as a periodic text.

:class:`PredictedText` drafts the next tokens from a request's prediction of its answer. A place in the prediction
advances with the answer while both have the same tokens. After a different token there are no drafts until the answer's
last three tokens occur in the prediction again::

    prediction   the red kite is in locker 7 . anything else ?
    answer       the red kite is in shelf 9 . anything else
    guessed                                                 ?
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import ConfigurationError

NO_GUESS: Final = np.zeros(0, np.int32)
MOST_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Settings of drafts by lookup.

    Args:
        num_tokens: most drafts of a sequence in a step, 1 to 64.
        max_ngram: last tokens that are searched for, all of them first, then fewer; min_ngram: fewest of them.

    Raises:
        ConfigurationError: a number is out of range.
    """

    num_tokens: int = 4
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        as_count(self.num_tokens, "num_tokens of a lookup", least=1, most=MOST_TOKENS)
        as_count(self.min_ngram, "min_ngram", least=1)
        as_count(self.max_ngram, "max_ngram", least=1)
        if self.max_ngram < self.min_ngram:
            raise ConfigurationError(f"max_ngram is {self.max_ngram}, which is less than min_ngram = {self.min_ngram}")

    def propose(self, token_ids: Int32Array, most: int) -> Int32Array:
        """Return drafts of the next tokens.

        Args:
            token_ids: int32 ``[n]``, all tokens of a sequence; most: most drafts.

        Returns:
            int32, ``min(most, num_tokens)`` tokens; none if the last ``min_ngram`` tokens do not occur before.

        Cost: a pass over the tokens, and O(occurrences of the last one).
        """
        place = self._latest(token_ids)
        if place is None:
            return NO_GUESS
        num_behind = len(token_ids) - place
        return token_ids[place + np.arange(min(most, self.num_tokens)) % num_behind]

    def _latest(self, token_ids: Int32Array) -> int | None:
        """Find where the tokens go on behind the latest of the longest matches."""
        last = len(token_ids) - 1
        ends = np.flatnonzero(token_ids[:last] == token_ids[last]) if last > 0 else NO_GUESS
        for length in range(2, self.max_ngram + 1):
            further = ends[ends >= length - 1]
            further = further[token_ids[further - (length - 1)] == token_ids[last - (length - 1)]]
            if not len(further):
                return int(ends[-1]) + 1 if len(ends) and length > self.min_ngram else None
            ends = further
        return int(ends[-1]) + 1 if len(ends) else None


@final
class LookupText:
    """Prompt and answer in one array, which grows with the answer.

    Args:
        prompt_token_ids: int32 ``[n]``.
    """

    def __init__(self, prompt_token_ids: Int32Array) -> None:
        self._num_prompt = self._num = len(prompt_token_ids)
        self._token_ids = prompt_token_ids  # copied when the answer begins: most of a queue is waiting

    def grown(self, answer: Sequence[int]) -> Int32Array:
        """Return the prompt and this answer, which extends that of the last call: a view, int32. O(new tokens)."""
        num = self._num_prompt + len(answer)
        if num > len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros(num, np.int32)])
        new = answer[self._num - self._num_prompt :]
        self._token_ids[self._num : num] = new
        self._num = num
        return self._token_ids[:num]


NUM_MATCHED: Final = 3
"""Last tokens of an answer that must stand in the prediction where the place was lost."""


@final
class PredictedText:
    """A prediction, and the place in it that the answer has reached.

    Args:
        token_ids: the prediction.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = np.array(token_ids, np.int32)
        self._num_seen = 0
        self._place = 0
        self._is_lost = False

    def propose(self, answer: Sequence[int], most: int) -> Int32Array:
        """Return drafts of the next tokens, and move the place.

        Args:
            answer: tokens of the answer: those of the last call with more tokens, or fewer if the answer started again.
            most: most drafts.

        Returns:
            int32, at most ``most`` tokens; none if the place is lost, or at the end of the prediction.

        Cost: O(new tokens); a pass over the prediction if the place is lost.
        """
        if len(answer) < self._num_seen:
            self._num_seen, self._place, self._is_lost = 0, 0, False
        self._follow(answer[self._num_seen :])
        self._num_seen = len(answer)
        if self._is_lost:
            self._find(answer[-NUM_MATCHED:])
        return self._token_ids[self._place : self._place + (0 if self._is_lost else most)]

    def _follow(self, new: Sequence[int]) -> None:
        if self._is_lost:
            return
        expected = self._token_ids[self._place : self._place + len(new)]
        differing = np.flatnonzero(expected != np.asarray(new[: len(expected)], np.int32))
        self._is_lost = len(expected) < len(new) or len(differing) > 0
        self._place += int(differing[0]) if len(differing) else len(expected)

    def _find(self, last: Sequence[int]) -> None:
        """Find the first place after the last one that follows these tokens; if there is none, the first of all."""
        if len(last) < NUM_MATCHED or len(self._token_ids) < NUM_MATCHED:
            return
        windows = np.lib.stride_tricks.sliding_window_view(self._token_ids, NUM_MATCHED)
        ends = np.flatnonzero((windows == np.asarray(last, np.int32)).all(axis=1)) + NUM_MATCHED
        if len(ends):
            behind = ends[ends > self._place]
            self._place = int(behind[0] if len(behind) else ends[0])
            self._is_lost = False
