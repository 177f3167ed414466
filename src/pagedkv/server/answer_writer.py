"""AnswerWriter: turns one answer's tokens into text, reasoning and tool calls while they arrive.

::

    token ids -> AnswerText -> text -> StopCut -> AnswerParser -> parts
                 (whole characters)    (no stop texts)  (no markers)
"""

from collections.abc import Callable, Sequence
from typing import final

from pagedkv.engine import TokenUpdate
from pagedkv.engine.sampling import AnswerText
from pagedkv.server.parsing import AnswerParser, CallBegin, Part, TextPart
from pagedkv.server.stop_texts import StopCut

__all__ = ["AnswerWriter"]


@final
class AnswerWriter:
    """Writes one answer.

    Args:
        decode: turns token ids into text.
        stops: texts that end the answer and are not part of it.
        parser: finds reasoning and tool calls in the text.

    Attributes:
        token_ids: the answer's tokens, without the token that ended it.
        has_calls: whether the answer calls a tool.
        is_cut: whether a stop text ended the answer; ``token_ids`` then includes the stop text's tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], parser: AnswerParser) -> None:
        self._text = AnswerText(decode)
        self._cut = StopCut(stops)
        self._parser = parser
        self.token_ids: list[int] = []
        self.has_calls = False
        self.is_cut = False

    def take(self, update: TokenUpdate) -> list[Part]:
        """Take new tokens; return the parts that are certain now. With the last tokens, return all remaining parts."""
        ended_by_token = isinstance(update.stop, int)
        self.is_cut = isinstance(update.stop, str)
        token_ids = update.token_ids[:-1] if ended_by_token else update.token_ids
        self.token_ids += token_ids
        text = "".join(self._text.append(token) for token in token_ids)
        if update.finish_reason is None:
            return self._noted(self._parser.feed(self._cut.feed(text)))
        text = self._cut.feed(text + self._text.finish()) + self._cut.finish()
        return self._noted([*self._parser.feed(text), *self._parser.finish()])

    def _noted(self, parts: list[Part]) -> list[Part]:
        self.has_calls |= any(isinstance(part, CallBegin) for part in parts)
        return [part for part in parts if not isinstance(part, TextPart) or part.text]
