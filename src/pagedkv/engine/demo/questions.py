"""What the demonstration asks: words, facts, documents and questions about them.

The language of the demonstration: words, one token each, of facts and questions.

A fact is a thing and its place, ``red kite: locker 7.``, in five tokens: two of the thing, two of the place, a full
stop. The token of a thing's noun includes the colon, so that the answer directly follows the thing in the question.
Places cannot be guessed, since they are drawn anew for every document: a right answer was read from the document.

Documents of facts, and questions about them, drawn by seed: the training data and the requests of the demonstration.

    <bos> red kite: locker 7. tiny drum: attic 31. ...  Where? tiny drum:      ->  attic 31.
    `----------------- a document -------------------'  `-- question -'          `- answer

A document has each thing at most once. Questions about one document share it as a prefix.

Questions about shared documents: the requests of the demonstration.

Documents differ in length. Most questions about a document come in one stretch of time, and some much later, so that
prefixes are hit, evicted and computed again. Some requests ask for several answers, which are forks of one prompt.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import ConfigurationError

__all__ = [
    "ADJECTIVES",
    "ANSWER_LENGTH",
    "BOS",
    "EOS",
    "FACT_LENGTH",
    "FULL_STOP",
    "LONGEST",
    "NOUNS",
    "NUMBERS",
    "NUM_FORKED_ANSWERS",
    "PLACES",
    "QUESTION",
    "QUESTION_LENGTH",
    "SHORTEST",
    "VOCABULARY",
    "VOCABULARY_SIZE",
    "Document",
    "Question",
    "decode",
    "draw_document",
    "draw_questions",
    "encode",
]
SPECIAL: Final = ("<pad>", "<bos>", "<eos>", ".", "Where?")
BOS: Final = 1
EOS: Final = 2
FULL_STOP: Final = 3
QUESTION: Final = 4
_ADJECTIVES: Final = """
    red blue green grey black white brown pink amber ivory silver golden copper rusty shiny dusty wooden woollen paper
    glass leather velvet cotton rubber old new small large tiny huge round square long short heavy light soft hard warm
    cold dry wet clean stained striped spotted plain painted carved folded broken mended spare borrowed foreign local
    quiet noisy narrow wide curved straight sharp
""".split()
_NOUNS: Final = """
    kite lamp drum rope kettle ladder bucket basket bottle button needle hammer saddle pillow blanket carpet curtain
    mirror candle lantern compass anchor paddle whistle trumpet violin guitar piano flute bell clock watch ring crown
    mask glove scarf jacket boot sandal belt purse wallet satchel suitcase trunk barrel crate jar bowl plate cup spoon
    fork knife pan pot oven stove broom brush mop sponge towel razor comb scissors thimble spool loom wheel axle gear
    spring hinge latch lock bolt nail screw wrench pliers chisel saw drill file anvil bellows shovel rake hoe plough
    sickle scythe net hook reel sail mast oar canoe raft sled ski skate racket ball bat puck dart arrow bow quiver
    shield helmet lance banner flag map globe atlas ledger
""".split()
_PLACES: Final = """
    locker shelf drawer cabinet closet attic cellar garage shed barn tent wagon office kitchen hallway balcony
""".split()
NUM_NUMBERS: Final = 64
VOCABULARY: Final = (
    *SPECIAL,
    *_ADJECTIVES,
    *(f"{noun}:" for noun in _NOUNS),
    *_PLACES,
    *(str(number) for number in range(NUM_NUMBERS)),
)
VOCABULARY_SIZE: Final = 288
"""Vocabulary of the model: a multiple of 32, whose last ids are not used."""
ADJECTIVES: Final = range(len(SPECIAL), len(SPECIAL) + len(_ADJECTIVES))
NOUNS: Final = range(ADJECTIVES.stop, ADJECTIVES.stop + len(_NOUNS))
PLACES: Final = range(NOUNS.stop, NOUNS.stop + len(_PLACES))
NUMBERS: Final = range(PLACES.stop, PLACES.stop + NUM_NUMBERS)


def decode(token_ids: Iterable[int]) -> str:
    """Write tokens as text, a space between words. Raises IndexError for ids beyond the vocabulary."""
    return " ".join(VOCABULARY[token] for token in token_ids).replace(" .", ".")


def encode(text: str) -> list[int]:
    """Read text as :func:`decode` writes it. Raises KeyError with the word that is not in the vocabulary."""
    ids = {word: token for token, word in enumerate(VOCABULARY)}
    return [ids[word] for word in text.replace(".", " .").split()]


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
