"""What an answer's text says, parsed while it streams: content, reasoning, tool calls. No HTTP and no engine.

::

    choosing                      which parser reads a model's answers
    reasoning                     splits reasoning off, in front of another parser
    hermes | llama | mistral      formats of calls
    call_parser                   runs a format over text that comes in pieces
    call_object                   one JSON object that may be a call
    json_scanner                  whether characters continue a JSON text
    response_templates            the parser that a tokenizer of transformers carries
    plain                         text alone
    parts, call_ids               values

For every parser, the merged parts depend on the text alone, not on how it is cut, and what is no call is text.
"""

from pagedkv.serving.server.parsing.call_ids import IdSource
from pagedkv.serving.server.parsing.choosing import PARSER_NAMES, parser_for, parser_name
from pagedkv.serving.server.parsing.parts import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Part,
    ReasoningPart,
    TextPart,
    merged,
)
from pagedkv.serving.server.parsing.plain import PlainParser
from pagedkv.serving.server.parsing.reasoning import end_of_open_reasoning

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
