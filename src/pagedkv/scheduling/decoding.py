"""Decoding: the sequences that decode together, in arrays.

As long as the sequences stay the same, a step takes its tokens from these arrays and only increments a counter: no
Python object is touched for each sequence. When a request joins or leaves, the object is closed, and a new one is made
for the requests that continue.

If steps overlap, sequences may decode while a batch in flight still samples the token that they append. The token is
then :data:`UNKNOWN_TOKEN`. A sequence is at most one such token ahead.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array
from pagedkv.scheduling.request import CommonSteps, Request

__all__ = ["MOST_AHEAD", "UNKNOWN_TOKEN", "Decoding", "may_decode"]

UNKNOWN_TOKEN: Final = -1
"""In place of a token that a batch in flight still samples."""

MOST_AHEAD: Final = 2
"""Most tokens of a sequence that batches in flight sample, one after the other."""

Scalar = TypeVar("Scalar", bound=np.generic)


class Decoding(CommonSteps):
    """Requests with computed prompts and known next tokens, in the order of their keys.

    Args:
        requests: the requests, at least one. Those that still await a token append an unknown one next.
        is_scheduled: whether their next tokens were appended by a batch that is not finished.

    Attributes:
        requests: the requests.
        rows: int32 ``[sequences]``, rows of all their sequences.
        next_token_ids: int32 ``[sequences]``, the token that each appends next; while a batch is in flight, the token
            that it appended.
        num_before: for each request, tokens generated before these steps, awaited ones included, and drafts accepted
            since.
        runs_ahead: whether all requests may decode unknown tokens.
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
        """Number of steps until one of the requests reaches its ``max_new_tokens``."""
        return self._most_steps - self.num_steps

    @property
    def may_continue(self) -> bool:
        """Whether all sequences may decode once more, with unknown tokens if a batch in flight samples these."""
        if not self.num_ahead:
            return True
        return self.runs_ahead and self.num_ahead < MOST_AHEAD and self.num_ahead < self.num_steps_left

    @property
    def appended_token_ids(self) -> Int32Array:
        """The tokens that the latest batch in flight appended: int32 ``[sequences]``."""
        return self.next_token_ids if self.num_ahead == 1 else np.full(len(self.rows), UNKNOWN_TOKEN, np.int32)

    def take(self, token_ids: Int32Array) -> None:
        """Record a token of each sequence, sampled by the oldest batch in flight."""
        self.num_steps += 1
        self.next_token_ids = token_ids
        self.num_ahead -= 1

    def accept(self, num_accepted: Int32Array) -> None:
        """Record the numbers of accepted drafts: int32 ``[sequences]``, 0 for requests of several sequences."""
        for place, (request, part) in enumerate(zip(self.requests, self.parts(num_accepted), strict=True)):
            if part[0]:
                request.accept(int(part[0]))
                self.num_before[place] += int(part[0])
        self._most_steps = self._count_steps()

    def parts(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Split an array with one value for each sequence into one array for each request; more values are ignored."""
        return [values[start:end] for start, end in pairwise((0, *self._ends))]

    def _count_steps(self) -> int:
        return min(request.max_new_tokens - num for request, num in zip(self.requests, self.num_before, strict=True))

    def close(self) -> None:
        """Write the progress back to the requests, which no longer decode together.

        A request whose next tokens are unknown keeps its last known ones.
        """
        any_unknown = bool((self.next_token_ids == UNKNOWN_TOKEN).any())
        for request, token_ids in zip(self.requests, self.parts(self.next_token_ids), strict=True):
            is_unknown = any_unknown and bool((token_ids == UNKNOWN_TOKEN).any())
            request.leave_decoding(request.next_token_ids if is_unknown else token_ids)


def runs_ahead(request: Request) -> bool:
    """Whether a request may decode tokens that are not known yet: it has all its rows, and needs no token's value."""
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
