"""WildChat: a conversation in each row, with times of all turns or of the last one alone.

Each answer is a request whose prompt is everything before it in the conversation. It arrives at the time of the
question; without that, at the time when the answer began (``created``), or else when it was complete, which is later.
If no turn has a time, the row's time is that of the last turn, and earlier turns precede it at a stated interval. Rows
are conversations and overlap, so such a file must be sorted by arrival first.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagedkv.planner.traces.formats.bodies import JsonObject, as_object, first_named, usage_of
from pagedkv.planner.traces.formats.calls import Call, Calls
from pagedkv.planner.traces.formats.messages import answer_parts, prompt_parts
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW
from pagedkv.planner.traces.formats.row_format import Reading
from pagedkv.planner.traces.lines import Line

__all__ = ["WildChatLayout", "is_wildchat"]

KEYS: Final = frozenset({"conversation", "timestamp"})
NAMES: Final = ("conversation_hash", "conversation_id")
TURN_S: Final = 30.0
ANSWERER: Final = "assistant"


def is_wildchat(keys: Mapping[str, object]) -> bool:
    """Return whether a first line is a conversation with a time, by its keys."""
    return keys.keys() >= KEYS


class WildChatLayout:
    """A conversation in each row.

    Args:
        reading: how texts become tokens.
        calls: reads the times.
    """

    def __init__(self, reading: Reading, calls: Calls) -> None:
        self._texts = reading.texts
        self._calls = calls
        self._num_turns = self._num_assumed = 0

    @property
    def title(self) -> str:
        """Name of the log."""
        if not self._num_assumed:
            return "WildChat's conversations by the times of their turns"
        share = f"for {self._num_assumed:,} of {self._num_turns:,} turns {TURN_S:g} s between two are assumed"
        return f"WildChat's conversations by the time of the last turn ({share})"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the conversation's answers as calls."""
        turns = [turn for turn in row["conversation"] or () if isinstance(turn, dict)]
        places = [place for place, turn in enumerate(turns) if turn.get("role") == ANSWERER]
        for number, place in enumerate(places):
            messages = [{"role": turn.get("role"), "content": turn.get("content")} for turn in turns[: place + 1]]
            stated = usage_of(line, as_object(turns[place].get("usage")))
            yield Call(
                line,
                self._arrival_s(line, row, turns[max(0, place - 1) : place + 1], len(places) - 1 - number),
                prompt_parts(line, {"messages": messages[:-1]}, self._texts),
                answer_parts(messages[-1], self._texts),
                stated.num_prompt or None,
                stated.num_answer or None,
                stated.num_thoughts,
                session=first_named(NAMES, row),
            )

    def _arrival_s(self, line: Line, row: JsonObject, turns: Sequence[JsonObject], num_behind: int) -> float:
        """Return the arrival of a question: its own time, its answer's, or one before the end of the conversation."""
        self._num_turns += 1
        question, reply = (turns[0] if len(turns) > 1 else {}), turns[-1]
        for value in (question.get("timestamp"), reply.get("created"), reply.get("timestamp")):
            if value is not None:
                return self._calls.arrival_s(line, value)
        if row["timestamp"] is None:
            raise line.fault("neither its turns nor the conversation have a time", FIX_THE_ROW)
        self._num_assumed += 1
        return self._calls.arrival_s(line, row["timestamp"]) - TURN_S * num_behind
