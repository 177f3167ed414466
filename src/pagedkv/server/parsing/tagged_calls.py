"""Formats that write each argument between tags: as a text, or as JSON where its schema is not that of a text.

Qwen 3 Coder and Qwen 3.5, by their chat templates::

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

GLM 4.5 to 4.7, by their chat templates, of which that of 4.7 has no line breaks::

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

The arguments become a JSON object in the order in which they are written. A text is returned while it arrives, any
other value when it is complete. A call whose tags break off ends there, and the rest is text.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pagedkv.server.parsing.call_parser import (
    CallFormat,
    CallReader,
    Functions,
    Marker,
    SchemaRule,
    Steps,
    as_literal,
    parameters_of,
    repeated,
    text_rule,
)
from pagedkv.server.parsing.python_calls import NO_LITERAL, literal_as_json

CALL: Final = ("<tool_call>", "</tool_call>")
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
TAG_END: Final = ">"
BREAK: Final = "\n"


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one argument.

    Args:
        key, key_end: around its name.
        value, value_end: around its value.
        end: behind the last argument.
        is_padded: whether a line break follows the opening and precedes the closing tag of a value.
    """

    key: str
    key_end: str
    value: str
    value_end: str
    end: str
    is_padded: bool


QWEN_TAGS: Final = Tags("<parameter=", TAG_END, "", "</parameter>", FUNCTION_END, is_padded=True)
GLM_TAGS: Final = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", CALL[1], is_padded=False)


def _read_qwen(reader: CallReader) -> Steps[None]:
    is_open = False
    while (yield from reader.read_text("<")):
        is_open = is_open and reader.is_at_edge
        marker = yield from reader.read_marker(CALL[0], FUNCTION, *(CALL[1:] if is_open else ()))
        if marker == CALL[1]:
            reader.drop()
            continue
        if marker == CALL[0] and (yield from reader.read_blanks()):
            marker = yield from reader.read_marker(FUNCTION)
        if marker == FUNCTION:
            name = yield from reader.read_word()
            if (yield from reader.has_char()) and reader.char == TAG_END:
                reader.hold()
                is_open = yield from _read_arguments(reader, name, QWEN_TAGS)
        reader.release()


def _read_glm(reader: CallReader) -> Steps[None]:
    while (yield from reader.read_text("<")):
        if (yield from reader.read_marker(CALL[0])) is not None:
            yield from reader.read_blanks()
            name = yield from reader.read_word()
            if name:
                yield from _read_arguments(reader, name, GLM_TAGS)
        reader.release()


def _read_arguments(reader: CallReader, name: str, tags: Tags) -> Steps[bool]:
    """Read the arguments of a call whose name is held; return whether it was a call."""
    marker = yield from _read_tag(reader, tags)
    if marker is None:
        return False
    if name not in reader.schemas:
        reader.release()
        while marker != tags.end and (yield from reader.has_char()):
            text, marker = yield from reader.read_piece(tags.end)
            reader.write(text + (marker or ""))
        return False
    reader.begin_call(name)
    properties = reader.schemas[name].get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    between = "{"
    while marker == tags.key:
        reader.drop()
        key, marker = yield from reader.read_whole(tags.key_end)
        if marker is not None and tags.value:
            yield from reader.read_blanks()
            marker = yield from reader.read_marker(tags.value)
        if marker is None:
            break
        reader.drop()
        reader.add_arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        between = ", "
        if not (yield from _read_value(reader, schemas.get(key), tags)):
            reader.end_call()
            return True
        marker = yield from _read_tag(reader, tags)
    if marker == tags.end or not (yield from reader.has_char()):
        reader.drop()
    reader.add_arguments("{}" if between == "{" else "}")
    reader.end_call()
    return True


def _read_tag(reader: CallReader, tags: Tags) -> Steps[str | None]:
    """Hold white space and the next tag of a call; None: another text follows, or the answer has ended."""
    return (yield from reader.read_marker(tags.key, tags.end)) if (yield from reader.read_blanks()) else None


