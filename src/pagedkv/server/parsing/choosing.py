"""Chooses the parser of a model's answers: by name, or by the markers in its tokenizer's chat template.

A :class:`ReasoningParser` splits off the reasoning at an answer's beginning; another parser reads the rest: calls in
one of three formats, or a response template of transformers. Hermes 2 Pro and Qwen 2.5 and 3 write calls as follows, by
their model cards::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The closing marker may be absent. White space around a call belongs to the format.

Llama 3.1 to 3.3 write JSON with ``parameters``, by their model cards::

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

An object without the marker is a call only at the answer's beginning or after another call, since text may contain
JSON. After the marker, code that is not a JSON object is text.

Mistral's models write one of these, by mistral-common's tokenizers::

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]            versions 2 and 3
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}        version 13
    [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}                  version 11
    [TOOL_CALLS]get_weather{"city": "Paris"}                                          special tokens left out

Identities that the model writes are dropped: each call gets a unique one.

A response template names an answer's regions (content, reasoning, calls) by the markers around them; transformers'
``ResponseParser`` streams it. Content and reasoning stream here, too. A call is returned whole when its region closes,
since in some templates its arguments are not JSON, and can be parsed only then.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, final

from pagedkv.errors import ConfigurationError
from pagedkv.server.parsing.call_parser import CallFormat, CallParser, CallReader, Steps
from pagedkv.server.parsing.parts import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    EndOfThoughts,
    IdSource,
    Part,
    PlainParser,
    ReasoningPart,
    TextPart,
    merged,
    mistral_call_id,
    openai_call_id,
)

THINK: Final = ("<think>", "</think>")
MARKERS: Final = (THINK, ("[THINK]", "[/THINK]"))
"""Markers that begin and end reasoning: of most models, and of Mistral's with tokenizers of version 13."""


def read_hermes(reader: CallReader) -> Steps[None]:
    """Read an answer in this format to its end."""
    is_open = False
    while (yield from reader.read_text("<")):
        is_open = is_open and reader.is_at_edge
        marker = yield from reader.read_marker(*((BEGIN, END) if is_open else (BEGIN,)))
        if marker == END:
            reader.drop()
            is_open = False
        elif marker == BEGIN and (yield from reader.read_blanks()) and reader.char == "{":
            is_open = yield from reader.read_call()
        else:
            reader.release()


def read_llama(reader: CallReader) -> Steps[None]:
    """Read an answer in this format to its end."""
    num_separated = 0
    while (yield from reader.read_text("<", edge_starts="{" + SEPARATOR)):
        if reader.char == SEPARATOR:
            if reader.num_calls > num_separated:
                num_separated = reader.num_calls
                reader.keep_as_blank()
            else:
                reader.hold()
                reader.release()
        elif reader.char == "{" or (
            (yield from reader.read_marker(LLAMA_MARKER)) is not None
            and (yield from reader.read_blanks())
            and reader.char == "{"
        ):
            yield from reader.read_call()
        else:
            reader.release()


def read_mistral(reader: CallReader) -> Steps[None]:
    """Read an answer in this format to its end."""
    while (yield from reader.read_text("[")):
        is_marked = (yield from reader.read_marker(MISTRAL_MARKER)) is not None
        while is_marked:
            is_marked = yield from read_marked(reader)
        reader.release()


