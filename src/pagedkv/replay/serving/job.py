"""One request under way: what it wants, where it stands, and which rows serve it.

A ``Job`` owns no block and decides nothing; the scheduler moves it through its life::

    waiting --admitted--> prefilling --prompt computed--> decoding --last token--> finished
       ^                      |                              |  ^
       |                      |                              v  |
       +----- recompute ------+------------------------------+  +--- swapped out
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from pagedkv.core.blocks import Int32Array
from pagedkv.replay.request import TokenizedRequest

__all__ = ["Job", "JobKey", "sequence_tokens"]

JobKey: TypeAlias = tuple[int, int]
"""``(-priority, number)``: smaller goes first."""

TOKEN_MASK: Final = 2**31 - 1
SEQUENCE_STRIDE: Final = 0x61C88647
"""Odd, so that the tokens of a request's sequences at one position differ."""


@dataclass(slots=True, eq=False)
class Job:
    """One request under way.

    Args:
        number: position of the request in the trace.
        priority: higher goes first.
        arrival_s: when it arrives, on the virtual clock.
        num_prompt_tokens, num_output_tokens: its lengths.
        num_sequences: samples or beams.
        is_beam: whether the sequences are beams.
        load: makes its tokens; called when they are first needed, so that a long queue takes no memory.
        rows: rows of its sequences while it has blocks; one until the prompt is computed.
        known_token_ids: int32, what is to be computed before it can decode.
        output_token_ids: int32, what the first sequence generates.
        num_scheduled: tokens of these that are in the space.
        num_produced: tokens generated so far, of each sequence.
        chunk_start: where the last chunk of known tokens began.
        most_computed: the most tokens of a sequence that were computed when it was preempted.
        admitted_s, first_token_s: when it was first admitted, and when its first token was there.
        final_length: tokens of each sequence when it has its last block.
    """

    number: int
    priority: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_sequences: int
    is_beam: bool
    load: Callable[[], TokenizedRequest]
    rows: list[int] = field(default_factory=list)
    known_token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    output_token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    num_scheduled: int = 0
    num_produced: int = 0
    chunk_start: int = 0
    most_computed: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    final_length: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out the final length: the last token generated is never appended."""
        self.final_length = self.num_prompt_tokens + max(self.num_output_tokens, 1) - 1

    @property
    def key(self) -> JobKey:
        """Its place in every order."""
        return -self.priority, self.number

    @property
    def num_unscheduled(self) -> int:
        """Known tokens that are not in the space yet."""
        return len(self.known_token_ids) - self.num_scheduled

    @property
    def is_finished(self) -> bool:
        """Whether it has produced all there is to produce, its prompt being computed."""
        return self.num_produced >= self.num_output_tokens

    def load_tokens(self) -> None:
        """Have the known tokens at hand: the prompt, and what one sequence has produced before it was preempted."""
        if len(self.known_token_ids):
            return
        request = self.load()
        self.output_token_ids = request.output_token_ids
        produced = request.output_token_ids[: self.num_produced]
        self.known_token_ids = np.concatenate((request.prompt_token_ids, produced))

    def start_over(self, num_computed: int) -> None:
        """Give up the progress, its blocks having been freed: wait again with what is known by now."""
        self.rows = []
        self.most_computed = max(self.most_computed, num_computed)
        if self.num_sequences > 1:
            self.num_produced = 0
        self.known_token_ids = np.zeros(0, np.int32)
        self.num_scheduled = 0


def sequence_tokens(token_ids: Int32Array, num_sequences: int, number: int) -> Int32Array:
    """Make the tokens of samples or beams from those of the first: other ones at each position, and in each request.

    Args:
        token_ids: int32 ``[n]``, none negative.
        num_sequences: how many sequences.
        number: number of the request.

    Returns:
        int32 ``[num_sequences * n]``, sequence by sequence, none negative.
    """
    offsets = np.arange(num_sequences, dtype=np.int64) * (SEQUENCE_STRIDE * (2 * number + 1) & TOKEN_MASK)
    return ((token_ids + offsets[:, np.newaxis]) & TOKEN_MASK).astype(np.int32).ravel()
