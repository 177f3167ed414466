"""CallParser: finds tool calls in a streamed answer, in one of several formats.

A format is a generator over a :class:`CallReader`. It reads the text character by character, never goes back, and
yields whenever the next character has not arrived yet. So the parts depend on the text alone, not on how it is cut.

Each character that was read is in one of three places::

    written    text, or part of a call: returned by the next feed
    held       a marker or an object so far: dropped if it becomes a call, else released as text
    blanks     white space at the answer's beginning or after a call: dropped before a call or the end, else kept as
    text

JSON objects that may call a tool are read by character; the name is certain before any argument is returned. A
JsonScanner checks, character by character, whether a text is JSON (RFC 8259). One difference from the RFC: control
characters are accepted inside strings, since models write line breaks there. :func:`as_json_character` writes them as
escapes.

The states of a scanner::

    value -> string | number | literal | first_value ([) | first_key ({)
    first_key -> string -> colon -> value
    after -> , -> key or value;  } or ] -> after the enclosing value, or done
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol, TypeAlias, TypeVar, final

from pagedkv.server.parsing.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    IdSource,
    Part,
    ReasoningPart,
    TextPart,
    begun_marker,
    merged,
    openai_call_id,
)

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Runs until it needs a character that has not arrived, and continues once there is one or the answer has ended."""
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Names of offered tools, and the schemas of their arguments."""
Functions: TypeAlias = Sequence[Mapping[str, Any]]
"""Offered functions, as OpenAI's requests have them."""
Marker: TypeAlias = Callable[[str], str]
"""Writes a marker as a terminal of a grammar: the id of a special token, or a literal text."""
SchemaRule: TypeAlias = Callable[[Mapping[str, Any]], str]
"""Writes a JSON schema as a terminal of a grammar."""
BLANKS: Final = " \t\n\r"
NAME_SIGNS: Final = "_-.:/"


class CallJson(Protocol):
    """A JSON object that may call a tool, while it is read."""

    name: str | None
    is_refused: bool

    @property
    def begins(self) -> bool:
        """Whether this is certainly a call of the tool ``name``."""
        ...

    @property
    def has_all_arguments(self) -> bool:
        """Whether the arguments are complete."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        ...

    def push(self, char: str) -> bool:
        """Take one character; return whether it continues the object."""
        ...

    def push_run(self, text: str, place: int) -> int:
        """Take plain characters of a string in the arguments, from ``place`` on; return the end of the run."""
        ...

    def take_arguments(self) -> str:
        """Return the arguments' JSON text since the last call of this method."""
        ...


