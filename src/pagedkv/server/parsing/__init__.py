"""Parsers that split an answer's text into content, reasoning and tool calls while it streams. No HTTP, no engine.

::

    choosing            chooses the parser of a model's answers, by name or chat template; splits reasoning off
    json_calls          formats of calls with JSON, each for parsers and for grammars
    tagged_calls        formats with a tag for each argument
    python_calls        calls as a list of Python
    harmony             the format of gpt-oss: messages in channels
    response_templates  answers by a response template of transformers
    call_parser         runs a format over text that arrives in pieces; one JSON object that may be a call, by character
    parts               values, and the parser of text alone

For every parser, the merged parts depend on the text alone, not on how it is cut; what is not a call is text.
"""

from pagedkv.server.parsing.call_parser import CallFormat, Functions
from pagedkv.server.parsing.choosing import (
    FORMATS,
    PARSER_NAMES,
    REASONING_NAMES,
    end_of_open_reasoning,
    parser_for,
    parser_name,
    require_reasoning_parser,
)
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
    "FORMATS",
    "PARSER_NAMES",
    "REASONING_NAMES",
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "CallFormat",
    "EndOfThoughts",
    "Functions",
    "IdSource",
    "Part",
    "PlainParser",
    "ReasoningPart",
    "TextPart",
    "end_of_open_reasoning",
    "merged",
    "parser_for",
    "parser_name",
    "require_reasoning_parser",
]