FORMATS: Final[Mapping[str, tuple[CallFormat, Callable[[IdSource], str]]]] = {
    "hermes": (read_hermes, openai_call_id),
    "llama": (read_llama, openai_call_id),
    "mistral": (read_mistral, mistral_call_id),
}
PARSER_NAMES: Final = ("auto", *FORMATS, "none")
REASONING_NAMES: Final = ("auto", "think", "none")
TEMPLATE_MARKERS: Final = (
    ("hermes", ('<tool_call>\\n{"name"', "<tool_call>\n{", "<tool_call>{")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama", ("<|python_tag|>", '"parameters": ')),
)
"""Each format and its markers; a chat template with one of the markers uses that format."""


@final
class ReasoningParser:
    """Splits reasoning from the rest of one answer.

    Reasoning begins at the answer's start, after white space, or has begun in the prompt (``starts_inside``); then the
    first marker may be absent. Later markers are text, since a text or an argument may contain them. Reasoning without
    an end marker extends to the answer's end.

    Args:
        inner: parses what follows the reasoning.
        start: marker that begins it. Its first character occurs in it once.
        end: marker that ends it; likewise.
        starts_inside: whether the prompt ends with the first marker.
    """

    def __init__(
        self, inner: AnswerParser, start: str = THINK[0], end: str = THINK[1], *, starts_inside: bool = False
    ) -> None:
        self._inner = inner
        self._start = start
        self._thoughts = EndOfThoughts(end)
        self._starts_inside = starts_inside
        self._is_before = True
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain now. O(text)."""
        if self._is_before:
            self._held += text
            begun = self._held.lstrip()
            if len(begun) < len(self._start) and self._start.startswith(begun):
                return []
            text = self._leave_beginning()
        thought, rest = self._thoughts.feed(text)
        return [
            *([ReasoningPart(thought)] if thought else []),
            *(self._inner.feed(rest) if self._thoughts.is_over else []),
        ]

    def finish(self) -> list[Part]:
        """Return the remaining parts, now that no text follows."""
        parts: list[Part] = []
        if self._is_before:
            thought, rest = self._thoughts.feed(self._leave_beginning())
            parts = [*([ReasoningPart(thought)] if thought else []), *(self._inner.feed(rest) if rest else [])]
        held = self._thoughts.held
        return [*parts, *([ReasoningPart(held)] if held else []), *self._inner.finish()]

    def _leave_beginning(self) -> str:
        """Decide whether the answer begins with thoughts; return its text so far without the first marker."""
        self._is_before = False
        begun, held = self._held.lstrip(), self._held
        if begun.startswith(self._start):
            return begun[len(self._start) :]
        self._thoughts.is_over = not self._starts_inside
        return held


def end_of_open_reasoning(beginning: str) -> str | None:
    """Return the marker that ends the reasoning begun by a prompt; None where it begins none.

    Args:
        beginning: the end of the prompt's text, special tokens included.
    """
    ends = [end for start, end in MARKERS if beginning.rstrip().endswith(start)]
    return ends[0] if ends else None


def parser_name(name: str | None, tokenizer: object) -> str:
    """Return the name of the call parser: the given one; for ``auto`` and None, that of the chat template.

    Returns:
        ``hermes``, ``llama``, ``mistral``, or ``none`` where the template has no known format.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if name is not None and name not in PARSER_NAMES:
        raise ConfigurationError(f"there is no tool parser {name!r}; there are {', '.join(PARSER_NAMES)}")
    if name is not None and name != "auto":
        return name
    template = _tool_template(tokenizer)
    for known, markers in TEMPLATE_MARKERS:
        if any(marker in template for marker in markers):
            return known
    return "none"


def parser_for(  # noqa: PLR0913 - a model's formats, a request's tools, its prompt
    name: str | None,
    tokenizer: object,
    *,
    tools: Sequence[Mapping[str, Any]],
    reasoning: str | None,
    id_source: IdSource,
    prompt: str | None = None,
) -> AnswerParser:
    """Make the parser of one answer.

    Args:
        name: the call parser: ``hermes``, ``llama``, ``mistral``, ``none``; ``auto`` or None: by the tokenizer.
        tokenizer: a tokenizer of transformers, or like it; None: there is none.
        tools: offered functions, as OpenAI's requests have them; without any, no call is found.
        reasoning: ``think``, by the markers in the chat template, else ``<think>``; ``none``; ``auto`` or None:
            ``think`` where the chat template has such markers.
        id_source: returns a new unique identity that begins with the given prefix.
        prompt: the prompt's text with special tokens; its end shows whether reasoning has begun. None: the beginning of
            an answer is taken from the chat template, at the cost of one short rendering.

    With ``auto`` for both, a tokenizer's response template is used if it has one.

    Raises:
        ConfigurationError: the name of a parser is unknown.
    """
    if reasoning is not None and reasoning not in REASONING_NAMES:
        raise ConfigurationError(f"there is no reasoning parser {reasoning!r}; there are {', '.join(REASONING_NAMES)}")
    known = parser_name(name, tokenizer)
    names = [tool["function"]["name"] for tool in tools]
    finds_reasoning = reasoning in {None, "auto"}
    if name in {None, "auto"} and finds_reasoning and has_response_template(tokenizer):
        beginning = prompt if prompt is not None else _answer_beginning(tokenizer)
        return ResponseTemplateParser(tokenizer, tools, names, lambda: openai_call_id(id_source), beginning)
    inner: AnswerParser = PlainParser()
    if names and known in FORMATS:
        call_format, new_id = FORMATS[known]
        inner = CallParser(call_format, names, lambda: new_id(id_source))
    template = _tool_template(tokenizer)
    found = next((markers for markers in MARKERS if all(marker in template for marker in markers)), None)
    if reasoning == "none" or (finds_reasoning and found is None):
        return inner
    start, end = found or THINK
    beginning = prompt if prompt is not None else _answer_beginning(tokenizer)
    return ReasoningParser(inner, start, end, starts_inside=beginning.rstrip().endswith(start))


def _tool_template(tokenizer: object) -> str:
    """Return the chat template; where there are several, the one for tools."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template if isinstance(template, str) else ""


def _answer_beginning(tokenizer: Any) -> str:  # noqa: ANN401 - transformers is met in one module
    """Return the text that the chat template writes before an answer; empty where it refuses a single turn."""
    if not _tool_template(tokenizer):
        return ""
    try:
        turn = [{"role": "user", "content": "."}]
        return str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
    except Exception:  # noqa: BLE001 - a template may raise any exception
        return ""


BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
LLAMA_MARKER: Final = "<|python_tag|>"
SEPARATOR: Final = ";"
MISTRAL_MARKER: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
NAME_SIGNS: Final = "_-.:/"


def read_marked(reader: CallReader) -> Steps[bool]:
    """Read a call after a marker; return whether another marker came instead. That marker is then held."""
    if not (yield from reader.read_blanks()):
        return False
    if reader.char == "[":
        return (yield from read_array(reader))
    if reader.char == "{":
        yield from reader.read_call()
        return False
    return (yield from read_named(reader))


def read_array(reader: CallReader) -> Steps[bool]:
    """Read calls between brackets; the opening bracket is next. Return as :func:`read_marked`."""
    reader.hold()
    if (yield from reader.has_char()) and reader.char == MISTRAL_MARKER[1]:
        return _is_again(reader, (yield from reader.read_marker(MISTRAL_MARKER[1:])) is not None)
    while (yield from reader.read_blanks()) and reader.char == "{":
        is_call = yield from reader.read_call()
        if not (yield from reader.read_blanks()) or reader.char not in ",]":
            break
        if reader.hold() == "]":
            if is_call:
                reader.drop()
            break
    return False


def read_named(reader: CallReader) -> Steps[bool]:
    """Read a name and its arguments; the name's first character is next. Return as :func:`read_marked`."""
    name = yield from _read_word(reader)
    if not name or not (yield from reader.read_blanks()):
        return False
    if reader.char == "[":
        marker = yield from reader.read_marker(ARGUMENTS, CALL_ID, MISTRAL_MARKER)
        if marker == CALL_ID:
            yield from _read_word(reader)
            marker = yield from reader.read_marker(ARGUMENTS, MISTRAL_MARKER)
        if marker != ARGUMENTS:
            return _is_again(reader, marker == MISTRAL_MARKER)
        if not (yield from reader.read_blanks()):
            return False
    if reader.char == "{":
        yield from reader.read_arguments(name)
    return False


def _read_word(reader: CallReader) -> Steps[str]:
    word = ""
    while (yield from reader.has_char()) and (reader.char.isalnum() or reader.char in NAME_SIGNS):
        word += reader.hold()
    return word


def _is_again(reader: CallReader, is_marker: bool) -> bool:  # noqa: FBT001 - whether a marker was read last
    """Release the held text before the last marker; return whether the last text was a marker."""
    if is_marker:
        reader.release(keep=len(MISTRAL_MARKER))
    return is_marker


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
        names: names of these tools.
        new_call_id: makes a unique identity of a call.
        prompt: the text that the answer continues, with special tokens; the template looks there for an open region.

    The cost is that of transformers: a search for the template's markers in each piece. A refused piece is
    parsed again character by character, so that the parts do not depend on how the text is cut.
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
        if not isinstance(function, Mapping) or function.get("name") not in self._names:
            return False
        arguments = function.get("arguments")
        return arguments is None or isinstance(arguments, Mapping)

    def _as_text(self) -> list[Part]:
        text = "".join(self._region)
        self._region.clear()
        return [TextPart(text)]
