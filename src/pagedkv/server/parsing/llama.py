"""Calls as Llama 3.1 to 3.3 write them, by their model cards: JSON with ``parameters``.

::

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

An object without the marker is a call only at the answer's beginning or after another call, since text may contain
JSON. After the marker, code that is not a JSON object is text.
"""

from typing import Final

from pagedkv.server.parsing.call_parser import CallReader, Steps

__all__ = ["read_llama"]

MARKER: Final = "<|python_tag|>"
SEPARATOR: Final = ";"


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
            (yield from reader.read_marker(MARKER)) is not None
            and (yield from reader.read_blanks())
            and reader.char == "{"
        ):
            yield from reader.read_call()
        else:
            reader.release()
