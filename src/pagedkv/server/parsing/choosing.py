"""Chooses the parser of a model's answers: by vLLM's names, or by the markers in its tokenizer's chat template.

A :class:`ReasoningParser` splits off the reasoning at an answer's beginning; another parser reads the rest: calls in
one of the formats, or a response template of transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pagedkv.errors import ConfigurationError
from pagedkv.server.parsing.call_parser import CallFormat, CallParser
from pagedkv.server.parsing.harmony import HARMONY_FORMAT
from pagedkv.server.parsing.json_calls import (
    DEEPSEEK_V3_FORMAT,
    DEEPSEEK_V31_FORMAT,
    GRANITE_FORMAT,
    HERMES_FORMAT,
    KIMI_FORMAT,
    LLAMA_FORMAT,
    MISTRAL_FORMAT,
)
from pagedkv.server.parsing.parts import (
    AnswerParser,
    EndOfThoughts,
    IdSource,
    Part,
    PlainParser,
    ReasoningPart,
    openai_call_id,
)
from pagedkv.server.parsing.python_calls import PYTHON_FORMAT
from pagedkv.server.parsing.response_templates import ResponseTemplateParser, has_response_template
from pagedkv.server.parsing.tagged_calls import GLM_FORMAT, QWEN_FORMAT

FORMATS: Final[Mapping[str, CallFormat]] = {
    "glm45": GLM_FORMAT,
    "qwen3_coder": QWEN_FORMAT,
    "deepseek_v3": DEEPSEEK_V3_FORMAT,
    "deepseek_v31": DEEPSEEK_V31_FORMAT,
    "kimi_k2": KIMI_FORMAT,
    "openai": HARMONY_FORMAT,
    "granite": GRANITE_FORMAT,
    "hermes": HERMES_FORMAT,
    "mistral": MISTRAL_FORMAT,
    "llama3_json": LLAMA_FORMAT,
    "pythonic": PYTHON_FORMAT,
}
"""The formats of calls, in the order in which a chat template is searched for their markers."""
OTHER_NAMES: Final[Mapping[str, str]] = {
    "glm47": "glm45",
    "qwen3_xml": "qwen3_coder",
    "qwen3_json": "hermes",
    "llama4_json": "llama3_json",
}
"""Further names of vLLM for these formats."""
TEMPLATE: Final = "hf"
"""The response template of the tokenizer."""
PARSER_NAMES: Final = ("auto", TEMPLATE, *FORMATS, *OTHER_NAMES, "none")


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """The markers around reasoning.

    Args:
        start: begins it. Its first character occurs in it once.
        end: ends it; likewise.
        is_begun: whether each answer begins within reasoning, whatever the prompt's end is.
    """

    start: str
    end: str
    is_begun: bool = False


THINK: Final = ThoughtMarkers("<think>", "</think>")
BEGUN: Final = ThoughtMarkers("<think>", "</think>", is_begun=True)
BRACKETS: Final = ThoughtMarkers("[THINK]", "[/THINK]")
MARKERS: Final = (THINK, BRACKETS)
"""Markers that are known by a chat template that has them."""
REASONING: Final[Mapping[str, ThoughtMarkers]] = {
    "deepseek_r1": BEGUN,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "granite": ThoughtMarkers("Here is my thought process:", "Here is my response:"),
    "kimi_k2": THINK,
    "minimax_m2": BEGUN,
    "mistral": BRACKETS,
    "qwen3": THINK,
    "seed_oss": ThoughtMarkers("<seed:think>", "</seed:think>"),
    "step3": BEGUN,
}
HARMONY: Final = "openai_gptoss"
REASONING_NAMES: Final = ("auto", "think", TEMPLATE, *REASONING, HARMONY, "none")


@final
class ReasoningParser:
    """Splits reasoning from the rest of one answer.

    Reasoning begins at the answer's start, after white space, or has begun before it (``starts_inside``); then the
    first marker may be absent. Later markers are text, since a text or an argument may contain them. Reasoning without
    an end marker extends to the answer's end.

    Args:
        inner: parses what follows the reasoning.
        markers: around it.
        starts_inside: whether the answer begins within it.
    """

    def __init__(self, inner: AnswerParser, markers: ThoughtMarkers = THINK, *, starts_inside: bool = False) -> None:
        self._inner = inner
        self._start = markers.start
        self._thoughts = EndOfThoughts(markers.end)
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


def end_of_open_reasoning(
    name: str | None,
    reasoning: str | None,
    tokenizer: object,
    beginning: str,
) -> str | None:
    """Return the marker that ends the reasoning in which an answer begins; None where it begins in none.

    Args:
        name, reasoning, tokenizer: as of :func:`parser_for`.
        beginning: the end of the prompt's text, special tokens included.
    """
    if _uses_template(name, reasoning, tokenizer):
        return next((each.end for each in MARKERS if _is_inside(each, beginning)), None)
    markers = _thought_markers(reasoning, tokenizer)
    return markers.end if markers is not None and _is_inside(markers, beginning) else None


def parser_name(name: str | None, tokenizer: object) -> str:
    """Return the name of the format of calls: the given one; for ``auto``, ``hf`` and None, that of the chat template.

    Returns:
        one of :data:`FORMATS`, or ``none`` where the template has no known format.

    Raises:
        ConfigurationError: the name is unknown, or is ``hf`` and the tokenizer has no response template.
    """
    if name is not None and name not in PARSER_NAMES:
        raise ConfigurationError(f"there is no tool parser {name!r}; there are {', '.join(PARSER_NAMES)}")
    if name == TEMPLATE and not has_response_template(tokenizer):
        raise ConfigurationError("the tool parser hf needs a tokenizer with a response template: this one has none")
    if name not in {None, "auto", TEMPLATE}:
        return OTHER_NAMES.get(str(name), str(name))
    template = _tool_template(tokenizer)
    for known, each in FORMATS.items():
        if any(all(text in template for text in texts) for texts in each.template_markers):
            return known
    return "none"


def require_reasoning_parser(name: str | None) -> None:
    """Refuse an unknown name. Raises ConfigurationError."""
    if name is not None and name not in REASONING_NAMES:
        raise ConfigurationError(f"there is no reasoning parser {name!r}; there are {', '.join(REASONING_NAMES)}")


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
        name: the call parser: one of :data:`PARSER_NAMES`; ``auto`` or None: by the tokenizer.
        tokenizer: a tokenizer of transformers, or like it; None: there is none.
        tools: offered functions, as OpenAI's requests have them; without any, no call is found.
        reasoning: one of :data:`REASONING_NAMES`. ``think``: by the markers in the chat template, else ``<think>``;
            ``auto`` or None: ``think`` where the chat template has such markers.
        id_source: returns a new unique identity that begins with the given prefix.
        prompt: the prompt's text with special tokens; its end shows whether reasoning has begun. None: the beginning of
            an answer is taken from the chat template, at the cost of one short rendering.

    The tokenizer's response template is used with ``hf``, and with ``auto`` for both if there is one. The format of
    gpt-oss marks reasoning and calls, and so reads both if one of them has its name.

    Raises:
        ConfigurationError: the name of a parser is unknown.
    """
    require_reasoning_parser(reasoning)
    known = parser_name(name, tokenizer)
    schemas = {tool["function"]["name"]: _parameters(tool["function"]) for tool in tools}
    beginning = prompt if prompt is not None else _answer_beginning(tokenizer)
    if _uses_template(name, reasoning, tokenizer):
        return ResponseTemplateParser(tokenizer, tools, schemas, lambda: openai_call_id(id_source), beginning)
    call_format = FORMATS.get(known)
    if call_format is HARMONY_FORMAT or reasoning == HARMONY:
        return CallParser(HARMONY_FORMAT, schemas if call_format is HARMONY_FORMAT else {}, id_source)
    inner = PlainParser() if call_format is None or not schemas else CallParser(call_format, schemas, id_source)
    markers = _thought_markers(reasoning, tokenizer)
    return inner if markers is None else ReasoningParser(inner, markers, starts_inside=_is_inside(markers, beginning))


def _uses_template(name: str | None, reasoning: str | None, tokenizer: object) -> bool:
    is_asked = TEMPLATE in {name, reasoning} or {name, reasoning} <= {None, "auto"}
    return is_asked and has_response_template(tokenizer)


def _thought_markers(reasoning: str | None, tokenizer: object) -> ThoughtMarkers | None:
    if reasoning in REASONING or reasoning in {"none", HARMONY}:
        return REASONING.get(str(reasoning))
    template = _tool_template(tokenizer)
    found = next((each for each in MARKERS if each.start in template and each.end in template), None)
    return THINK if found is None and reasoning == "think" else found


def _is_inside(markers: ThoughtMarkers, beginning: str) -> bool:
    return markers.is_begun or beginning.rstrip().endswith(markers.start)


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    return parameters if isinstance(parameters, Mapping) else {}


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
