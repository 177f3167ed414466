"""Calls as Hermes 2 Pro and Qwen 2.5 and 3 write them, by their model cards.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The closing marker may be absent. White space around a call belongs to the format.
"""

from typing import Final

from pagedkv.server.parsing.call_parser import CallReader, Steps

__all__ = ["read_hermes"]

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


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
