"""When an answer ends: a token that ends it, a text that ends it, or as many tokens as it may have.

Tokens are looked at one by one, so that an answer is the same whether they come one a step or several. A stop text
counts at the token with which it is complete; where several are complete at once, the one that began first. What has
been streamed is never taken back: text that may be the beginning of a stop text is held until that is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, final

from pagedkv.engine.sampling.parameters import SamplingParams
from pagedkv.engine.sampling.text import AnswerText
from pagedkv.errors import RequestError

__all__ = ["Ending", "FinishReason", "StopDetector"]


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
