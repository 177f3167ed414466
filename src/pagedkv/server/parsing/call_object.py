"""JSON objects that may call a tool, read by character. The name is certain before any argument is returned.

A JsonScanner checks, character by character, whether a text is JSON (RFC 8259). One difference from the RFC: control
characters are accepted inside strings, since models write line breaks there. :func:`as_json_character` writes them as
escapes.

The states of a scanner::

    value -> string | number | literal | first_value ([) | first_key ({)
    first_key -> string -> colon -> value
    after -> , -> key or value;  } or ] -> after the enclosing value, or done
"""

import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Final, Protocol, final

__all__ = ["ArgumentsObject", "CallJson", "CallObject", "JsonScanner", "as_json_character"]

BLANKS: Final = " \t\n\r"
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
