"""JSON objects that may call a tool, read by character. The name is certain before any argument is returned."""

import json
from collections.abc import Collection
from typing import Final, Protocol, final

from pagedkv.server.parsing.json_scanner import JsonScanner, as_json_character

__all__ = ["ArgumentsObject", "CallJson", "CallObject"]

NAME_KEY: Final = "name"
ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})


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
