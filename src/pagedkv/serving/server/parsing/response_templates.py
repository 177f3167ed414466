"""ResponseTemplateParser: an answer parsed by the response template that a tokenizer of transformers carries.

A response template names an answer's regions (content, reasoning, calls) by the markers around them; transformers'
``ResponseParser`` streams it. Content and reasoning stream here, too. A call comes as a whole when its region closes,
since its arguments have other forms than JSON in some templates and are known only then.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, final

from pagedkv.serving.server.parsing.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Part,
    ReasoningPart,
    TextPart,
    merged,
)

__all__ = ["ResponseTemplateParser", "has_response_template"]

REASONING_FIELDS: Final = frozenset({"reasoning_content", "reasoning", "thinking"})
CALLS_FIELD: Final = "tool_calls"


def has_response_template(tokenizer: object) -> bool:
    """Return whether a tokenizer carries a response template and can stream it."""
    return bool(getattr(tokenizer, "response_template", None)) and hasattr(tokenizer, "get_response_parser")


@final
class ResponseTemplateParser:
    """Parses one answer by the tokenizer's template.

    A region that is no call of an offered tool is text, without the markers that the template removes. Where
    transformers cannot parse a region, the region is text, and so is the whole rest of the answer.

    Args:
        tokenizer: of transformers, with a response template (:func:`has_response_template`).
        tools: that are offered, as the chat template takes them.
        names: of these tools.
        new_call_id: makes a unique identity of a call.
        prompt: the text that the answer continues, with special tokens; the template looks there for an open region.

    The text is given to transformers in single characters, so that the parts do not depend on how it is cut. Each
    costs a search for the template's markers.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - transformers is met in one module
        tools: Sequence[Mapping[str, Any]],
        names: Collection[str],
        new_call_id: Callable[[], str],
        prompt: str = "",
    ) -> None:
        self._names = frozenset(names)
        self._new_call_id = new_call_id
        self._parser = tokenizer.get_response_parser(prefix=prompt, tools=list(tools) or None)
        self._region: list[str] = []  # of a call so far
        self._has_failed = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain now. What may be a call is held back until it closes."""
        parts: list[Part] = []
        for place, char in enumerate(text):
            if self._has_failed:
                parts.append(TextPart(text[place:]))
                break
            try:
                events = self._parser.feed(char)
            except (ValueError, KeyError, TypeError):  # a region whose content is not what the template says
                parts += self._fail()
            else:
                parts += self._parts(events)
        return merged(parts)

    def finish(self) -> list[Part]:
        """Return the remaining parts, now that no text follows."""
        if self._has_failed:
            return []
        try:
            _, events = self._parser.finalize()
        except (ValueError, KeyError, TypeError):
            return merged(self._fail())
        return merged([*self._parts(events), *self._as_text()])

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
        """Return the calls of a region; its text where one of them is none."""
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
        if not isinstance(function, Mapping) or function.get("name") not in self._names:
            return False
        arguments = function.get("arguments")
        return arguments is None or isinstance(arguments, Mapping)

    def _as_text(self) -> list[Part]:
        text = "".join(self._region)
        self._region.clear()
        return [TextPart(text)]

    def _fail(self) -> list[Part]:
        self._has_failed = True
        return self._as_text()