@final
class CallReader:
    """The text of an answer so far, and the parts that were found in it.

    Args:
        schemas: the offered tools.
        new_call_id: makes a unique identity for a call.
    """

    def __init__(self, schemas: Schemas, new_call_id: Callable[[], str]) -> None:
        self.schemas = schemas
        self._new_call_id = new_call_id
        self._text = ""
        self._place = 0
        self._is_over = False
        self._held: list[str] = []
        self._blanks: list[str] = []
        self._parts: list[Part] = []
        self.num_calls = 0
        self.is_at_edge = True
        """Whether only white space was read since the answer's beginning or the last call."""

    # The text

    def add(self, text: str) -> None:
        """Append text that has arrived."""
        self._text = self._text[self._place :] + text
        self._place = 0

    def close(self) -> None:
        """Record that no more text follows."""
        self._is_over = True

    def has_char(self) -> Steps[bool]:
        """Wait for a character; return False if the answer has ended."""
        while self._place == len(self._text):
            if self._is_over:
                return False
            yield
        return True

    @property
    def char(self) -> str:
        """The next character, which :meth:`has_char` waited for."""
        return self._text[self._place]

    # Reading

    def read_text(self, starts: str, edge_starts: str = "") -> Steps[bool]:
        """Read text up to a character of ``starts``, or at an edge of ``edge_starts``; False: the answer has ended."""
        while (yield from self.has_char()):
            char = self.char
            if char in starts or (self.is_at_edge and char in edge_starts):
                return True
            if self.is_at_edge and char in BLANKS:
                self.keep_as_blank()
                continue
            places = [self._text.find(start, self._place) for start in starts]
            end = min((place for place in places if place >= 0), default=len(self._text))
            self.write(self._text[self._place : end])
            self._place = end
        return False

    def read_marker(self, *markers: str) -> Steps[str | None]:
        """Hold and return one of these markers; None where the text differs, with its common beginning held.

        A marker's first character must occur only once in it, so that held text contains no beginning of another one.
        """
        read = ""
        while (yield from self.has_char()):
            read += self.char
            if not any(marker.startswith(read) for marker in markers):
                return None
            self.hold()
            if read in markers:
                return read
        return None

    def read_word(self) -> Steps[str]:
        """Hold and return letters, digits and the signs of names."""
        word = ""
        while (yield from self.has_char()) and (self.char.isalnum() or self.char in NAME_SIGNS):
            word += self.hold()
        return word

    def read_piece(self, *markers: str) -> Steps[tuple[str, str | None]]:
        """Read the text before one of these markers, as far as it has arrived.

        Returns:
            the text, and the marker, which is read; None: the marker has not arrived, or the answer has ended.
        """
        while True:
            places = [(place, marker) for marker in markers if (place := self._text.find(marker, self._place)) >= 0]
            start = self._place
            if places:
                place, marker = min(places)
                self._place = place + len(marker)
                return self._text[start:place], marker
            rest = self._text[start:]
            held = 0 if self._is_over else max(len(begun_marker(marker, rest)) for marker in markers)
            if held < len(rest) or self._is_over:
                self._place = len(self._text) - held
                return rest[: len(rest) - held], None
            yield

    def read_whole(self, *markers: str) -> Steps[tuple[str, str | None]]:
        """Read the whole text before one of these markers; return as :meth:`read_piece`, None at the answer's end."""
        text, marker = yield from self.read_piece(*markers)
        while marker is None and (yield from self.has_char()):
            piece, marker = yield from self.read_piece(*markers)
            text += piece
        return text, marker

    def read_blanks(self) -> Steps[bool]:
        """Hold white space; return whether a character follows."""
        while (yield from self.has_char()):
            if self.char not in BLANKS:
                return True
            self.hold()
        return False

    def read_call(self) -> Steps[bool]:
        """Read a JSON object with a name and arguments; return whether it was a call. Held text becomes part of it."""
        return (yield from self._read_call(CallObject(self.schemas)))

    def read_arguments(self, name: str, call_id: str | None = None) -> Steps[bool]:
        """Read the arguments of a call by this name; return whether it was a call. Held text becomes part of it.

        Args:
            name: of the tool.
            call_id: identity of the call; None: a new one.
        """
        return (yield from self._read_call(ArgumentsObject(name, self.schemas), call_id))

    def _read_call(self, found: CallJson, call_id: str | None = None) -> Steps[bool]:
        has_begun = False
        is_ended = False
        while not found.is_done and (yield from self.has_char()):
            if not self._push(found):
                break
            if not has_begun and found.is_refused:
                self.release()
            if not has_begun and found.begins:
                assert found.name is not None, "a call begins without a name"
                self.begin_call(found.name, call_id)
                has_begun = True
            if has_begun and not is_ended:
                self.drop()
                self.add_arguments(found.take_arguments())
                is_ended = found.has_all_arguments
                if is_ended:
                    self.end_call()
        if not has_begun:
            self.release()
            return False
        if not is_ended:
            self.end_call()
        elif found.is_done:
            self.drop()
        else:
            self.release()
        return True

    def _push(self, found: CallJson) -> bool:
        """Hold the next character, or a run of plain ones, if the object accepts it; return whether it does."""
        end = found.push_run(self._text, self._place)
        if end == self._place:
            if not found.push(self.char):
                return False
            end += 1
        self._held.append(self._text[self._place : end])
        self._place = end
        return True

    # Where characters go

    def hold(self) -> str:
        """Read the next character, and hold it."""
        char = self.char
        self._held.append(char)
        self._place += 1
        return char

    def keep_as_blank(self) -> None:
        """Read the next character as white space at an edge."""
        self._blanks.append(self.char)
        self._place += 1

    def release(self, keep: int = 0) -> None:
        """Write held text as text, except its last ``keep`` characters."""
        held = "".join(self._held)
        self.write(held[: len(held) - keep])
        self._held = [held[len(held) - keep :]] if keep else []

    def drop(self) -> None:
        """Drop held text: it is part of a call."""
        self._held.clear()

    def take(self) -> list[Part]:
        """Return the parts found since the last call of this method."""
        parts = merged(self._parts)
        self._parts.clear()
        return parts

    def finish(self) -> None:
        """Write the remaining held text, now that the answer has ended."""
        self.release()
        if not self.num_calls:
            self._write_blanks()

    def write(self, text: str) -> None:
        """Write text."""
        if text:
            self._write_blanks()
            self.is_at_edge = False
            self._parts.append(TextPart(text))

    def write_thought(self, text: str) -> None:
        """Write reasoning."""
        self._parts.append(ReasoningPart(text))

    def _write_blanks(self) -> None:
        if self._blanks:
            self._parts.append(TextPart("".join(self._blanks)))
            self._blanks.clear()

    # Calls

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call of an offered tool; held text is part of it. Arguments as of :meth:`read_arguments`."""
        self.drop()
        self._blanks.clear()
        self._parts.append(CallBegin(self.num_calls, call_id or self._new_call_id(), name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Write a piece of the last call's arguments."""
        self._parts.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """End the last call."""
        self._parts.append(CallEnd(self.num_calls - 1))
        self.is_at_edge = True


