"""The sequences that decode together, laid out in arrays.

As long as they stay the same, a step takes its tokens from here and only a counter moves: no Python object is touched
for a sequence. When a request joins or leaves, this object ends, and a new one is made of those that continue.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.scheduling.request import CommonSteps, Request

__all__ = ["Decoding"]

Scalar = TypeVar("Scalar", bound=np.generic)


class Decoding(CommonSteps):
    """Requests with computed prompts and known next tokens, in the order of their keys.

    Args:
        requests: the requests, at least one.
        is_scheduled: whether their next tokens were appended by a batch that is not finished.

    Attributes:
        requests: the requests.
        rows: int32 ``[sequences]``, rows of all their sequences.
        next_token_ids: int32 ``[sequences]``, what each appends next; while a batch is in flight, what it appended.
        num_before: tokens that each request had generated when these steps began, and right drafts since.
    """

    def __init__(self, requests: Sequence[Request], *, is_scheduled: bool = False) -> None:
        super().__init__(is_scheduled=is_scheduled)
        self.requests = tuple(requests)
        self.rows = np.array([row for request in requests for row in request.rows], np.int32)
        self.next_token_ids: Int32Array = np.concatenate([request.next_token_ids for request in requests])
        self.num_before = [request.num_generated for request in requests]
        self._ends = np.cumsum([len(request.rows) for request in requests]).tolist()
        self._most_steps = self._count_steps()
        for request in requests:
            request.decoding, request.awaited = self, None

    @property
    def num_steps_left(self) -> int:
        """Steps until the first of the requests has its most tokens."""
        return self._most_steps - self.num_steps

    def take(self, token_ids: Int32Array) -> None:
        """Record a token of each sequence, sampled by the batch in flight."""
        self.num_steps += 1
        self.next_token_ids = token_ids
        self.is_scheduled = False

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
        """Give the requests their own progress back; they no longer decode together."""
        for request, token_ids in zip(self.requests, self.parts(self.next_token_ids), strict=True):
            request.leave_decoding(token_ids)
