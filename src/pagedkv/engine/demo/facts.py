"""Documents of facts, and questions about them, drawn by seed: the training data and the requests of the demonstration.

    <bos> red kite: locker 7. tiny drum: attic 31. ...  Where? tiny drum:      ->  attic 31.
    `----------------- a document -------------------'  `-- question -'          `- answer

A document has each thing at most once. Questions about one document share it as a prefix.
"""

from dataclasses import dataclass

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.engine.demo.words import ADJECTIVES, BOS, FULL_STOP, NOUNS, NUMBERS, PLACES, QUESTION

__all__ = ["ANSWER_LENGTH", "FACT_LENGTH", "QUESTION_LENGTH", "Document", "draw_document"]

FACT_LENGTH = 5
QUESTION_LENGTH = 3
ANSWER_LENGTH = 3


@dataclass(frozen=True, slots=True)
class Document:
    """A document.

    Args:
        facts: int32 ``[facts, 5]``: adjective, noun, place, number, full stop.
    """

    facts: Int32Array

    def tokens(self) -> Int32Array:
        """Return the tokens of the document: int32 ``[1 + 5 x facts]``."""
        return np.concatenate([[BOS], self.facts.ravel()]).astype(np.int32)

    def question(self, fact: int) -> Int32Array:
        """Return the question about the place of one fact: int32 ``[3]``."""
        return np.array([QUESTION, *self.facts[fact, :2]], np.int32)

    def answer(self, fact: int) -> Int32Array:
        """Return the right answer to the question about one fact: int32 ``[3]``: place, number, full stop."""
        return self.facts[fact, 2:]


def draw_document(generator: np.random.Generator, num_facts: int) -> Document:
    """Draw a document of ``num_facts`` facts. Raises ValueError if there are fewer things than facts."""
    things = generator.choice(len(ADJECTIVES) * len(NOUNS), num_facts, replace=False)
    columns = (
        ADJECTIVES.start + things // len(NOUNS),
        NOUNS.start + things % len(NOUNS),
        generator.integers(PLACES.start, PLACES.stop, num_facts),
        generator.integers(NUMBERS.start, NUMBERS.stop, num_facts),
        np.full(num_facts, FULL_STOP),
    )
    return Document(np.stack(columns, axis=1).astype(np.int32))
