"""Calls as a list of Python.

Llama 3.2 and 4 write them so, by their model cards, and models that are told to::

    [get_weather(city="Paris", days=3), get_time()]

Such a list is a call at the answer's beginning alone, with names of offered tools, keywords and literals. Each call is
returned whole once its parenthesis closes.
"""

import ast
import json
import warnings
from typing import Any, Final

from pagedkv.server.parsing.call_parser import CallFormat, CallReader, Steps

NO_LITERAL: Final = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
"""Errors of a text that is no literal of Python, or none that JSON can express."""
JSON_NAMES: Final = {"true": True, "false": False, "null": None}
OPENING: Final = "([{"
CLOSING: Final = ")]}"
QUOTES: Final = "\"'"


def literal_as_json(text: str) -> str:
    """Write a literal of Python as JSON; also one with JSON's own names. Raises one of NO_LITERAL."""
    return _as_json(_value(_parsed(text)))


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings(action="ignore"):  # of escapes, which are of the model
        return ast.parse(text.strip(), mode="eval").body


def _as_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # refuses lone surrogates
    return text


def _value(node: ast.expr) -> Any:  # noqa: ANN401 - any JSON
    match node:
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    key = None if node is None else ast.literal_eval(node)
    if not isinstance(key, str):
        raise ValueError("a key of a dictionary is not a text")  # noqa: TRY004 - one of NO_LITERAL like the others
    return key


def read_python(reader: CallReader) -> Steps[None]:
    """Read an answer to its end: a list of calls, or a text."""
    sign = reader.hold() if (yield from reader.read_text("", edge_starts="[")) else ""
    while sign in {"[", ","} and (yield from reader.read_blanks()) and (yield from _read_call(reader)):
        sign = reader.char if (yield from reader.read_blanks()) else ""
        if sign in {",", "]"}:
            reader.hold()
        if sign == "]":
            reader.drop()
    reader.release()
    yield from reader.read_text("")


def _read_call(reader: CallReader) -> Steps[bool]:
    """Read one call; return whether it was one. What is not a call stays held."""
    name = yield from reader.read_word()
    if name not in reader.schemas or not (yield from reader.has_char()) or reader.char != OPENING[0]:
        return False
    text = yield from _read_group(reader)
    try:
        match _parsed(f"f{text}"):
            case ast.Call(args=[], keywords=keywords) if all(each.arg for each in keywords):
                written = _as_json({str(each.arg): _value(each.value) for each in keywords})
            case _:
                return False
    except NO_LITERAL:
        return False
    reader.begin_call(name)
    reader.add_arguments(written)
    reader.end_call()
    return True


def _read_group(reader: CallReader) -> Steps[str]:
    """Hold and return a text up to the bracket that closes its first one; quoted brackets do not count."""
    text, depth, quote = "", 0, ""
    while (yield from reader.has_char()):
        char = reader.hold()
        text += char
        if quote:
            if char == "\\" and (yield from reader.has_char()):
                text += reader.hold()
            elif char == quote:
                quote = ""
        elif char in QUOTES:
            quote = char
        else:
            depth += (char in OPENING) - (char in CLOSING)
            if depth == 0:
                break
    return text


PYTHON_FORMAT: Final = CallFormat(read_python, None)
