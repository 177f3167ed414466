"""Chooses the parser of a model's answers: by name, or by the markers in its tokenizer's chat template.

A ReasoningParser splits off the reasoning at an answer's beginning; another parser reads the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final, final

from pagedkv.errors import ConfigurationError
from pagedkv.server.parsing.call_formats import read_hermes, read_llama, read_mistral
from pagedkv.server.parsing.call_parser import CallFormat, CallParser
from pagedkv.server.parsing.parts import (
    AnswerParser,
    IdSource,
    Part,
    PlainParser,
    ReasoningPart,
    mistral_call_id,
    openai_call_id,
)
from pagedkv.server.parsing.response_templates import ResponseTemplateParser, has_response_template

__all__ = ["MARKERS", "PARSER_NAMES", "THINK", "ReasoningParser", "end_of_open_reasoning", "parser_for", "parser_name"]

THINK: Final = ("<think>", "</think>")
MARKERS: Final = (THINK, ("[THINK]", "[/THINK]"))
"""Markers that begin and end reasoning: of most models, and of Mistral's with tokenizers of version 13."""


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


class Place(Enum):
    """Where in the answer the parser is."""

    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


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
        self._end = end
        self._starts_inside = starts_inside
        self._place = Place.BEFORE
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain now. O(text)."""
        if self._place is Place.AFTER:
            return self._inner.feed(text)
        self._held += text
        if self._place is Place.BEFORE:
            begun = self._held.lstrip()
            if len(begun) < len(self._start) and self._start.startswith(begun):
                return []
            self._leave_beginning()
        return self._inside() if self._place is Place.INSIDE else self._inner.feed(self._take(len(self._held)))

    def finish(self) -> list[Part]:
        """Return the remaining parts, now that no text follows."""
        if self._place is Place.BEFORE:
            self._leave_beginning()
        text = self._take(len(self._held))
        if self._place is Place.AFTER:
            return [*self._inner.feed(text), *self._inner.finish()]
        return [*([ReasoningPart(text)] if text else []), *self._inner.finish()]

    def _leave_beginning(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._start):
            self._held = begun[len(self._start) :]
            self._place = Place.INSIDE
        else:
            self._place = Place.INSIDE if self._starts_inside else Place.AFTER

    def _inside(self) -> list[Part]:
        place = self._held.find(self._end)
        if place < 0:
            text = self._take(self._num_certain())
            return [ReasoningPart(text)] if text else []
        text = self._take(place)
        self._take(len(self._end))
        self._place = Place.AFTER
        return [*([ReasoningPart(text)] if text else []), *self._inner.feed(self._take(len(self._held)))]

    def _num_certain(self) -> int:
        """Count the characters that cannot begin the last marker."""
        place = self._held.rfind(self._end[0])
        return place if place >= 0 and self._end.startswith(self._held[place:]) else len(self._held)

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


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
