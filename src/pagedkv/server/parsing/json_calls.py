"""Formats whose calls have their arguments as JSON. Each has its parser and its grammar here.

Hermes 2 Pro and Qwen 2.5 and 3 write calls as follows, by their model cards::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Llama 3.1 to 3.3 write JSON with ``parameters``, by their model cards::

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

An object without the marker is a call only at the answer's beginning or after another call, since text may contain
JSON. After the marker, code that is not a JSON object is text.

Mistral's models write one of these, by mistral-common's tokenizers::

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]            versions 2 and 3
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}        version 13
    [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}                  version 11
    [TOOL_CALLS]get_weather{"city": "Paris"}                                          special tokens left out

Granite 3, by its chat template: ``<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]``, of 3.0 and
3.1 with ``<tool_call>``. DeepSeek V3 and R1, then V3.1 in one line, by their
chat templates, in which the bars are of full width::

    <|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_weather
    ```json
    {"city": "Paris"}
    ```<|tool▁call▁end|><|tool▁calls▁end|>

    <|tool▁calls▁begin|><|tool▁call▁begin|>get_weather<|tool▁sep|>{"city": "Paris"}
    <|tool▁call▁end|><|tool▁calls▁end|>

Kimi K2, by its guide to tool calls, in one line::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
    {"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>

Closing markers may be absent. White space around a call belongs to the format. Each call gets a unique identity; of
Kimi K2 it is the one that the model writes, which its chat template writes into the next prompt.
"""

from collections.abc import Callable
from typing import Final

from pagedkv.server.parsing.call_parser import (
    CallFormat,
    CallReader,
    Functions,
    Marker,
    SchemaRule,
    Steps,
    as_literal,
    object_rules,
    parameters_of,
    repeated,
)
from pagedkv.server.parsing.parts import mistral_call_id

