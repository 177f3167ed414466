r"""TokenTexts: the text and the bytes of single tokens, for log-probabilities.

A token may end inside a character, so that it has no text of its own. Its bytes are then those of its piece in the
vocabulary: letters of byte-level tokenizers, or names such as ``<0xE4>``; its text names them, ``bytes:\xe4``, as
OpenAI's answers do, so that tokens of different bytes have different texts.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, final

from pagedkv.engine import TokenLogprobs
from pagedkv.engine.sampling import AnswerText

UNKNOWN: Final = "\ufffd"
"""What stands for bytes that are no whole character."""
NAMED_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LEAST_LOGPROB: Final = -9999.0
"""Written for a token of probability 0, since JSON has no infinity."""


@cache
def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter of byte-level vocabularies: printable ones are themselves, others from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


@final
class TokenTexts:
    """Texts and bytes of the tokens of one answer.

    Args:
        tokenizer: of transformers; None: tokens have no pieces.
        decode: turns token ids into text.
        as_ids: whether texts are ``token_id:`` and the id, as vLLM writes them on request.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - or like it
        decode: Callable[[Sequence[int]], str],
        *,
        as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = decode
        self._as_ids = as_ids
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the answer."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> bytes:
        text = self._decode([token_id])
        if UNKNOWN not in text or self._tokenizer is None:
            return text.encode(errors="replace")
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        named = NAMED_BYTE.fullmatch(piece)
        if named is not None:
            return bytes([int(named[1], 16)])
        letters = _byte_of_letter()
        if all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        return text.encode(errors="replace")

    def text_of(self, token_id: int) -> str:
        """Return the text of a token; of one that is no whole characters, its bytes by name."""
        if self._as_ids:
            return f"token_id:{token_id}"
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def position(self, each: TokenLogprobs, *, has_own: bool = False) -> dict[str, Any]:
        """Return log-probabilities of one position in the form of chat completions.

        Args:
            each: the log-probabilities.
            has_own: whether the token stands before the further ones too.
        """
        told = dict([(each.token_id, each.logprob), *each.top]) if has_own else dict(each.top)
        top = [self._token(token, logprob) for token, logprob in told.items()]
        return {**self._token(each.token_id, each.logprob), "top_logprobs": top}

    def by_text(self, each: TokenLogprobs, count: int) -> dict[str, float]:
        """Return the own token of one position first, and the most likely ones; of equal texts, further ones by id.

        Args:
            each: the log-probabilities.
            count: number of most likely tokens.
        """
        found: dict[str, float] = {}
        for token, logprob in dict([(each.token_id, each.logprob), *each.top[:count]]).items():
            text = self.text_of(token)
            found[f"token_id:{token}" if text in found else text] = max(logprob, LEAST_LOGPROB)
        return found

    def new_text(self) -> AnswerText:
        """Return the text of an answer that has not begun."""
        return AnswerText(self._decode)

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text_of(token_id),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self.bytes_of(token_id)),
        }
