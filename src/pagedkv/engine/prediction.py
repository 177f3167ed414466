"""PredictedText: drafts of the next tokens from a request's prediction of its answer.

A place in the prediction advances with the answer while both have the same tokens. After a different token there are no
drafts until the answer's last three tokens occur in the prediction again::

    prediction   the red kite is in locker 7 . anything else ?
    answer       the red kite is in shelf 9 . anything else
    guessed                                                 ?
"""

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from pagedkv.contract.arrays import Int32Array

__all__ = ["PredictedText"]

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