class WriteRules(Protocol):
    """Writes the rule ``answer`` of an answer that consists of calls, in llguidance's Lark dialect."""

    def __call__(self, functions: Functions, marker: Marker, schema: SchemaRule, /, *, several: bool) -> str:
        """Write the rule.

        Args:
            functions: that may be called, at least one.
            marker: writes a marker.
            schema: writes a schema.
            several: whether there may be more than one call.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: one definition for the parser of an answer and for the grammar of forced calls.

    Args:
        read: reads an answer to its end.
        rules: of forced calls; None: calls of this format cannot be forced.
        template_markers: a chat template with all texts of one of them uses this format; none: it is taken by its name
            alone.
        new_call_id: makes the identity of a call.
        preamble: writes the rule of what stands before a constrained answer; None: nothing does.
    """

    read: Callable[[CallReader], Steps[None]]
    rules: WriteRules | None
    template_markers: tuple[tuple[str, ...], ...] = ()
    new_call_id: Callable[[IdSource], str] = openai_call_id
    preamble: Callable[[Marker], str] | None = None


@final
class CallParser:
    """Parses the calls and the text of one answer.

    A call begins once its name is complete and offered; its arguments stream from then on. Invalid JSON before that is
    text. JSON that becomes invalid within the arguments ends the call there, and the rest is text.

    Args:
        call_format: the model's format of calls.
        schemas: the offered tools.
        id_source: returns a new unique identity that begins with the given prefix.

    The cost is O(text): for a piece of four characters about 5 us in text and in strings, 26 us in other JSON.
    """

    def __init__(self, call_format: CallFormat, schemas: Schemas, id_source: IdSource) -> None:
        self._reader = CallReader(schemas, lambda: call_format.new_call_id(id_source))
        self._steps = call_format.read(self._reader)
        next(self._steps, None)

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain now."""
        self._reader.add(text)
        next(self._steps, None)
        return self._reader.take()

    def finish(self) -> list[Part]:
        """Return the remaining parts, now that no text follows."""
        self._reader.close()
        next(self._steps, None)
        self._reader.finish()
        return self._reader.take()


LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
ESCAPES: Final = frozenset('"\\/bfnrt')
HEX_DIGITS: Final = frozenset("0123456789abcdefABCDEF")
NUM_HEX_DIGITS: Final = 4
DIGITS: Final = "0123456789"
PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
NUMBER_STEPS: Final = {
    "minus": {"0": "zero", "1-9": "digits"},
    "zero": {".": "point", "e": "exponent"},
    "digits": {"0": "digits", "1-9": "digits", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1-9": "fraction"},
    "fraction": {"0": "fraction", "1-9": "fraction", "e": "exponent"},
    "exponent": {"+": "sign", "0": "power", "1-9": "power"},
    "sign": {"0": "power", "1-9": "power"},
    "power": {"0": "power", "1-9": "power"},
}
NUMBER_ENDS: Final = frozenset({"zero", "digits", "fraction", "power"})
NAME_KEY: Final = "name"
ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})


class State(Enum):
    """What a scanner expects next."""

    VALUE = auto()
    FIRST_VALUE = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    UNICODE = auto()
    LITERAL = auto()
    NUMBER = auto()
    DONE = auto()


@final
class JsonScanner:
    """Accepts the characters of one JSON text.

    Attributes:
        depth: number of open objects and arrays.
    """

    __slots__ = ("_is_key", "_open", "_rest", "_state")

    def __init__(self) -> None:
        self._state = State.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._rest = ""  # rest of a literal; hexadecimal digits of an escape so far; step of a number

    @property
    def depth(self) -> int:
        """Number of open objects and arrays."""
        return len(self._open)

    @property
    def is_done(self) -> bool:
        """Whether the text is complete. A number at depth 0 never is, since a digit may follow."""
        return self._state is State.DONE

    @property
    def in_string(self) -> bool:
        """Whether the next character is within a string, or ends it."""
        state = self._state  # compared one by one: a set would hash, which costs a call for members of Enum
        return state is State.STRING or state is State.ESCAPE or state is State.UNICODE

    @property
    def in_key(self) -> bool:
        """Whether the latest string is a key."""
        return self._is_key

    @property
    def expects_value(self) -> bool:
        """Whether the next character, except blanks, begins a value of an object or a further value of an array."""
        return self._state is State.VALUE

    def push(self, char: str) -> bool:
        """Take one character; return whether it continues the text. A refused character changes nothing. O(1)."""
        match self._state:
            case State.STRING:
                return self._in_string(char)
            case State.ESCAPE | State.UNICODE:
                return self._in_escape(char)
            case State.LITERAL:
                return self._in_literal(char)
            case State.NUMBER:
                return self._in_number(char)
            case _:
                return self._between(char)

    def plain_end(self, text: str, place: int) -> int:
        """Return the end of the run of characters that continue the open string without ending it. Changes nothing.

        Such characters need no :meth:`push`.
        """
        if self._state is not State.STRING:
            return place
        run = PLAIN.match(text, place)
        return place if run is None else run.end()

    def _between(self, char: str) -> bool:
        state = self._state
        if char in BLANKS:
            return state is not State.DONE
        if state is State.AFTER:
            return self._after(char)
        if state is State.VALUE or (state is State.FIRST_VALUE and char != "]"):
            return self._begin_value(char)
        if state is State.COLON and char == ":":
            self._state = State.VALUE
        elif char == '"' and (state is State.KEY or state is State.FIRST_KEY):
            self._state, self._is_key = State.STRING, True
        elif (state is State.FIRST_KEY and char == "}") or state is State.FIRST_VALUE:
            self._close()
        else:
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._state, self._is_key = State.STRING, False
        elif char in "{[":
            self._open.append(char)
            self._state = State.FIRST_KEY if char == "{" else State.FIRST_VALUE
        elif char in LITERALS:
            self._state, self._rest = State.LITERAL, LITERALS[char]
        elif char == "-":
            self._state, self._rest = State.NUMBER, "minus"
        elif char in DIGITS:
            self._state, self._rest = State.NUMBER, "zero" if char == "0" else "digits"
        else:
            return False
        return True

    def _in_string(self, char: str) -> bool:
        if char == "\\":
            self._state = State.ESCAPE
        elif char == '"':
            if self._is_key:
                self._state = State.COLON
            else:
                self._end_value()
        return True

    def _in_escape(self, char: str) -> bool:
        if self._state is State.UNICODE:
            if char not in HEX_DIGITS:
                return False
            self._rest += char
            if len(self._rest) == NUM_HEX_DIGITS:
                self._state = State.STRING
            return True
        if char == "u":
            self._state, self._rest = State.UNICODE, ""
        elif char in ESCAPES:
            self._state = State.STRING
        else:
            return False
        return True

    def _in_literal(self, char: str) -> bool:
        if char != self._rest[0]:
            return False
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return True

    def _in_number(self, char: str) -> bool:
        step = NUMBER_STEPS[self._rest].get(_kind(char))
        if step is not None:
            self._rest = step
            return True
        return self._rest in NUMBER_ENDS and bool(self._open) and self._after(char)

    def _after(self, char: str) -> bool:
        opened = self._open[-1]
        if char in BLANKS:
            self._state = State.AFTER
        elif char == ",":
            self._state = State.KEY if opened == "{" else State.VALUE
        elif char == ("}" if opened == "{" else "]"):
            self._close()
        else:
            return False
        return True

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._state = State.AFTER if self._open else State.DONE


def as_json_character(char: str) -> str:
    r"""Return a character of a string as JSON text: control characters as escapes.

    >>> as_json_character("\n"), as_json_character("a")
    ('\\u000a', 'a')
    """
    return char if char >= " " else f"\\u{ord(char):04x}"


def _kind(char: str) -> str:
    if char in "123456789":
        return "1-9"
    if char in "eE":
        return "e"
    return "+" if char in "+-" else char


@final
class CallObject:
    """Reads ``{"name": ..., "arguments": {...}}`` with its keys in any order; ``parameters`` means ``arguments``.

    Other keys are ignored. An object without arguments is a call with the arguments ``{}``.

    Args:
        names: names of the offered tools.

    Attributes:
        name: name of the called tool, once it is complete.
        is_refused: whether the object is JSON but not a call: an unknown name, or arguments that are no object.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._scanner = JsonScanner()
        self._key = ""
        self._string = ""  # a string at depth 1 so far, with its escapes unresolved
        self._arguments: list[str] = []
        self._in_arguments = False
        self.name: str | None = None
        self.is_refused = False
        self.has_all_arguments = False

    @property
    def begins(self) -> bool:
        """Whether this is certainly a call of the tool ``name``."""
        return self.name is not None and not self.is_refused and (self._in_arguments or self.has_all_arguments)

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._scanner.is_done

    def push(self, char: str) -> bool:
        """Take one character; return whether it continues the object. O(1)."""
        scanner = self._scanner
        depth, was_in_string, begins_value = scanner.depth, scanner.in_string, scanner.expects_value
        if not scanner.push(char):
            return False
        if self._in_arguments:
            self._arguments.append(as_json_character(char) if was_in_string else char)
            if scanner.depth == 1 and depth > 1:
                self._in_arguments, self.has_all_arguments = False, True
        elif depth == 1:
            if was_in_string:
                self._in_string(char)
            elif scanner.in_string:
                self._string = '"'
            if begins_value and not char.isspace():
                self._begin_value(char)
        if scanner.is_done:
            self._finish()
        return True

    def push_run(self, text: str, place: int) -> int:
        """Take plain characters of a string in the arguments, from ``place`` on; return the end of the run."""
        end = self._scanner.plain_end(text, place) if self._in_arguments else place
        self._arguments.append(text[place:end])
        return end

    def take_arguments(self) -> str:
        """Return the arguments' JSON text since the last call of this method."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _in_string(self, char: str) -> None:
        self._string += char
        if self._scanner.in_string:
            return
        text = json.loads(self._string, strict=False)
        if self._scanner.in_key:
            self._key = text
        elif self._key == NAME_KEY and not self.begins:
            self.name = text
            self.is_refused = self.is_refused or text not in self._names

    def _begin_value(self, char: str) -> None:
        if self.begins:
            return
        if self._key == NAME_KEY and char != '"':
            self.is_refused = True
        elif self._key in ARGUMENT_KEYS and not self.has_all_arguments:
            if char == "{":
                self._in_arguments = True
                self._arguments.append(char)
            else:
                self.is_refused = True

    def _finish(self) -> None:
        if self.name is None:
            self.is_refused = True
        elif not self.has_all_arguments and not self.is_refused:
            self._arguments.append("{}")
            self.has_all_arguments = True


@final
class ArgumentsObject:
    """Reads the arguments of a call whose name precedes them.

    Args:
        name: the name before the arguments.
        names: names of the offered tools.

    Attributes:
        name: name of the called tool.
        is_refused: whether no such tool is offered.
    """

    def __init__(self, name: str, names: Collection[str]) -> None:
        self._scanner = JsonScanner()
        self._arguments: list[str] = []
        self.name: str | None = name
        self.is_refused = name not in names

    @property
    def begins(self) -> bool:
        """Whether this is certainly a call: true from the first brace on."""
        return not self.is_refused and self._scanner.depth > 0

    @property
    def has_all_arguments(self) -> bool:
        """Whether the arguments are complete."""
        return self._scanner.is_done

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._scanner.is_done

    def push(self, char: str) -> bool:
        """Take one character; return whether it continues the object. O(1)."""
        was_in_string = self._scanner.in_string
        if not self._scanner.push(char):
            return False
        self._arguments.append(as_json_character(char) if was_in_string else char)
        return True

    def push_run(self, text: str, place: int) -> int:
        """Take plain characters of a string in the arguments, from ``place`` on; return the end of the run."""
        end = self._scanner.plain_end(text, place)
        self._arguments.append(text[place:end])
        return end

    def take_arguments(self) -> str:
        """Return the arguments' JSON text since the last call of this method."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text


