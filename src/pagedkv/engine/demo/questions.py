"""Questions about shared documents: the requests of the demonstration.

Documents differ in length. Most questions about a document come in one stretch of time, and some much later, so that
prefixes are hit, evicted and computed again. Some requests ask for several answers, which are forks of one prompt.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.engine.demo.facts import Document, draw_document
from pagedkv.errors import ConfigurationError

__all__ = ["LONGEST", "NUM_FORKED_ANSWERS", "SHORTEST", "Question", "draw_questions"]

SHORTEST: Final = 72
"""Fewest facts of a document: from 364 tokens on, a partly filled block of 16 tokens wastes less than 4%."""
LONGEST: Final = 96
"""Most facts of a document: four fifths of what the model was trained for."""
DOCUMENTS_AT_ONCE: Final = 4
SHARE_OF_LATE: Final = 0.2
"""Share of questions that are about any document, at any time."""
FORK_EVERY: Final = 4
NUM_FORKED_ANSWERS: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One request.

    Args:
        prompt: int32 ``[tokens]``, a document and the question.
        answer: int32 ``[3]``, the right answer.
        num_answers: number of answers; all must be equal, since the most likely tokens are chosen.
    """

    prompt: Int32Array
    answer: Int32Array
    num_answers: int


def draw_questions(num_questions: int, num_documents: int, seed: int) -> list[Question]:
    """Draw questions in order of arrival; every fourth asks for four answers.

    Raises:
        ConfigurationError: a number below 1.
    """
    if min(num_questions, num_documents) < 1:
        raise ConfigurationError(f"{num_questions} questions about {num_documents} documents: draw at least 1 of each")
    generator = np.random.default_rng(seed)
    documents = [draw_document(generator, int(generator.integers(SHORTEST, LONGEST + 1))) for _ in range(num_documents)]
    questions = []
    for number in range(num_questions):
        document = documents[_choose(generator, number / num_questions, num_documents)]
        num_answers = 1 if (number + 1) % FORK_EVERY else NUM_FORKED_ANSWERS
        questions.append(_ask(document, generator, num_answers))
    return questions


def _choose(generator: np.random.Generator, progress: float, num_documents: int) -> int:
    """Choose a document: mostly one of the few of this stretch of time, sometimes any."""
    if generator.random() < SHARE_OF_LATE:
        return int(generator.integers(num_documents))
    first = int(progress * num_documents)
    return (first + int(generator.integers(DOCUMENTS_AT_ONCE))) % num_documents


def _ask(document: Document, generator: np.random.Generator, num_answers: int) -> Question:
    fact = int(generator.integers(len(document.facts)))
    prompt = np.concatenate([document.tokens(), document.question(fact)])
    return Question(prompt, document.answer(fact), num_answers)
