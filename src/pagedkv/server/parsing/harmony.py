"""The format of gpt-oss: an answer of messages, each in a channel.

By OpenAI's guide to harmony, in one line each::

    <|channel|>analysis<|message|>Weather is asked for.<|end|><|start|>assistant
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

    <|channel|>final<|message|>It rains.<|return|>

The prompt ends with ``<|start|>assistant``. Messages of the channel ``analysis`` are reasoning, those
to a function are calls, all others are text; headers are no part of the answer. The recipient may stand in the header
behind any of its markers. Text outside of messages is text.
"""

import re
from typing import Final

from pagedkv.server.parsing.call_parser import (
    CallFormat,
    CallReader,
    Functions,
    Marker,
    SchemaRule,
    Steps,
    as_literal,
    parameters_of,
    text_rule,
)

CHANNEL: Final = "<|channel|>"
START: Final = "<|start|>"
MESSAGE: Final = "<|message|>"
CONSTRAIN: Final = "<|constrain|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
ENDS: Final = (END, CALL, RETURN, START, CHANNEL)
"""Markers at which a message ends, also where its own end is absent."""
THOUGHTS: Final = "analysis"
RECIPIENT: Final = re.compile(r"\bto=functions\.([^\s<]+)")


def read_harmony(reader: CallReader) -> Steps[None]:
    """Read an answer to its end."""
    marker: str | None = None
    while True:
        if marker is None and not (yield from reader.has_char()):
            return
        if marker in {CHANNEL, START}:
            header, marker = yield from reader.read_whole(MESSAGE)
            if marker is not None:
                marker = yield from _read_message(reader, header)
            continue
        text, marker = yield from reader.read_piece(*ENDS, MESSAGE)
        reader.write(text)


def _read_message(reader: CallReader, header: str) -> Steps[str | None]:
    """Read the content of a message; return the marker that ended it, None at the answer's end."""
    recipient = RECIPIENT.search(header)
    name = "" if recipient is None else recipient[1]
    if name in reader.schemas and (yield from reader.read_blanks()):
        if reader.char == "{":
            yield from reader.read_arguments(name)
        reader.release()
    is_thought = not name and header.rpartition(CHANNEL)[2].strip().startswith(THOUGHTS)
    write = reader.write_thought if is_thought else reader.write
    marker = None
    while marker is None and (yield from reader.has_char()):
        text, marker = yield from reader.read_piece(*ENDS)
        write(text)
    return marker


def _call_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:  # noqa: ARG001 - a call ends the answer
    calls = " | ".join(
        f"{as_literal('commentary to=functions.' + function['name'] + ' ')} {marker(CONSTRAIN)} "
        f'"json" {marker(MESSAGE)} {schema(parameters_of(function))}'
        for function in functions
    )
    return f"answer: thoughts? {marker(CHANNEL)} ({calls})\n{_thought_rules(marker)}"


def _final_rules(marker: Marker) -> str:
    return f'preamble: thoughts? {marker(CHANNEL)} "final" {marker(MESSAGE)}\n{_thought_rules(marker)}'


def _thought_rules(marker: Marker) -> str:
    opening = f'{marker(CHANNEL)} "{THOUGHTS}" {marker(MESSAGE)}'
    others = [each for each in ENDS if each != END]
    return f'thoughts: {opening} thought {marker(START)} "assistant"\n{text_rule("thought", END, marker, others)}'


HARMONY_FORMAT: Final = CallFormat(read_harmony, _call_rules, ((CHANNEL,),), preamble=_final_rules)
