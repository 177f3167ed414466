"""Grammars of forced tool calls, in the formats of pagedkv.server.parsing.

Each format is a rule of llguidance's Lark dialect. A call is a JSON object whose name is fixed and whose arguments
follow the tool's schema.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from pagedkv.errors import RequestError

__all__ = ["as_literal", "call_rules", "is_token"]

Functions: TypeAlias = Sequence[Mapping[str, Any]]
Marker: TypeAlias = Callable[[str], str]
"""Writes a marker as a terminal: the id of a special token, or a literal text."""
Schema: TypeAlias = Callable[[Mapping[str, Any]], str]
"""Writes a JSON schema as a terminal."""


def call_rules(
    tools: Sequence[Mapping[str, Any]], parser_name: str, marker: Marker, schema: Schema, *, several: bool
) -> str:
    """Write the rule ``answer`` of an answer that consists of calls.

    Args:
        tools: offered functions, at least one, as OpenAI's requests have them.
        parser_name: the parser that will read the answer.
        marker: writes a marker.
        schema: writes a schema.
        several: whether the answer may have more than one call.

    Raises:
        RequestError: no format has this name.
    """
    if parser_name not in FORMATS:
        raise RequestError(
            f"a tool call cannot be forced with the tool parser {parser_name!r}; it can with {', '.join(FORMATS)}"
        )
    write, between = FORMATS[parser_name]
    return write(
        [tool["function"] for tool in tools], marker, schema, f" ({as_literal(between)} call)*" if several else ""
    )


def as_literal(text: str) -> str:
    """Write a text as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def is_token(terminal: str) -> bool:
    """Return whether a terminal is the id of a token."""
    return terminal.startswith("<[")


def _hermes(functions: Functions, marker: Marker, schema: Schema, more: str) -> str:
    begin, end = marker("<tool_call>"), marker("</tool_call>")
    return f'answer: call{more}\ncall: {begin} "\\n" ({_objects(functions, "arguments", schema)}) "\\n" {end}\n'


def _llama(functions: Functions, _marker: Marker, schema: Schema, more: str) -> str:
    return f"answer: call{more}\ncall: {_objects(functions, 'parameters', schema)}\n"


def _mistral(functions: Functions, marker: Marker, schema: Schema, more: str) -> str:
    """Write names with ``[ARGS]`` where the tokenizer has it as a token, else an array."""
    begin, arguments = marker("[TOOL_CALLS]"), marker("[ARGS]")
    if is_token(arguments):
        calls = " | ".join(
            f"{as_literal(function['name'])} {arguments} {schema(_parameters(function))}" for function in functions
        )
        return f"answer: call{'+' if more else ''}\ncall: {begin} ({calls})\n"
    return f'answer: {begin} "[" call{more} "]"\ncall: {_objects(functions, "arguments", schema)}\n'


FORMATS: Final = {"hermes": (_hermes, "\n"), "llama": (_llama, "; "), "mistral": (_mistral, ", ")}
"""The rule of each format, and the text between two calls."""


def _objects(functions: Functions, arguments_key: str, schema: Schema) -> str:
    """Write objects that call one of these functions. Each schema is a terminal of its own, so references resolve."""
    return " | ".join(
        f"""{as_literal(f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{arguments_key}": ')} """
        f"""{schema(_parameters(function))} "}}\""""
        for function in functions
    )


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(function.get("parameters") or {})}
