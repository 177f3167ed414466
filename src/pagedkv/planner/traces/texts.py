"""Turns texts of logs into tokens: by a tokenizer's file, or by a fixed number of characters a token.

Only the number of tokens matters here, and that equal texts have equal tokens. So without a tokenizer a text is cut
into pieces of a stated number of characters. A piece's token is a hash of it, the same on every machine (splitmix64 of
its characters and their places, 31 bits). Texts that end differently differ in their last piece alone. A piece never
crosses the end of a text, so a conversation whose messages are passed one by one begins with the tokens of the
conversation before.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.extras import to_install
from pagedkv.errors import ConfigurationError

__all__ = [
    "CHARS_PER_TOKEN",
    "CharacterTokens",
    "FileTokens",
    "TextTokens",
    "marked_tokens",
    "stretched_tokens",
    "text_tokens",
]

CHARS_PER_TOKEN: Final = 4.0
"""Roughly the value of English text with today's vocabularies; results that depend on it are marked as estimates."""
MOST_CHARS_PER_TOKEN: Final = 1000
FIRST_MULTIPLIER: Final = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER: Final = np.uint64(0x94D049BB133111EB)


class TextTokens(Protocol):
    """Turns texts into tokens."""

    is_estimate: bool
    """Whether the number of tokens is only an estimate."""

    @property
    def description(self) -> str:
        """How texts become tokens, as text for users."""
        ...

    def token_ids(self, text: str) -> Int32Array:
        """Make the tokens of one text: int32 ``[n]``, none negative; none of an empty text. O(characters)."""
        ...


class CharacterTokens:
    """Makes tokens of a fixed number of characters.

    Args:
        chars_per_token: a number from 1 to 1,000, possibly a fraction.

    Raises:
        ConfigurationError: the number is out of range.

    >>> tokens = CharacterTokens(4)
    >>> [len(tokens.token_ids(text)) for text in ("", "four", "fives")]
    [0, 1, 2]
    >>> bool((tokens.token_ids("equal to here")[:2] == tokens.token_ids("equal to there")[:2]).all())
    True
    """

    is_estimate = True

    def __init__(self, chars_per_token: float = CHARS_PER_TOKEN) -> None:
        if not 1 <= chars_per_token <= MOST_CHARS_PER_TOKEN:
            raise ConfigurationError(
                f"`chars_per_token` must be from 1 to {MOST_CHARS_PER_TOKEN:,}, got {chars_per_token}"
            )
        self._chars = chars_per_token

    @property
    def description(self) -> str:
        """How texts become tokens, as text for users."""
        return f"{self._chars:g} characters a token"

    def token_ids(self, text: str) -> Int32Array:
        """Make the tokens of one text."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        num_tokens = int(-(-len(codes) // self._chars))
        if num_tokens == 0:
            return np.zeros(0, np.int32)
        starts = (np.arange(num_tokens) * self._chars).astype(np.int64)
        places = np.arange(len(codes)) - np.repeat(starts, np.diff(starts, append=len(codes)))
        hashes = np.bitwise_xor.reduceat(
            _mixed(codes.astype(np.uint64) << np.uint64(20) | places.astype(np.uint64)), starts
        )
        return (_mixed(hashes) >> np.uint64(33)).astype(np.int32)


class FileTokens:
    """Uses a file of Hugging Face's tokenizers (tokenizer.json).

    Raises:
        ConfigurationError: the package is missing, or the file is not such a file.
    """

    is_estimate = False

    def __init__(self, path: str) -> None:
        try:
            tokenizers: Any = import_module("tokenizers")  # an optional package
        except ModuleNotFoundError as error:
            reason = f"`tokenizer` needs the package tokenizers: {to_install('tokenizer')}"
            raise ConfigurationError(f"{reason}, or give `chars_per_token` instead") from error
        if not Path(path).is_file():
            raise ConfigurationError(f"`tokenizer` {path}: there is no such file; name a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more special
            raise ConfigurationError(f"`tokenizer` {path}: cannot be read as a tokenizer.json: {error}") from error
        self._name = Path(path).name

    @property
    def description(self) -> str:
        """How texts become tokens, as text for users."""
        return f"tokens of {self._name}"

    def token_ids(self, text: str) -> Int32Array:
        """Make the tokens of one text, without those that the tokenizer adds around a whole prompt."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def text_tokens(tokenizer: str | None, chars_per_token: float | None) -> TextTokens:
    """Make the object that turns texts into tokens. Raises ConfigurationError."""
    if tokenizer is None:
        return CharacterTokens(CHARS_PER_TOKEN if chars_per_token is None else chars_per_token)
    if chars_per_token is not None:
        raise ConfigurationError("`tokenizer` and `chars_per_token` both define tokens: give one of them")
    return FileTokens(tokenizer)


def marked_tokens(digest: bytes, num_tokens: int) -> Int32Array:
    """Make tokens for content of which only a digest is known: int32 ``[num_tokens]``, none negative."""
    seed = np.uint64(int.from_bytes(digest[:8], "little"))
    numbers = _mixed(np.full(num_tokens, seed) ^ _mixed(np.arange(num_tokens, dtype=np.uint64)))
    return (numbers >> np.uint64(33)).astype(np.int32)


def stretched_tokens(pieces: Int32Array, rate: tuple[int, int], num_tokens: int, digest: bytes) -> Int32Array:
    """Turn pieces of a text into a given number of tokens; equal leading pieces give equal leading tokens.

    Args:
        pieces: int32 ``[n]``.
        rate: a number of tokens, and the number of pieces from which they are made. Texts that begin alike must have
            the same rate. If the two numbers are equal, a piece is its token.
        num_tokens: tokens to make. If the rate gives more, the others are left out; if it gives fewer, tokens from the
            digest follow.
        digest: digest of the whole text; the last token comes from it if others were left out.

    Returns:
        int32 ``[num_tokens]``, none negative. O(pieces + tokens).
    """
    most, least = rate
    num_made = len(pieces) * most // least
    made = np.arange(min(num_made, num_tokens))
    places = made * least // most  # of the piece with which each token begins
    if most == least:
        tokens = pieces[: len(made)]
    elif most > least:
        behind = (made - -(-places * most // least)).astype(np.uint64)
        mixed = _mixed(pieces[places].astype(np.uint64) << np.uint64(20) | behind) >> np.uint64(33)
        tokens = np.where(behind == 0, pieces[places], mixed.astype(np.int32))
    else:
        end = int((made[-1] + 1) * least // most) if len(made) else 0
        inside = np.arange(end) - np.repeat(places, np.diff(places, append=end))
        numbers = _mixed(pieces[:end].astype(np.uint64) << np.uint64(20) | inside.astype(np.uint64))
        hashes = np.bitwise_xor.reduceat(numbers, places) if end else numbers
        tokens = (_mixed(hashes) >> np.uint64(33)).astype(np.int32)
    if num_made == num_tokens:
        return tokens
    if num_made > num_tokens > 0:
        tokens = np.concatenate([tokens[:-1], marked_tokens(digest, 1)])
    return np.concatenate([tokens, marked_tokens(digest, num_tokens - len(tokens))])


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply splitmix64's finaliser."""
    mixed = numbers ^ (numbers >> np.uint64(30))
    mixed *= FIRST_MULTIPLIER
    mixed ^= mixed >> np.uint64(27)
    mixed *= SECOND_MULTIPLIER
    mixed ^= mixed >> np.uint64(31)
    return mixed
