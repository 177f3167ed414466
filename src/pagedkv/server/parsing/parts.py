"""Parts of an answer: text, reasoning and tool calls, in the order in which the model writes them; plain answers.

A call's identity has the shape that each format requires.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, final

IdSource: TypeAlias = Callable[[str], str]
"""Returns a new unique identity that begins with the given prefix."""
MISTRAL_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MISTRAL_LENGTH: Final = 9


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the answer's reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins.

    Args:
        index: place of the call in the answer, from 0.
        call_id: unique identity of the call.
        name: the whole name of an offered tool.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the pieces of one call, concatenated, are its JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A tool call ends: its arguments are complete, or the answer or its JSON was cut off."""

    index: int


Part: TypeAlias = TextPart | ReasoningPart | CallBegin | CallArguments | CallEnd


class AnswerParser(Protocol):
    """Parses one answer while it streams; the merged parts do not depend on how the text is cut."""

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain now. Text that may begin a marker is held back."""
        ...

    def finish(self) -> list[Part]:
        """Return the remaining parts, now that no text follows. Called once, after the last :meth:`feed`."""
        ...


def merged(parts: Sequence[Part]) -> list[Part]:
    """Concatenate neighbouring pieces of the same text, reasoning or call, and drop empty pieces. O(parts).

    >>> merged([TextPart("a"), TextPart("b"), CallArguments(0, ""), CallEnd(0)])
    [TextPart(text='ab'), CallEnd(index=0)]
    """
    if len(parts) <= 1:
        return [part for part in parts if isinstance(part, CallBegin | CallEnd) or part.text]
    runs: list[list[Part]] = []
    for part in parts:
        if isinstance(part, TextPart | ReasoningPart | CallArguments) and not part.text:
            continue
        if runs and _continues(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]


def _continues(before: Part, after: Part) -> bool:
    match before, after:
        case (TextPart(), TextPart()) | (ReasoningPart(), ReasoningPart()):
            return True
        case CallArguments(), CallArguments():
            return before.index == after.index
        case _:
            return False


def _joined(run: Sequence[Part]) -> Part:
    first = run[0]
    if len(run) == 1 or isinstance(first, CallBegin | CallEnd):
        return first
    text = "".join(part.text for part in run if isinstance(part, TextPart | ReasoningPart | CallArguments))
    match first:
        case TextPart():
            return TextPart(text)
        case ReasoningPart():
            return ReasoningPart(text)
        case _:
            return CallArguments(first.index, text)


def begun_marker(marker: str, text: str) -> str:
    """Return the beginning of a marker that a text ends with. The marker's first character occurs in it once."""
    begun = text.rfind(marker[0])
    return text[begun:] if begun >= 0 and marker.startswith(text[begun:]) else ""


@final
class EndOfThoughts:
    """Where the thoughts at an answer's beginning end: at the first marker in the text, however tokens spell it.

    The one automaton for parsers, which split there, and for grammars, which hold what follows.

    Args:
        marker: that ends them. Its first character occurs in it once, so a beginning of it contains no other one.

    Attributes:
        held: the beginning of the marker that the text ends with.
        is_over: whether the marker was read.
    """

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.held = ""
        self.is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        """Take more text; return that of the thoughts which is certain now, and what follows them. O(text)."""
        if self.is_over:
            return "", text
        text = self.held + text
        place = text.find(self.marker)
        if place >= 0:
            self.held, self.is_over = "", True
            return text[:place], text[place + len(self.marker) :]
        self.held = begun_marker(self.marker, text)
        return text[: len(text) - len(self.held)], ""


def openai_call_id(id_source: IdSource) -> str:
    """Make ``call_`` and 24 hexadecimal characters (96 bits) from a new identity."""
    return "call_" + hashlib.blake2b(id_source("call_").encode(), digest_size=12).hexdigest()


def mistral_call_id(id_source: IdSource) -> str:
    """Make 9 alphanumeric characters (53 bits) from a new identity: Mistral's templates refuse other identities."""
    number = int.from_bytes(hashlib.blake2b(id_source("call_").encode(), digest_size=16).digest())
    letters = []
    for _ in range(MISTRAL_LENGTH):
        number, letter = divmod(number, len(MISTRAL_LETTERS))
        letters.append(MISTRAL_LETTERS[letter])
    return "".join(letters)


@final
class PlainParser:
    """Returns all text as content, at once."""

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [TextPart(text)] if text else []

    def finish(self) -> list[Part]:
        """Return nothing: no text is held back."""
        return []
