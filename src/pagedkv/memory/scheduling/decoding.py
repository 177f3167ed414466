"""The sequences that decode together, laid out in arrays.

As long as they stay the same, a step takes its tokens from here and only a counter moves: no Python object is touched
for a sequence. When a request joins or leaves, this object ends, and a new one is made of those that continue.

If steps overlap, sequences may decode while a batch in flight still samples the token that they append. Its place then
holds :data:`UNKNOWN_TOKEN`, and a sequence is at most one such token ahead.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.scheduling.request import CommonSteps, Request

__all__ = ["MOST_AHEAD", "UNKNOWN_TOKEN", "Decoding", "may_decode"]

UNKNOWN_TOKEN: Final = -1
"""Stands for a token that a batch in flight still samples."""

MOST_AHEAD: Final = 2
"""Tokens of a sequence that batches in flight sample, at most: the second is sampled behind the first."""

Scalar = TypeVar("Scalar", bound=np.generic)


class Decoding(CommonSteps):
    """Requests with computed prompts and known next tokens, in the order of their keys.

    Args:
        requests: the requests, at least one. Those that still await a token append an unknown one next.
        is_scheduled: whether their next tokens were appended by a batch that is not finished.

    Attributes:
        requests: the requests.
        rows: int32 ``[sequences]``, rows of all their sequences.
        next_token_ids: int32 ``[sequences]``, what each appends next; while a batch is in flight, what it appended.
        num_before: tokens that each request had generated when these steps began, the awaited ones included, and right
            drafts since.
        runs_ahead: whether all of them may decode tokens that are not known.
    """

    def __init__(self, requests: Sequence[Request], *, is_scheduled: bool = False) -> None:
        super().__init__(num_ahead=int(is_scheduled))
        self.requests = tuple(requests)
        self.rows = np.array([row for request in requests for row in request.rows], np.int32)
        self.next_token_ids: Int32Array = np.concatenate([_next_tokens(request) for request in requests])
        self.num_before = [request.num_generated + len(request.awaited) for request in requests]
        self.runs_ahead = all(map(runs_ahead, requests))
        self._ends = np.cumsum([len(request.rows) for request in requests]).tolist()
        self._most_steps = self._count_steps()
        for request in requests:
            request.decoding = self

    @property
    def num_steps_left(self) -> int:
        """Steps until the first of the requests has its most tokens."""
        return self._most_steps - self.num_steps

    @property
    def may_continue(self) -> bool:
        """Whether all of them may decode once more, with unknown tokens if a batch in flight samples these."""
        if not self.num_ahead:
            return True
        return self.runs_ahead and self.num_ahead < MOST_AHEAD and self.num_ahead < self.num_steps_left

    @property
    def appended_token_ids(self) -> Int32Array:
        """What the latest batch in flight appended: int32 ``[sequences]``."""
        return self.next_token_ids if self.num_ahead == 1 else np.full(len(self.rows), UNKNOWN_TOKEN, np.int32)

    def take(self, token_ids: Int32Array) -> None:
        """Record a token of each sequence, sampled by the oldest batch in flight."""
        self.num_steps += 1
        self.next_token_ids = token_ids
        self.num_ahead -= 1

    def accept(self, num_accepted: Int32Array) -> None:
        """Record how many drafts of each sequence were right: int32 ``[sequences]``, 0 if a request has several."""
        for place, (request, part) in enumerate(zip(self.requests, self.parts(num_accepted), strict=True)):
            if part[0]:
                request.accept(int(part[0]))
                self.num_before[place] += int(part[0])
        self._most_steps = self._count_steps()

    def parts(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Split by request an array that begins with one value for each sequence."""
        return [values[start:end] for start, end in pairwise((0, *self._ends))]

    def _count_steps(self) -> int:
        return min(request.max_new_tokens - num for request, num in zip(self.requests, self.num_before, strict=True))

    def close(self) -> None:
        """Give the requests their own progress back; they no longer decode together.

        Where the next tokens were not known when these steps began, requests keep the last ones that they know.
        """
        any_unknown = bool((self.next_token_ids == UNKNOWN_TOKEN).any())
        for request, token_ids in zip(self.requests, self.parts(self.next_token_ids), strict=True):
            is_unknown = any_unknown and bool((token_ids == UNKNOWN_TOKEN).any())
            request.leave_decoding(request.next_token_ids if is_unknown else token_ids)


def runs_ahead(request: Request) -> bool:
    """Whether a request may decode tokens that are not known yet: all its rows are there, and no value is needed."""
    return (
        request.runs_ahead
        and request.propose is None
        and request.parents is None
        and len(request.rows) == request.num_sequences
    )


def may_decode(request: Request) -> bool:
    """Whether a request can decode now, with an unknown token if a batch in flight samples its next one."""
    if request.num_unscheduled:
        return False
    num_ahead = request.num_ahead
    if not num_ahead:
        return True
    return num_ahead < MOST_AHEAD and runs_ahead(request) and request.num_generated + num_ahead < request.max_new_tokens


def _next_tokens(request: Request) -> Int32Array:
    if request.awaited:
        return np.full(len(request.rows), UNKNOWN_TOKEN, np.int32)
    return request.next_token_ids
