"""Guesses by hand: a known answer, some tokens of it wrong, in place of what a lookup finds."""

from collections.abc import Sequence

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.engine import EngineRequest

__all__ = ["guess"]

VOCABULARY = 199


def guess(request: EngineRequest, answer: Sequence[int], wrong_every: int = 0) -> None:
    """Guess a request's tokens from its answer; every n-th token of it is wrong, none where n is 0."""
    guesses = [
        (token + 1) % VOCABULARY if wrong_every and place % wrong_every == wrong_every - 1 else token
        for place, token in enumerate(answer)
    ]

    def propose(most: int) -> Int32Array:
        done = len(request.live[0].token_ids)
        return np.array(guesses[done : done + most], np.int32)

    assert request.scheduled.propose is not None, "no guesses are allowed for this request"
    request.scheduled.propose = propose
