"""The formats of calls, one after the other. Calls as Hermes 2 Pro and Qwen 2.5 and 3 write them, by their model cards.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The closing marker may be absent. White space around a call belongs to the format.

Calls as Llama 3.1 to 3.3 write them, by their model cards: JSON with ``parameters``.

::

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

An object without the marker is a call only at the answer's beginning or after another call, since text may contain
JSON. After the marker, code that is not a JSON object is text.

Calls as Mistral's models write them, by mistral-common's tokenizers.

::

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]            versions 2 and 3
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}        version 13
    [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}                  version 11
    [TOOL_CALLS]get_weather{"city": "Paris"}                                          special tokens left out

Identities that the model writes are dropped: each call gets a unique one.
"""

from typing import Final

from pagedkv.server.parsing.call_parser import CallReader, Steps

__all__ = ["read_hermes", "read_llama", "read_mistral"]

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"

LLAMA_MARKER: Final = "<|python_tag|>"
SEPARATOR: Final = ";"
MISTRAL_MARKER: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
NAME_SIGNS: Final = "_-.:/"


def read_hermes(reader: CallReader) -> Steps[None]:
    """Read an answer in this format to its end."""
    is_open = False
    while (yield from reader.read_text("<")):
        is_open = is_open and reader.is_at_edge
        marker = yield from reader.read_marker(*((BEGIN, END) if is_open else (BEGIN,)))
        if marker == END:
            reader.drop()
            is_open = False
        elif marker == BEGIN and (yield from reader.read_blanks()) and reader.char == "{":
            is_open = yield from reader.read_call()
        else:
            reader.release()


def read_llama(reader: CallReader) -> Steps[None]:
    """Read an answer in this format to its end."""
    num_separated = 0
    while (yield from reader.read_text("<", edge_starts="{" + SEPARATOR)):
        if reader.char == SEPARATOR:
            if reader.num_calls > num_separated:
                num_separated = reader.num_calls
                reader.keep_as_blank()
            else:
                reader.hold()
                reader.release()
        elif reader.char == "{" or (
            (yield from reader.read_marker(LLAMA_MARKER)) is not None
            and (yield from reader.read_blanks())
            and reader.char == "{"
        ):
            yield from reader.read_call()
        else:
            reader.release()


def read_mistral(reader: CallReader) -> Steps[None]:
    """Read an answer in this format to its end."""
    while (yield from reader.read_text("[")):
        is_marked = (yield from reader.read_marker(MISTRAL_MARKER)) is not None
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
    if (yield from reader.has_char()) and reader.char == MISTRAL_MARKER[1]:
        return _is_again(reader, (yield from reader.read_marker(MISTRAL_MARKER[1:])) is not None)
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
        marker = yield from reader.read_marker(ARGUMENTS, CALL_ID, MISTRAL_MARKER)
        if marker == CALL_ID:
            yield from _read_word(reader)
            marker = yield from reader.read_marker(ARGUMENTS, MISTRAL_MARKER)
        if marker != ARGUMENTS:
            return _is_again(reader, marker == MISTRAL_MARKER)
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
        reader.release(keep=len(MISTRAL_MARKER))
    return is_marker
