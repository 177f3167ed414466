"""Parsers that split an answer's text into content, reasoning and tool calls while it streams. No HTTP, no engine.

::

    choosing                      chooses the parser of a model's answers
    reasoning                     splits reasoning off, before another parser
    hermes | llama | mistral      formats of calls
    call_parser                   runs a format over text that arrives in pieces
    call_object                   one JSON object that may be a call
    json_scanner                  checks whether characters continue a JSON text
    response_templates            the parser that a tokenizer of transformers has
    plain                         text alone
    parts, call_ids               values

For every parser, the merged parts depend on the text alone, not on how it is cut; what is not a call is text.
"""

from pagedkv.server.parsing.call_ids import IdSource
from pagedkv.server.parsing.choosing import PARSER_NAMES, parser_for, parser_name
from pagedkv.server.parsing.parts import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Part,
    ReasoningPart,
    TextPart,
    merged,
)
from pagedkv.server.parsing.plain import PlainParser
from pagedkv.server.parsing.reasoning import end_of_open_reasoning

__all__ = [
    "PARSER_NAMES",
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "CallEnd",
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
