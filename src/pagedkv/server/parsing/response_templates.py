"""Answers parsed by a response template of the tokenizer.

Such a template names an answer's regions (content, reasoning, calls) by the markers around them; transformers'
``ResponseParser`` streams it. Content and reasoning stream here, too. A call is returned whole when its region closes,
since in some templates its arguments are not JSON, and can be parsed only then.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from pagedkv.server.parsing.call_parser import Schemas
from pagedkv.server.parsing.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Part,
    ReasoningPart,
    TextPart,
    merged,
)

REASONING_FIELDS: Final = frozenset({"reasoning_content", "reasoning", "thinking"})
CALLS_FIELD: Final = "tool_calls"
REFUSALS: Final = (ValueError, KeyError, TypeError)
"""Errors that transformers raises for a region whose content contradicts the template."""
OTHER: Final = "\0"
"""A character that occurs in no marker: fed at the end, it releases text that is held back as a possible marker."""


def has_response_template(tokenizer: object) -> bool:
    """Return whether a tokenizer carries a response template and can stream it."""
    return bool(getattr(tokenizer, "response_template", None)) and hasattr(tokenizer, "get_response_parser")


@final
class ResponseTemplateParser:
    """Parses one answer by the tokenizer's template.

    A region of calls that does not call an offered tool is text, without the markers that the template removes. Where
    transformers cannot parse a region, it and the whole rest of the answer are text.

    Args:
        tokenizer: a tokenizer of transformers with a response template (:func:`has_response_template`).
        tools: offered tools, as the chat template takes them.
        schemas: the same, by name.
        new_call_id: makes a unique identity of a call.
        prompt: the text that the answer continues, with special tokens; the template looks there for an open region.

    The cost is that of transformers: a search for the template's markers in each piece. A refused piece is
    parsed again character by character, so that the parts do not depend on how the text is cut.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - transformers is met in one module
        tools: Sequence[Mapping[str, Any]],
        schemas: Schemas,
        new_call_id: Callable[[], str],
        prompt: str = "",
    ) -> None:
        self._schemas = schemas
        self._new_call_id = new_call_id
        self._new_parser: Callable[[], Any] = lambda: tokenizer.get_response_parser(
            prefix=prompt, tools=list(tools) or None
        )
        self._parser = self._new_parser()
        self._fed: list[str] = []
        self._region: list[str] = []  # of a call so far
        self._has_failed = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain now. A possible call is held back until it closes."""
        if self._has_failed:
            return [TextPart(text)] if text else []
        try:
            events = self._parser.feed(text)
        except REFUSALS:
            return merged(self._up_to_failure(text))
        self._fed.append(text)
        return merged(self._parts(events))

    def finish(self) -> list[Part]:
        """Return the remaining parts, now that no text follows."""
        if self._has_failed:
            return []
        try:
            _, events = self._parser.finalize()
        except REFUSALS:
            parts = merged(self._up_to_failure(OTHER))
            return [TextPart(part.text.removesuffix(OTHER)) if isinstance(part, TextPart) else part for part in parts]
        return merged([*self._parts(events), *self._as_text()])

    def _up_to_failure(self, text: str) -> list[Part]:
        """Return the parts of a refused piece: the parts before the refused character, and the rest as text."""
        parser = self._new_parser()
        parser.feed("".join(self._fed))
        parts: list[Part] = []
        self._has_failed = True
        for place, char in enumerate(text):
            try:
                events = parser.feed(char)
            except REFUSALS:
                return [*parts, *self._as_text(), TextPart(text[place + 1 :])]
            parts += self._parts(events)
        return [*parts, *self._as_text()]

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if field == CALLS_FIELD:
                if kind == "region_chunk":
                    self._region.append(event["text"])
                elif kind == "region_close":
                    parts += self._closed(event["value"])
            elif kind == "region_chunk":
                parts.append((ReasoningPart if field in REASONING_FIELDS else TextPart)(event["text"]))
        return parts

    def _closed(self, value: object) -> list[Part]:
        """Return the calls of a region; the whole region as text where one of them is not a call."""
        functions = [
            call.get("function") if isinstance(call, Mapping) else None
            for call in (value if isinstance(value, list) else [value])
        ]
        if not functions or not all(self._is_call(function) for function in functions):
            return self._as_text()
        self._region.clear()
        parts: list[Part] = []
        for function in functions:
            assert function is not None, "no call has no function"
            arguments = function.get("arguments") or {}
            index = self._num_calls
            self._num_calls += 1
            parts += [
                CallBegin(index, self._new_call_id(), function["name"]),
                CallArguments(index, json.dumps(arguments, ensure_ascii=False)),
                CallEnd(index),
            ]
        return parts

    def _is_call(self, function: object) -> bool:
        if not isinstance(function, Mapping) or function.get("name") not in self._schemas:
            return False
        arguments = function.get("arguments")
        return arguments is None or isinstance(arguments, Mapping)

    def _as_text(self) -> list[Part]:
        text = "".join(self._region)
        self._region.clear()
        return [TextPart(text)]
