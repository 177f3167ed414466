"""What tests of parsers share: tools, parsers with counted identities, texts cut in pieces."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from pagedkv.server.parsing import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Part,
    ReasoningPart,
    TextPart,
    merged,
    parser_for,
)

NAMES = ("get_weather", "get_time", "get", "note")
NOTE: dict[str, Any] = {
    "text": {"type": "string"},
    "kind": {"enum": ["long", "short"]},
    "days": {"type": "integer"},
    "until": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": NOTE if name == "note" else {}},
        },
    }
    for name in NAMES
]


def new_parser(name: str, reasoning: str = "none", prompt: str = "") -> AnswerParser:
    """Make a parser by its name; its identities are the same each time."""
    counter = itertools.count()
    return parser_for(
        name,
        None,
        tools=TOOLS,
        reasoning=reasoning,
        id_source=lambda prefix: f"{prefix}{next(counter)}",
        prompt=prompt,
    )


def parse(parser: AnswerParser, pieces: Iterable[str]) -> list[Part]:
    """Feed pieces and finish; the merged parts."""
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.finish()])


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    """Cut a text at these places."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def content(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def reasoning_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ReasoningPart))


def calls(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """List the calls: name and arguments."""
    found: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == len(found)
            found.append((part.name, ""))
        elif isinstance(part, CallArguments):
            assert part.index == len(found) - 1
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return found
