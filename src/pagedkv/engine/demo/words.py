"""The language of the demonstration: words, one token each, of facts and questions.

A fact is a thing and its place, ``red kite: locker 7.``, in five tokens: two of the thing, two of the place, a full
stop. The token of a thing's noun includes the colon, so that the answer directly follows the thing in the question.
Places cannot be guessed, since they are drawn anew for every document: a right answer was read from the document.
"""

from collections.abc import Iterable
from typing import Final

__all__ = [
    "ADJECTIVES",
    "BOS",
    "EOS",
    "FULL_STOP",
    "NOUNS",
    "NUMBERS",
    "PLACES",
    "QUESTION",
    "VOCABULARY",
    "VOCABULARY_SIZE",
    "decode",
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
