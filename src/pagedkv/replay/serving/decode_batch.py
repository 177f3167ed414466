"""The sequences that decode together, laid out in arrays for many steps ahead.

As long as nobody joins or leaves, a step takes its tokens from here and only a counter moves: no Python object is
touched for a sequence. Whoever needs to know how far a job has come, or changes who decodes, closes the batch first.
"""

from typing import Final

import numpy as np

from pagedkv.core.blocks import Int32Array
from pagedkv.replay.serving.job import Job, sequence_tokens

__all__ = ["DecodeBatch"]

MOST_STEPS_AHEAD: Final = 64


class DecodeBatch:
    """Jobs whose prompts are computed, in the order of their keys.

    Args:
        jobs: the jobs, at least one, none of them finished. The batch ends where the first of them finishes.

    Attributes:
        jobs: the jobs.
        rows: int32 ``[sequences]``, rows of all their sequences.
        num_steps: steps taken.
    """

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.rows = np.array([row for job in jobs for row in job.rows], np.int32)
        self.num_steps = 0
        self._num_ahead = min(MOST_STEPS_AHEAD, *(job.num_output_tokens - job.num_produced for job in jobs))
        by_sequence = np.concatenate([self._ahead(job) for job in jobs]).reshape(len(self.rows), self._num_ahead)
        self._tokens = np.ascontiguousarray(by_sequence.T)

    def _ahead(self, job: Job) -> Int32Array:
        """Tokens of one job: int32 ``[sequences * steps]``, sequence by sequence."""
        first = job.num_produced - 1
        token_ids = job.output_token_ids[first : first + self._num_ahead]
        return token_ids if job.num_sequences == 1 else sequence_tokens(token_ids, job.num_sequences, job.number)

    @property
    def next_tokens(self) -> Int32Array:
        """Token that each sequence appends next: int32 ``[sequences]``."""
        tokens: Int32Array = self._tokens[self.num_steps]
        return tokens

    @property
    def is_used_up(self) -> bool:
        """Whether a job may be finished, or tokens must be laid out anew."""
        return self.num_steps == self._num_ahead

    def close(self) -> None:
        """Tell the jobs how far they have come; the batch must not be used any more."""
        for job in self.jobs:
            job.num_produced += self.num_steps
