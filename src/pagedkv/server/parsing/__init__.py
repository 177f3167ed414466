"""Parsers that split an answer's text into content, reasoning and tool calls while it streams. No HTTP, no engine.

::

    choosing     chooses the parser of a model's answers; splits reasoning off; formats of calls, response templates
    call_parser  runs a format over text that arrives in pieces; one JSON object that may be a call, by character
    parts        values, and the parser of text alone

For every parser, the merged parts depend on the text alone, not on how it is cut; what is not a call is text.
"""

from pagedkv.server.parsing.choosing import PARSER_NAMES, end_of_open_reasoning, parser_for, parser_name
from pagedkv.server.parsing.parts import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    EndOfThoughts,
    IdSource,
    Part,
    PlainParser,
    ReasoningPart,
    TextPart,
    merged,
)

__all__ = [
    "PARSER_NAMES",
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "EndOfThoughts",
    "IdSource",
    "Part",
    "PlainParser",
    "ReasoningPart",
    "TextPart",
    "end_of_open_reasoning",
    "merged",
    "parser_for",
    "parser_name",
]
