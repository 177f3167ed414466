"""Calls as Mistral's models write them, by mistral-common's tokenizers.

::

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]            versions 2 and 3
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}        version 13
    [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}                  version 11
    [TOOL_CALLS]get_weather{"city": "Paris"}                                          special tokens left out

Identities that the model writes are dropped: each call gets a unique one.
"""

from typing import Final

from pagedkv.server.parsing.call_parser import CallReader, Steps

__all__ = ["read_mistral"]

MARKER: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
NAME_SIGNS: Final = "_-.:/"


def read_mistral(reader: CallReader) -> Steps[None]:
    """Read an answer in this format to its end."""
    while (yield from reader.read_text("[")):
        is_marked = (yield from reader.read_marker(MARKER)) is not None
        while is_marked:
            is_marked = yield from read_marked(reader)
        reader.release()


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
    if (yield from reader.has_char()) and reader.char == MARKER[1]:
        return _is_again(reader, (yield from reader.read_marker(MARKER[1:])) is not None)
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
        marker = yield from reader.read_marker(ARGUMENTS, CALL_ID, MARKER)
        if marker == CALL_ID:
            yield from _read_word(reader)
            marker = yield from reader.read_marker(ARGUMENTS, MARKER)
        if marker != ARGUMENTS:
            return _is_again(reader, marker == MARKER)
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
        reader.release(keep=len(MARKER))
    return is_marker
