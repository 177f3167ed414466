"""Identities of tool calls, in the shape that each format requires."""

import hashlib
from collections.abc import Callable
from typing import Final, TypeAlias

__all__ = ["IdSource", "mistral_call_id", "openai_call_id"]

IdSource: TypeAlias = Callable[[str], str]
"""Returns a new unique identity that begins with the given prefix."""

MISTRAL_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MISTRAL_LENGTH: Final = 9


def openai_call_id(id_source: IdSource) -> str:
    """Make ``call_`` and 24 hexadecimal characters (96 bits) from a new identity."""
    return "call_" + hashlib.blake2b(id_source("call_").encode(), digest_size=12).hexdigest()


def mistral_call_id(id_source: IdSource) -> str:
    """Make 9 alphanumeric characters (53 bits) from a new identity: Mistral's templates refuse other identities."""
    number = int.from_bytes(hashlib.blake2b(id_source("call_").encode(), digest_size=16).digest())
    letters = []
    for _ in range(MISTRAL_LENGTH):
        number, letter = divmod(number, len(MISTRAL_LETTERS))
        letters.append(MISTRAL_LETTERS[letter])
    return "".join(letters)
