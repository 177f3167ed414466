"""An answer's text, grown token by token: what a token adds is known only once its characters are whole.

A tokenizer joins tokens in its own ways (spaces, characters of several tokens), so text is never put together from
tokens decoded alone. A window is decoded each time, the last tokens whose text is known and the new ones: what is
behind the known text is what these add. A window that has grown long begins anew at tokens whose text is known. A text
that ends in U+FFFD is a character that is not whole yet, and adds nothing.
"""

from collections.abc import Callable, Sequence
from typing import Final, final

__all__ = ["AnswerText"]

REPLACEMENT: Final = "�"
LONGEST_WINDOW: Final = 4
"""Tokens of known text in a window."""
MOST_UNFINISHED: Final = 8
"""Tokens after which a replacement character is taken for one that the answer has: UTF-8 has four bytes."""


@final
class AnswerText:
    """The text of one answer.

    Args:
        decode: gives the text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._first = 0  # window: tokens from here on are decoded
        self._known = 0  # text of the tokens before this one is in `text`
        self._before = ""  # text of the window's tokens before `_known`
        self.text = ""

    def append(self, token_id: int) -> str:
        """Append a token; return the text that it adds, if any. Cost: decoding a few tokens, once or twice."""
        self._token_ids.append(token_id)
        added = self._added(is_over=len(self._token_ids) - self._known >= MOST_UNFINISHED)
        self.text += added
        return added

    def finish(self) -> str:
        """Return the text of an unfinished character, after the last token."""
        added = self._added(is_over=True)
        self.text += added
        return added

    def fork(self) -> "AnswerText":
        """Copy it."""
        copy = AnswerText(self._decode)
        copy._token_ids, copy.text = self._token_ids.copy(), self.text
        copy._first, copy._known, copy._before = self._first, self._known, self._before
        return copy

    def _added(self, *, is_over: bool) -> str:
        after = self._decode(self._token_ids[self._first :])
        if len(after) <= len(self._before) or (after.endswith(REPLACEMENT) and not is_over):
            return ""
        added = after[len(self._before) :]
        if len(self._token_ids) - self._first > LONGEST_WINDOW:
            self._first, after = self._known, self._decode(self._token_ids[self._known :])
        self._known, self._before = len(self._token_ids), after
        return added
