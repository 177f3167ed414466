"""Calls as Mistral's models write them, by mistral-common's tokenizers.

::

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]            versions 2 and 3
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}        version 13
    [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}                  version 11
    [TOOL_CALLS]get_weather{"city": "Paris"}                                          where special tokens are left out

Identities that the model writes are dropped: each call gets one that is unique.
"""

from typing import Final

from pagedkv.serving.server.parsing.call_parser import CallReader, Steps

__all__ = ["read_mistral"]

MARKER: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
NAME_SIGNS: Final = "_-.:/"


def read_mistral(reader: CallReader) -> Steps[None]:
    """Read an answer in this format to its end."""
    while (yield from reader.read_text("[")):
        if (yield from reader.read_marker(MARKER)) is None or not (yield from reader.read_blanks()):
            reader.release()
        elif reader.char == "[":
            yield from read_array(reader)
        elif reader.char == "{":
            yield from reader.read_call()
        else:
            yield from read_named(reader)


def read_array(reader: CallReader) -> Steps[None]:
    """Read calls between brackets; the opening one comes next. What follows the last call's object is held or text."""
    reader.hold()
    while (yield from reader.read_blanks()) and reader.char == "{":
        is_call = yield from reader.read_call()
        if not (yield from reader.read_blanks()) or reader.char not in ",]":
            break
        if reader.hold() == "]":
            if is_call:
                reader.drop()
            break
    reader.release()


def read_named(reader: CallReader) -> Steps[None]:
    """Read a name and its arguments; the name's first character comes next."""
    name = yield from _read_word(reader)
    if not name or not (yield from reader.read_blanks()):
        reader.release()
        return
    if reader.char == "[":
        marker = yield from reader.read_marker(ARGUMENTS, CALL_ID)
        if marker == CALL_ID:
            yield from _read_word(reader)
            marker = yield from reader.read_marker(ARGUMENTS)
        if marker is None or not (yield from reader.read_blanks()):
            reader.release()
            return
    if reader.char == "{":
        yield from reader.read_arguments(name)
    else:
        reader.release()


def _read_word(reader: CallReader) -> Steps[str]:
    word = ""
    while (yield from reader.has_char()) and (reader.char.isalnum() or reader.char in NAME_SIGNS):
        word += reader.hold()
    return word