HERMES: Final = ("<tool_call>", "</tool_call>")
LLAMA_MARKER: Final = "<|python_tag|>"
SEPARATOR: Final = ";"
MISTRAL_MARKER: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
GRANITE_MARKER: Final = "<|tool_call|>"
BAR: Final = "\uff5c"
DEEPSEEK_SECTION: Final = (f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>")
DEEPSEEK_CALL: Final = (f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁call▁end{BAR}>")
DEEPSEEK_NAME_END: Final = f"<{BAR}tool▁sep{BAR}>"
FENCE: Final = ("```json", "```")
KIMI_SECTION: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL: Final = ("<|tool_call_begin|>", "<|tool_call_end|>")
KIMI_NAME_END: Final = "<|tool_call_argument_begin|>"
KIMI_PREFIX: Final = "functions."


def between_markers(
    calls: tuple[str, ...],
    ends: tuple[str, ...],
    read_one: Callable[[CallReader], Steps[bool]],
    *,
    sections: tuple[str, ...] = (),
) -> Callable[[CallReader], Steps[None]]:
    """Return the reader of a format that marks where each call begins.

    Args:
        calls: markers that begin a call.
        ends: markers that may follow a call, in this order, and then belong to it.
        read_one: reads what follows the marker; returns whether it was a call.
        sections: markers that may stand before the first call.
    """

    def read(reader: CallReader) -> Steps[None]:
        awaited: tuple[str, ...] = ()
        while (yield from reader.read_text("<")):
            if not reader.is_at_edge:
                awaited = ()
            marker = yield from reader.read_marker(*sections, *calls, *awaited)
            if marker in awaited:
                reader.drop()
                awaited = awaited[awaited.index(marker) + 1 :]
                continue
            while marker in sections and (yield from reader.read_blanks()):
                marker = yield from reader.read_marker(*calls)
            if marker in calls and (yield from read_one(reader)):
                awaited = ends
            else:
                reader.release()

    return read


def _read_object(reader: CallReader) -> Steps[bool]:
    return (yield from reader.read_blanks()) and reader.char == "{" and (yield from reader.read_call())


def _hermes_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    begin, end = map(marker, HERMES)
    more, objects = repeated("\n", several=several), object_rules(functions, "arguments", schema)
    return f'answer: call{more}\ncall: {begin} "\\n" ({objects}) "\\n" {end}\n'


HERMES_FORMAT: Final = CallFormat(
    between_markers(HERMES[:1], HERMES[1:], _read_object),
    _hermes_rules,
    (('<tool_call>\\n{"name"',), ("<tool_call>\n{",), ("<tool_call>{",)),
)


def _read_llama(reader: CallReader) -> Steps[None]:
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
            (yield from reader.read_marker(LLAMA_MARKER)) is not None
            and (yield from reader.read_blanks())
            and reader.char == "{"
        ):
            yield from reader.read_call()
        else:
            reader.release()


def _llama_rules(functions: Functions, _marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    more = repeated(SEPARATOR + " ", several=several)
    return f"answer: call{more}\ncall: {object_rules(functions, 'parameters', schema)}\n"


LLAMA_FORMAT: Final = CallFormat(_read_llama, _llama_rules, ((LLAMA_MARKER,), ('"parameters": ',)))


def _read_mistral(reader: CallReader) -> Steps[None]:
    while (yield from reader.read_text("[")):
        is_marked = (yield from reader.read_marker(MISTRAL_MARKER)) is not None
        while is_marked:
            is_marked = yield from _read_marked(reader)
        reader.release()


def _mistral_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    """Write names with ``[ARGS]`` where the tokenizer has it as a token, else an array."""
    begin, arguments = marker(MISTRAL_MARKER), marker(ARGUMENTS)
    if arguments != as_literal(ARGUMENTS):
        calls = " | ".join(
            f"{as_literal(function['name'])} {arguments} {schema(parameters_of(function))}" for function in functions
        )
        return f"answer: call{'+' if several else ''}\ncall: {begin} ({calls})\n"
    return _array_rules(functions, begin, schema, several=several)


def _array_rules(functions: Functions, begin: str, schema: SchemaRule, *, several: bool) -> str:
    more = repeated(", ", several=several)
    return f'answer: {begin} "[" call{more} "]"\ncall: {object_rules(functions, "arguments", schema)}\n'


def _read_marked(reader: CallReader) -> Steps[bool]:
    """Read a call after a marker; return whether another marker came instead. That marker is then held."""
    if not (yield from reader.read_blanks()):
        return False
    if reader.char == "[":
        reader.hold()
        if (yield from reader.has_char()) and reader.char == MISTRAL_MARKER[1]:
            return _is_again(reader, (yield from reader.read_marker(MISTRAL_MARKER[1:])) is not None)
        yield from _read_objects(reader)
        return False
    if reader.char == "{":
        yield from reader.read_call()
        return False
    return (yield from _read_named(reader))


def _read_objects(reader: CallReader) -> Steps[bool]:
    """Read the calls of an array, whose opening bracket is held; return whether there were any."""
    num_before = reader.num_calls
    while (yield from reader.read_blanks()) and reader.char == "{":
        is_call = yield from reader.read_call()
        if not (yield from reader.read_blanks()) or reader.char not in ",]":
            break
        if reader.hold() == "]":
            if is_call:
                reader.drop()
            break
    return reader.num_calls > num_before


def _read_named(reader: CallReader) -> Steps[bool]:
    """Read a name and its arguments; the name's first character is next. Return as :func:`_read_marked`."""
    name = yield from reader.read_word()
    if not name or not (yield from reader.read_blanks()):
        return False
    if reader.char == "[":
        marker = yield from reader.read_marker(ARGUMENTS, CALL_ID, MISTRAL_MARKER)
        if marker == CALL_ID:
            yield from reader.read_word()
            marker = yield from reader.read_marker(ARGUMENTS, MISTRAL_MARKER)
        if marker != ARGUMENTS:
            return _is_again(reader, marker == MISTRAL_MARKER)
        if not (yield from reader.read_blanks()):
            return False
    if reader.char == "{":
        yield from reader.read_arguments(name)
    return False


def _is_again(reader: CallReader, is_marker: bool) -> bool:  # noqa: FBT001 - whether a marker was read last
    """Release the held text before the last marker; return whether the last text was a marker."""
    if is_marker:
        reader.release(keep=len(MISTRAL_MARKER))
    return is_marker


MISTRAL_FORMAT: Final = CallFormat(_read_mistral, _mistral_rules, ((MISTRAL_MARKER,),), mistral_call_id)


def _read_array(reader: CallReader) -> Steps[bool]:
    if not (yield from reader.read_blanks()) or reader.char != "[":
        return False
    reader.hold()
    is_call = yield from _read_objects(reader)
    reader.release()
    return is_call


def _granite_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    return _array_rules(functions, marker(GRANITE_MARKER), schema, several=several)


GRANITE_FORMAT: Final = CallFormat(
    between_markers((GRANITE_MARKER, HERMES[0]), (), _read_array), _granite_rules, ((GRANITE_MARKER,),)
)


def _read_fenced(reader: CallReader) -> Steps[bool]:
    yield from reader.read_word()  # the kind of tool: function
    if (yield from reader.read_marker(DEEPSEEK_NAME_END)) is None:
        return False
    name = yield from reader.read_word()
    if not (yield from reader.read_blanks()) or (yield from reader.read_marker(FENCE[0])) is None:
        return False
    if not ((yield from reader.read_blanks()) and reader.char == "{" and (yield from reader.read_arguments(name))):
        return False
    if (yield from reader.read_blanks()) and (yield from reader.read_marker(FENCE[1])) is None:
        reader.release()
    reader.drop()
    return True


def _fenced_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    opening, closing = f"\n{FENCE[0]}\n", as_literal(f"\n{FENCE[1]}")
    calls = " | ".join(
        f"{as_literal(function['name'] + opening)} {schema(parameters_of(function))}" for function in functions
    )
    call = f'"function" {marker(DEEPSEEK_NAME_END)} ({calls}) {closing}'
    return _section_rules(DEEPSEEK_SECTION, DEEPSEEK_CALL, call, marker, several=several)


def _section_rules(
    section: tuple[str, str], call: tuple[str, str], inner: str, marker: Marker, *, several: bool
) -> str:
    begin, end = map(marker, section)
    opening, closing = map(marker, call)
    return f"answer: {begin} call{'+' if several else ''} {end}\ncall: {opening} {inner} {closing}\n"


def _read_headed(reader: CallReader) -> Steps[bool]:
    name = yield from reader.read_word()
    if (yield from reader.read_marker(DEEPSEEK_NAME_END)) is None:
        return False
    return (yield from reader.read_blanks()) and reader.char == "{" and (yield from reader.read_arguments(name))


def _headed_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    calls = " | ".join(
        f"{as_literal(function['name'])} {marker(DEEPSEEK_NAME_END)} {schema(parameters_of(function))}"
        for function in functions
    )
    return _section_rules(DEEPSEEK_SECTION, DEEPSEEK_CALL, f"({calls})", marker, several=several)


_DEEPSEEK_ENDS: Final = (DEEPSEEK_CALL[1], DEEPSEEK_SECTION[1])
DEEPSEEK_V3_FORMAT: Final = CallFormat(
    between_markers(DEEPSEEK_CALL[:1], _DEEPSEEK_ENDS, _read_fenced, sections=DEEPSEEK_SECTION[:1]),
    _fenced_rules,
    ((DEEPSEEK_NAME_END, FENCE[0]),),
)
DEEPSEEK_V31_FORMAT: Final = CallFormat(
    between_markers(DEEPSEEK_CALL[:1], _DEEPSEEK_ENDS, _read_headed, sections=DEEPSEEK_SECTION[:1]),
    _headed_rules,
    ((DEEPSEEK_NAME_END,),),
)


def _read_kimi(reader: CallReader) -> Steps[bool]:
    yield from reader.read_blanks()
    call_id = yield from reader.read_word()
    yield from reader.read_blanks()
    if (yield from reader.read_marker(KIMI_NAME_END)) is None:
        return False
    name = call_id.removeprefix(KIMI_PREFIX).rpartition(":")[0]
    return (
        (yield from reader.read_blanks()) and reader.char == "{" and (yield from reader.read_arguments(name, call_id))
    )


def _kimi_rules(functions: Functions, marker: Marker, schema: SchemaRule, *, several: bool) -> str:
    calls = " | ".join(
        f"{as_literal(KIMI_PREFIX + function['name'] + ':')} /[0-9]{{1,4}}/ {marker(KIMI_NAME_END)} "
        f"{schema(parameters_of(function))}"
        for function in functions
    )
    return _section_rules(KIMI_SECTION, KIMI_CALL, f"({calls})", marker, several=several)


KIMI_FORMAT: Final = CallFormat(
    between_markers(KIMI_CALL[:1], (KIMI_CALL[1], KIMI_SECTION[1]), _read_kimi, sections=KIMI_SECTION[:1]),
    _kimi_rules,
    ((KIMI_CALL[0],),),
)
