"""FailedSteps: the retry of steps that fail, and the size of steps after memory ran out.

A step that fails is aborted, and its requests are scheduled again: one more step, the retry. If that one fails too, the
prompts that it computes end, or, if it computes none, all of its requests. Others go on::

    step 7 fails     aborted: rows return to the tokens that are computed
    step 8           the retry; after a shortage of memory with half as many tokens
    step 8 fails     aborted; requests with prompts in it end "failed", else all of its requests
    step 9           those that are left

Not retried are errors of this library, broken assertions among them, and the loss of the device: these end the engine.
"""

from typing import Final, final

import torch

from pagedkv.device import is_device_failure
from pagedkv.errors import PagedKVError

__all__ = ["FailedSteps", "may_be_retried"]

STEPS_UNTIL_FULL: Final = 64
"""Steps without a failure after which a step may be as large as before memory ran out."""


def may_be_retried(problem: Exception) -> bool:
    """Return whether a step that raised this can be computed again: the model or memory failed, and not this engine."""
    return not isinstance(problem, (AssertionError, PagedKVError)) and not is_device_failure(problem)


@final
class FailedSteps:
    """The failures of one engine's steps.

    Args:
        max_batched_tokens: tokens of a step, if memory does not run out.

    Attributes:
        reason: what the last step that failed raised; None before one did.
    """

    def __init__(self, max_batched_tokens: int) -> None:
        self._most = self._now = max_batched_tokens
        self._num_in_turn = 0
        self._num_good = 0
        self.reason: str | None = None

    @property
    def max_batched_tokens(self) -> int:
        """Tokens of the next step at most."""
        return self._now

    @property
    def is_final(self) -> bool:
        """Whether the last step and its retry have failed, so that requests are to end."""
        return self._num_in_turn > 1

    def note_failure(self, problem: Exception) -> None:
        """Record that a step failed. If memory ran out, later steps are half as large."""
        self._num_in_turn = 1 if self.is_final else self._num_in_turn + 1
        self._num_good = 0
        self.reason = f"{type(problem).__name__}: {problem}"
        if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
            self._now = max(1, self._now // 2)

    def note_success(self) -> None:
        """Record that a step has computed tokens."""
        self._num_in_turn = 0
        if self._now < self._most:
            self._num_good += 1
            if self._num_good >= STEPS_UNTIL_FULL:
                self._now = self._most
