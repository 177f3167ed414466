from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


Part = TextPart | ReasoningPart | CallBegin | CallArguments | CallEnd


class AnswerParser(Protocol):
    def feed(self, text: str) -> list[Part]: ...
    def finish(self) -> list[Part]: ...


class PlainParser:
    def feed(self, text):
        return [TextPart(text)] if text else []

    def finish(self):
        return []


def parser_for(name, tokenizer, *, tools, reasoning, id_source):
    return PlainParser()


__all__ = [
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Part",
    "PlainParser",
    "ReasoningPart",
    "TextPart",
    "parser_for",
]
