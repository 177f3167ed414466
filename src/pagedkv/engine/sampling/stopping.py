"""When an answer ends, and its text until there.

An answer's text, grown token by token: what a token adds is known only once its characters are whole.

A tokenizer joins tokens in its own ways (spaces, characters of several tokens), so text is never put together from
tokens decoded alone. A window is decoded each time, the last tokens whose text is known and the new ones: what is
behind the known text is what these add. A window that has grown long begins anew at tokens whose text is known. A text
that ends in U+FFFD is a character that is not whole yet, and adds nothing.

When an answer ends: a token that ends it, a text that ends it, or as many tokens as it may have.

Tokens are looked at one by one, so that an answer is the same whether they come one a step or several. A stop text
counts at the token with which it is complete; where several are complete at once, the one that began first. What has
been streamed is never taken back: text that may be the beginning of a stop text is held until that is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, final

from pagedkv.engine.sampling.parameters import SamplingParams
from pagedkv.errors import RequestError

__all__ = ["AnswerText", "Ending", "FinishReason", "StopDetector"]
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


class FinishReason(Enum):
    """Why an answer ended, in the words of the field's interfaces."""

    STOP = "stop"
    LENGTH = "length"

    value: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended.

    Args:
        reason: by itself, or by length.
        num_tokens: tokens that the answer has, the one that ended it included.
        stop: the token id or the text that ended it; None where it ended by length.
    """

    reason: FinishReason
    num_tokens: int
    stop: int | str | None


@final
class StopDetector:
    """Follows one answer until it ends.

    Args:
        params: of its request.
        stop_ids: tokens that end it; the model's end tokens are among them unless the request ignores them.
        decode: maps token ids to text; None: no text is kept.
        max_tokens: tokens that the context has room for; the parameters may have a lower limit.

    Raises:
        RequestError: stop texts without ``decode``, or no limit at all.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if params.stop and decode is None:
            raise RequestError(f"the stop texts {list(params.stop)} need a tokenizer that can decode: give decode")
        limits = [limit for limit in (params.max_tokens, max_tokens) if limit is not None]
        if not limits:
            raise RequestError("an answer needs a limit: max_tokens of its parameters, or of the context")
        self._max_tokens = min(limits)
        self._min_tokens = params.min_tokens
        self._stop_ids = stop_ids
        self._stops = params.stop
        self._text = None if decode is None else AnswerText(decode)
        self._num_tokens = 0
        self._cut: int | None = None
        self.ending: Ending | None = None

    @property
    def text(self) -> str:
        """The answer's text, cut before the stop text that ended it. Without the token that ended it."""
        text = "" if self._text is None else self._text.text
        return text if self._cut is None else text[: self._cut]

    def append(self, token_ids: Sequence[int]) -> Ending | None:
        """Look at tokens of the answer, in order, until one ends it; those behind that one are not the answer's.

        Returns:
            How it ended, or None. What follows an ending changes nothing.
        """
        for token in token_ids:
            if self.ending is not None:
                break
            self._num_tokens += 1
            self.ending = self._end_at(int(token))
            if self.ending is not None and self._text is not None and self._cut is None:
                self._text.finish()
        return self.ending

    def fork(self) -> "StopDetector":
        """Copy it, for a sequence that goes its own way from here on."""
        copy = object.__new__(StopDetector)
        copy.__dict__.update(self.__dict__)
        copy._text = None if self._text is None else self._text.fork()
        return copy

    def _end_at(self, token: int) -> Ending | None:
        may_end = self._num_tokens >= self._min_tokens
        if token in self._stop_ids and may_end:
            return Ending(FinishReason.STOP, self._num_tokens, token)
        if self._text is not None:
            added = self._text.append(token)
            found = self._found(len(added)) if may_end and added else None
            if found is not None:
                self._cut, stop = found
                return Ending(FinishReason.STOP, self._num_tokens, stop)
        if self._num_tokens >= self._max_tokens:
            return Ending(FinishReason.LENGTH, self._num_tokens, None)
        return None

    def _found(self, num_added: int) -> tuple[int, str] | None:
        """Find the stop text that the last characters completed first: where it begins, and which it is."""
        assert self._text is not None
        text = self._text.text
        ends: list[tuple[int, int, str]] = []
        for stop in self._stops:
            begin = text.find(stop, max(0, len(text) - num_added - len(stop) + 1))
            if begin >= 0:
                ends.append((begin + len(stop), begin, stop))
        if not ends:
            return None
        _, begin, stop = min(ends)
        return begin, stop
