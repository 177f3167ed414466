"""Two workloads, from a seed: conversations that grow by turns, and questions behind shared prompts.

This module draws requests and is independent of caches. Conversations profit from the last window of a sequence, since
the next turn continues there. Questions profit from the window before the place where prompts part, where no sequence
ends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array

__all__ = ["WORKLOADS", "Request", "conversations", "questions"]

NUM_REQUESTS: Final = 160
NUM_ANSWER_TOKENS: Final = 60
VOCABULARY: Final = 128_000

NUM_SESSIONS: Final = 24
SKEW: Final = 0.15
NUM_FIRST_TOKENS: Final = 400
NUM_TURN_TOKENS: Final = 250
LONGEST_CONVERSATION: Final = 5_000

NUM_SHARED_PROMPTS: Final = 8
NUM_SHARED_TOKENS: Final = 1_990
NUM_OWN_TOKENS: Final = 300


@dataclass(frozen=True, slots=True)
class Request:
    """What one request computes.

    Args:
        prompt: int32 ``[tokens]``; answer: int32 ``[tokens]``, what is sampled. Its last token is never computed.
    """

    prompt: Int32Array
    answer: Int32Array


def conversations(seed: int) -> Iterator[Request]:
    """Draw turns of 24 sessions, session i with a probability proportional to exp(-0.15 i).

    A turn's prompt is the conversation so far, and 250 new tokens. A session that has grown beyond 5,000 tokens begins
    anew.
    """
    random = np.random.default_rng(seed)
    weights = np.exp(-SKEW * np.arange(NUM_SESSIONS))
    said = [_tokens(random, NUM_FIRST_TOKENS) for _ in range(NUM_SESSIONS)]
    for session in random.choice(NUM_SESSIONS, NUM_REQUESTS, p=weights / weights.sum()).tolist():
        if len(said[session]) > LONGEST_CONVERSATION:
            said[session] = _tokens(random, NUM_FIRST_TOKENS)
        prompt = np.concatenate([said[session], _tokens(random, NUM_TURN_TOKENS)])
        answer = _tokens(random, NUM_ANSWER_TOKENS)
        said[session] = np.concatenate([prompt, answer])
        yield Request(prompt, answer)


def questions(seed: int) -> Iterator[Request]:
    """Draw questions of 300 own tokens, each behind one of 8 shared prompts of 1,990 tokens, all equally likely."""
    random = np.random.default_rng(seed)
    shared = [_tokens(random, NUM_SHARED_TOKENS) for _ in range(NUM_SHARED_PROMPTS)]
    for which in random.integers(NUM_SHARED_PROMPTS, size=NUM_REQUESTS).tolist():
        prompt = np.concatenate([shared[which], _tokens(random, NUM_OWN_TOKENS)])
        yield Request(prompt, _tokens(random, NUM_ANSWER_TOKENS))


def _tokens(random: np.random.Generator, count: int) -> Int32Array:
    return random.integers(VOCABULARY, size=count, dtype=np.int32)


WORKLOADS: Final[dict[str, Callable[[int], Iterator[Request]]]] = {
    "conversations": conversations,
    "questions": questions,
}
"""By the names that tables show."""
