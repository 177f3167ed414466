"""ShareGPT files: each object is a conversation, whose turns are texts and have no times.

Each answer is a request whose prompt is everything before it in the conversation. Times are unknown, so the turns of a
conversation arrive at a stated interval on its own clock; :mod:`~pagedkv.planner.traces.interleaving` determines when
conversations begin.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec

from pagedkv.planner.traces.formats.messages import answer_parts, joined_parts, prompt_parts
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW, MAX_LENGTH, check_range, decoded
from pagedkv.planner.traces.formats.row_format import Reading, RowFormat
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["CONVERSATION_KEYS", "ConversationRows"]

TURN_S: Final = 30.0
CONVERSATION_KEYS: Final = ("conversations", "conversation", "items")
ROLES: Final[Mapping[str, str]] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class _Row(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(max_length=1000)] | int | None = None
    conversations: list[dict[str, Any]] | None = None
    conversation: list[dict[str, Any]] | None = None
    items: list[dict[str, Any]] | None = None


class ConversationRows(RowFormat):
    """Reads ``conversations`` of ``from`` and ``value`` (or ``role`` and ``content``), and an ``id``.

    Args:
        reading: how texts become tokens.
    """

    starts_with_header = False
    session_per_row = True

    def __init__(self, reading: Reading) -> None:
        self._texts = reading.texts
        self._number = 0

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return (
            f"ShareGPT conversations without times (one turn every {TURN_S:g} s is assumed), {self._texts.description}"
        )

    @property
    def notes(self) -> list[str]:
        """Warn that the times are assumed."""
        assumed = f"{TURN_S:g} s between two turns are assumed"
        return [f"the file has no times of turns: {assumed}, and every figure of recorded traffic rests on that"]

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the answers of one conversation as requests."""
        row = decoded(line, _Row)
        turns = next((turns for turns in (row.conversations, row.conversation, row.items) if turns is not None), None)
        if turns is None:
            raise line.fault(f"has none of {', '.join(CONVERSATION_KEYS)}", FIX_THE_ROW)
        messages = [_message(line, turn) for turn in turns]
        self._number += 1
        return self._answers(line, messages, f"{row.id if row.id is not None else 'conversation'} {self._number}")

    def _answers(self, line: Line, messages: list[dict[str, str]], session: str) -> Iterator[Request]:
        num_answers = 0
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = joined_parts(prompt_parts(line, {"messages": messages[:position]}, self._texts) or ())
            output = joined_parts(answer_parts(message, self._texts) or ())
            check_range(line, "the length of a prompt", len(prompt), 1, MAX_LENGTH)
            yield Request(
                TURN_S * num_answers,
                len(prompt),
                len(output),
                session=session,
                prompt_token_ids=prompt,
                output_token_ids=output,
            )
            num_answers += 1


def _message(line: Line, turn: Mapping[str, Any]) -> dict[str, str]:
    role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(role, str) or not isinstance(text, str):
        raise line.fault("a turn has no from and value that are texts", FIX_THE_ROW)
    return {"role": ROLES.get(role.lower(), role), "content": text}
