"""Compares answers with the facts of the documents, and with the answers of dense generation.

Dense generation computes 64 padded prompts at a time, in contiguous caches; it uses no blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

from pagedkv.engine import compat
from pagedkv.engine.demo.facts import ANSWER_LENGTH
from pagedkv.engine.demo.questions import Question
from pagedkv.engine.demo.serving import Answer, Served

__all__ = ["LEAST_RIGHT", "Judged", "answer_densely", "judge"]

LEAST_RIGHT: Final = 0.98
"""Least share of right answers that passes."""
BATCH_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class Judged:
    """Counts of right answers, and the speed of dense generation.

    Args:
        num_answers: answers in all.
        num_right: answers that equal the fact in the document.
        num_same: answers that equal those of dense generation, token for token.
        seconds: time of dense generation, which answers each question once.
        num_tokens: tokens of its prompts and answers, without padding.
    """

    num_answers: int
    num_right: int
    num_same: int
    seconds: float
    num_tokens: int

    @property
    def accuracy(self) -> float:
        """Share of answers that are right."""
        return self.num_right / self.num_answers

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and answers a second, of dense generation."""
        return self.num_tokens / self.seconds

    @property
    def failings(self) -> list[str]:
        """A sentence for each condition that is not met; empty if all are."""
        failings = []
        if self.accuracy < LEAST_RIGHT:
            failings.append(f"{self.accuracy:.2%} of the answers are right, where {LEAST_RIGHT:.0%} must be")
        if self.num_same < self.num_answers:
            num_other = self.num_answers - self.num_same
            failings.append(f"{num_other:,} of {self.num_answers:,} answers are not those of dense generation")
        return failings

    def as_dict(self) -> dict[str, object]:
        """Return all numbers for JSON."""
        return {
            "num_answers": self.num_answers,
            "num_right": self.num_right,
            "accuracy": self.accuracy,
            "num_same_as_dense": self.num_same,
            "dense_seconds": self.seconds,
            "dense_tokens_per_second": self.tokens_per_second,
        }


def judge(model: compat.Model, questions: Sequence[Question], served: Served) -> Judged:
    """Compare all answers with the documents, and with dense generation, which is timed."""
    begin = perf_counter()
    dense = answer_densely(model, questions)
    seconds = perf_counter() - begin
    expected = zip(served.answers, questions, dense, strict=True)
    compared = [(answer, question, same) for answers, question, same in expected for answer in answers]
    return Judged(
        num_answers=len(compared),
        num_right=sum(answer == tuple(question.answer.tolist()) for answer, question, _ in compared),
        num_same=sum(answer == same for answer, _, same in compared),
        seconds=seconds,
        num_tokens=sum(len(question.prompt) + ANSWER_LENGTH for question in questions),
    )


def answer_densely(model: compat.Model, questions: Sequence[Question]) -> list[Answer]:
    """Answer each question once with ``generate`` of transformers, in padded batches."""
    answers: list[Answer] = []
    for first in range(0, len(questions), BATCH_SIZE):
        prompts = [torch.from_numpy(each.prompt).long() for each in questions[first : first + BATCH_SIZE]]
        answers += map(tuple, compat.generate_padded(model, prompts, ANSWER_LENGTH))
    return answers