def as_literal(text: str) -> str:
    """Write a text as a terminal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def text_rule(name: str, end: str, marker: Marker, others: Sequence[str] = ()) -> str:
    """Write the rule of a text and the marker that ends it. The text has no marker, however its tokens spell one.

    Args:
        name: of the rule, in small letters.
        end: the marker.
        marker: writes it.
        others: markers that may not stand in the text either.
    """
    ending, unlike = marker(end), [*others] if marker(end) == as_literal(end) else [*others, end]
    words = "|".join(re.escape(each).replace("/", r"\/") for each in unlike)
    without = f" & ~/(?s:.*)({words})(?s:.*)/" if unlike else ""
    if ending != as_literal(end):  # one token, which no text contains
        return f"{name}: {name.upper()} {ending}\n{name.upper()}: /(?s:.*)/{without}\n"
    closing = re.escape(end).replace("/", r"\/")
    return f"{name}[lazy]: {name.upper()}\n{name.upper()}: /(?s:.*){closing}/{without}\n"


def repeated(between: str, *, several: bool) -> str:
    """Write what follows the first ``call``: further ones behind a text, if there may be several."""
    return f" ({as_literal(between)} call)*" if several else ""


def object_rules(functions: Functions, arguments_key: str, schema: SchemaRule) -> str:
    """Write objects that call one of these functions. Each schema is a terminal of its own, so references resolve."""
    return " | ".join(
        f"""{as_literal(f'{{"name": {as_literal(function["name"])}, "{arguments_key}": ')} """
        f"""{schema(parameters_of(function))} "}}\""""
        for function in functions
    )


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments."""
    return {"type": "object", **(function.get("parameters") or {})}