def _read_value(reader: CallReader, schema: object, tags: Tags) -> Steps[bool]:
    """Read a value up to its closing tag; False: the answer ended before."""
    types = _types(schema)
    streams = types == {"string"}
    text, marker, is_begun = "", None, not tags.is_padded
    reader.add_arguments('"' if streams else "")
    while marker is None and (yield from reader.has_char()):
        piece, marker = yield from reader.read_piece(tags.value_end)
        text += piece
        if not is_begun and text:
            text, is_begun = text.removeprefix("\n"), True
        if streams and marker is None:
            certain = text.removesuffix("\n") if tags.is_padded else text
            reader.add_arguments(json.dumps(certain, ensure_ascii=False)[1:-1])
            text = text[len(certain) :]
    if marker is None:
        return False
    text = text.removesuffix("\n") if tags.is_padded else text
    reader.add_arguments(json.dumps(text, ensure_ascii=False)[1:] if streams else _as_json(text, types))
    return True


def _types(schema: object) -> set[str]:
    """Return the types that a schema names, of its alternatives too; none: it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kind, words = schema.get("type"), schema.get("enum")
    found = {kind} if isinstance(kind, str) else {each for each in _listed(kind) if isinstance(each, str)}
    if not found and words and all(isinstance(word, str) for word in _listed(words)):
        found = {"string"}
    return found.union(*(_types(each) for name in ("anyOf", "oneOf") for each in _listed(schema.get(name))))


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_json(text: str, types: set[str]) -> str:
    """Write a value as JSON: JSON as it is, a literal of Python, which models write too, as JSON; else a text."""
    if "string" not in types or (text == "null" and "null" in types):
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            try:
                return literal_as_json(text)
            except NO_LITERAL:
                pass
        else:
            return text
    return json.dumps(text, ensure_ascii=False)


def _qwen_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    def argument(name: str, value: str) -> str:
        return f'{as_literal(QWEN_TAGS.key + name + TAG_END + BREAK)} {value} "\\n"'

    closing, end = as_literal(BREAK + QWEN_TAGS.value_end), as_literal(FUNCTION_END + BREAK)
    calls = " | ".join(
        f"{as_literal(BREAK + FUNCTION + function['name'] + TAG_END + BREAK)} "
        f"{_argument_rules(function, argument, schema, closing)}{end}"
        for function in functions
    )
    return _rules(calls, marker, QWEN_TAGS, several=several)


def _glm_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    tags = GLM_TAGS
    key, key_end, opening, closing = map(marker, (tags.key, tags.key_end, tags.value, tags.value_end))

    def argument(name: str, value: str) -> str:
        return f'{key} {as_literal(name)} {key_end} "\\n" {opening} {value} "\\n"'

    calls = " | ".join(
        f"{as_literal(function['name'] + BREAK)} {_argument_rules(function, argument, schema, closing)}"
        for function in functions
    )
    return _rules(calls, marker, GLM_TAGS, several=several)


def _argument_rules(
    function: Mapping[str, Any], argument: Callable[[str, str], str], schema: SchemaRule, closing: str
) -> str:
    """Write the arguments of a function in their schema's order, those that are not required as optional.

    Args:
        function: of a request.
        argument: writes one argument with its name and its value, the value's closing tag included.
        schema: writes a schema.
        closing: the tag behind a value that is no free text.
    """
    parameters = parameters_of(function)
    required = _listed(parameters.get("required"))
    shared: dict[str, Any] = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    properties = parameters.get("properties")
    rules = ""
    for name, given in properties.items() if isinstance(properties, Mapping) else ():
        of_value = given if isinstance(given, Mapping) else {}
        words = _listed(of_value.get("enum"))
        if words and all(isinstance(word, str) for word in words):
            value = f"({' | '.join(map(as_literal, words))}) {closing}"
        elif "string" in _types(of_value):
            value = "text"
        else:
            value = f"{schema({**shared, **of_value})} {closing}"
        rules += f"({argument(name, value)}){'' if name in required else '?'} "
    return rules


def _rules(calls: str, marker: Marker, tags: Tags, *, several: bool) -> str:
    begin, end = map(marker, CALL)
    more = repeated(BREAK, several=several)
    return f"answer: call{more}\ncall: {begin} ({calls}) {end}\n{text_rule('text', tags.value_end, marker)}"


QWEN_FORMAT: Final = CallFormat(_read_qwen, _qwen_rules, ((FUNCTION,),))
GLM_FORMAT: Final = CallFormat(_read_glm, _glm_rules, ((GLM_TAGS.key,),))
