"""Texts in the shapes that model cards and mistral-common document: the same content and calls however they are cut.

Compared once with vLLM 0.33.0 (``Hermes2ProToolParser``, ``Llama3JsonToolParser``, ``MistralParser``, whole texts, no
token ids): 23 of the 39 texts of HERMES, LLAMA and MISTRAL give the same calls. The other 16 differ on purpose:

- a tool that is not offered, or a Mistral marker without a call: text here, a call there (6 texts);
- arguments that are no object, JSON within a sentence: text here, a call there (2);
- markers within strings: an argument here; there the call is split (1), or all of the answer is text (1);
- broken, cut or absent arguments, broken JSON beside a call: what was certain is a call here, all of it text there (5);
- ``[CALL_ID]``: its identity is left out here, and is part of the name there (1).
"""

import json
import re
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from pagedkv.server.parsing import CallArguments, CallBegin, CallEnd, TextPart, parser_for
from tests.server.parsing.reading import NAMES, calls, content, new_parser, parse, pieces_of, reasoning_of

FORMATS = ("hermes", "llama", "mistral")


@dataclass(frozen=True, slots=True)
class Golden:
    """A text of one format, and what it says."""

    name: str
    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()


HERMES = (  # NousResearch/Hermes-2-Pro and Qwen/Qwen3: <tool_call>, JSON with arguments, </tool_call>
    Golden("hermes", "No tool is needed.", "No tool is needed."),
    Golden(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        (("get_weather", '{"city": "Paris"}'),),
    ),
    Golden(
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>',
        "I look.\n",
        (("get_weather", '{"city": "Paris"}'), ("get_time", "{}")),
    ),
    Golden("hermes", '<tool_call>{"name": "get_time"}</tool_call> Done.', " Done.", (("get_time", "{}"),)),
    Golden("hermes", '<tool_call>{"name": "get_time", "arguments": {}}', "", (("get_time", "{}"),)),
    Golden(  # markers within strings
        "hermes",
        '<tool_call>{"name": "get", "arguments": {"a": "</tool_call><tool_call>", "b": "\\"}"}}</tool_call>',
        "",
        (("get", '{"a": "</tool_call><tool_call>", "b": "\\"}"}'),),
    ),
    Golden(  # a tool that is not offered, with a call of one that is within a string
        "hermes",
        '<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>{\\"name\\": \\"get\\"}"}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>{\\"name\\": \\"get\\"}"}}</tool_call>',
    ),
    Golden(  # broken before the call is certain, and a whole call after it
        "hermes",
        '<tool_call>{"name": get}</tool_call><tool_call>{"name": "get", "arguments": {}}</tool_call>',
        '<tool_call>{"name": get}</tool_call>',
        (("get", "{}"),),
    ),
    Golden(  # broken within the arguments
        "hermes",
        '<tool_call>{"name": "get", "arguments": {"a": 1,, "b": 2}}</tool_call>',
        ', "b": 2}}</tool_call>',
        (("get", '{"a": 1,'),),
    ),
    Golden(  # broken after the arguments
        "hermes", '<tool_call>{"name": "get", "arguments": {}, x</tool_call>', ", x</tool_call>", (("get", "{}"),)
    ),
    Golden("hermes", '<tool_call>{"name": "get", "arguments": {"a": "b', "", (("get", '{"a": "b'),)),
    Golden("hermes", '<tool_call>{"name": "ge', '<tool_call>{"name": "ge'),
    Golden("hermes", "<tool_call><tool_call>\n", "<tool_call><tool_call>\n"),
    Golden("hermes", "a <tool_ca", "a <tool_ca"),
    Golden("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}'),
    Golden("hermes", '<tool_call>{"name": "get", "arguments": [1]}', '<tool_call>{"name": "get", "arguments": [1]}'),
    Golden(
        "hermes",
        '<tool_call>{"name": "get", "arguments": {"arguments": {}, "name": "rm"}}</tool_call></tool_call>',
        "</tool_call>",
        (("get", '{"arguments": {}, "name": "rm"}'),),
    ),
    Golden("hermes", "  \n ", "  \n "),
)

LLAMA = (  # meta-llama/Llama-3.1 and 3.2: JSON with parameters, <|python_tag|> in front of an environment's tools
    Golden(
        "llama",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        (("get_weather", '{"city": "Paris"}'),),
    ),
    Golden(
        "llama",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "n": [1, -2.5e3]}}',
        "",
        (("get_weather", '{"city": "Paris", "n": [1, -2.5e3]}'),),
    ),
    Golden(
        "llama",
        '{"name": "get_weather", "parameters": {}}; {"name": "get_time", "arguments": {"zone": null}}',
        "",
        (("get_weather", "{}"), ("get_time", '{"zone": null}')),
    ),
    Golden("llama", 'So: <|python_tag|>{"name": "get", "parameters": {}}', "So: ", (("get", "{}"),)),
    Golden("llama", '<|python_tag|>get.call(q="x")', '<|python_tag|>get.call(q="x")'),
    Golden("llama", '{"answer": 42}', '{"answer": 42}'),
    Golden("llama", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}'),
    Golden(
        "llama",
        'It is {"name": "get", "parameters": {}}; yes',
        'It is {"name": "get", "parameters": {}}; yes',
    ),
    Golden("llama", '{"name": "get", "parameters": {}} ; then', " ; then", (("get", "{}"),)),
    Golden("llama", '{"name": "get", "parameters": {}};; then', ";; then", (("get", "{}"),)),
    Golden("llama", "; {", "; {"),
)

MISTRAL = (  # mistral-common: versions 3, 11 and 13 of its instruct tokenizers
    Golden(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
        '{"name": "get_time", "arguments": {}}]',
        "",
        (("get_weather", '{"city": "Paris"}'), ("get_time", "{}")),
    ),
    Golden(
        "mistral",
        'Hm. [TOOL_CALLS]get_weather[ARGS]{"a": "[TOOL_CALLS]get{}"}[TOOL_CALLS]get[ARGS]{"b": {}}',
        "Hm. ",
        (("get_weather", '{"a": "[TOOL_CALLS]get{}"}'), ("get", '{"b": {}}')),
    ),
    Golden("mistral", '[TOOL_CALLS]get[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', "", (("get", '{"a": 1}'),)),
    Golden("mistral", '[TOOL_CALLS]get{"a": 1} and', " and", (("get", '{"a": 1}'),)),
    Golden("mistral", '[TOOL_CALLS]rm{"a": "[TOOL_CALLS]get{}"}', '[TOOL_CALLS]rm{"a": "[TOOL_CALLS]get{}"}'),
    Golden("mistral", "see [1] and [TOOL_CALLS", "see [1] and [TOOL_CALLS"),
    Golden("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
    Golden("mistral", "[TOOL_CALLS]get[ARGX]{}", "[TOOL_CALLS]get[ARGX]{}"),
    Golden("mistral", "[TOOL_CALLS]get what", "[TOOL_CALLS]get what"),
    Golden(
        "mistral",
        '[TOOL_CALLS][{"name": "get", "arguments": {}}, {"name": "rm", "arguments": {}}]',
        ', {"name": "rm", "arguments": {}}]',
        (("get", "{}"),),
    ),
)

AGAIN = (  # a marker twice: the first one is text
    Golden("hermes", '<tool_call><tool_call>{"name": "get"}', "<tool_call>", (("get", "{}"),)),
    Golden("llama", '<|python_tag|> <|python_tag|>{"name": "get"}', "<|python_tag|> ", (("get", "{}"),)),
    Golden("mistral", "[TOOL_CALLS]get[TOOL_CALLS]get{}", "[TOOL_CALLS]get", (("get", "{}"),)),
    Golden("mistral", "[TOOL_CALLS]get[CALL_ID]a[TOOL_CALLS]get{}", "[TOOL_CALLS]get[CALL_ID]a", (("get", "{}"),)),
    Golden("mistral", "[TOOL_CALLS][TOOL_CALLS]get{}", "[TOOL_CALLS]", (("get", "{}"),)),
)

ALL = (*AGAIN, *HERMES, *LLAMA, *MISTRAL)


@pytest.mark.parametrize("golden", ALL, ids=lambda golden: f"{golden.name}-{golden.text[:40]}")
def test_a_documented_text_gives_its_content_and_calls_however_it_is_cut(golden: Golden) -> None:
    whole = parse(new_parser(golden.name), [golden.text])
    assert content(whole) == golden.content
    assert tuple(calls(whole)) == golden.calls
    assert parse(new_parser(golden.name), golden.text) == whole
    for cut in range(len(golden.text)):
        assert parse(new_parser(golden.name), [golden.text[:cut], golden.text[cut:]]) == whole


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *('{"name": "get", "arguments": {"a": "b"}}', '{"name": "get_time", "parameters": {', '{"arguments": {}, "name": '),
    *(
        '"get"',
        '"rm"',
        "get",
        "get_weather",
        "{}",
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        ":",
        '"',
        "\\",
        "\n",
        " ",
        "<",
        "a",
        "1",
    ),
    *("é", "\u2028", "\x00", "tru", "true", "-", "e5", "\\u00", '{"name": "rm", "arguments": {"a": '),
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.text(max_size=30)


@given(
    text=texts,
    cuts=st.lists(st.integers(0, 200), max_size=12),
    name=st.sampled_from(FORMATS),
    prompt=st.sampled_from(["", "<think>\n"]),
)
def test_the_parts_do_not_depend_on_the_cuts(text: str, cuts: list[int], name: str, prompt: str) -> None:
    whole = parse(new_parser(name, "think", prompt), [text])
    assert parse(new_parser(name, "think", prompt), pieces_of(text, cuts)) == whole
    assert parse(new_parser(name, "think", prompt), text) == whole


def test_a_parser_that_holds_nothing_back_is_noticed() -> None:
    """Negative control: pieces that are parsed each for itself do depend on the cuts."""
    text = HERMES[1].text
    alone = [part for piece in pieces_of(text, [5]) for part in parse(new_parser("hermes"), [piece])]
    assert alone != parse(new_parser("hermes"), [text])


@given(text=texts, name=st.sampled_from(FORMATS))
def test_nothing_is_lost(text: str, name: str) -> None:
    """Without calls the content is the text; what is neither text nor an argument belongs to a call's shape."""
    parts = parse(new_parser(name), text)
    if not calls(parts):
        assert content(parts) == text
    assert is_subsequence(content(parts), text)
    for called, arguments in calls(parts):
        assert called in NAMES
        if arguments != "{}":
            assert is_subsequence(re.sub(r"\\u00[01]\w", "", arguments), text)


@given(
    text=texts,
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9), st.lists
        ),
        max_size=3,
    ),
    name=st.sampled_from(FORMATS),
)
def test_a_call_behind_a_quiet_text_is_found_with_its_arguments(
    text: str, arguments: dict[str, object], name: str
) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    call = {
        "hermes": f'<tool_call>\n{{"name": "get", "arguments": {written}}}\n</tool_call>',
        "llama": f'<|python_tag|>{{"name": "get", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]get[ARGS]{written}",
    }[name]
    quiet = re.sub(r"[<\[{\"]", "", text)
    parts = parse(new_parser(name), quiet + call)
    assert calls(parts) == [("get", written)]
    assert content(parts) == (quiet if quiet.strip(" \t\r\n") else "")


@given(text=texts, name=st.sampled_from(FORMATS))
def test_calls_come_in_order_with_whole_names_and_unique_identities(text: str, name: str) -> None:
    identities: set[str] = set()
    open_index = None
    for part in parse(new_parser(name), text):
        match part:
            case CallBegin():
                assert open_index is None
                assert part.name in NAMES
                assert re.fullmatch("[0-9A-Za-z]{9}" if name == "mistral" else "call_[0-9a-f]{24}", part.call_id)
                assert part.call_id not in identities
                identities.add(part.call_id)
                open_index = part.index
            case CallArguments():
                assert part.index == open_index
            case CallEnd():
                assert part.index == open_index
                open_index = None
            case _:
                assert open_index is None
    assert open_index is None


def test_arguments_stream_before_the_call_ends() -> None:
    parser = new_parser("hermes")
    assert parser.feed('<tool_call>{"name": "get_wea') == []
    begin, *_ = parser.feed('ther", "arguments": {')
    assert isinstance(begin, CallBegin)
    assert begin.name == "get_weather"
    assert parser.feed('"city": "Par') == [CallArguments(0, '"city": "Par')]
    assert parser.feed('is"}') == [CallArguments(0, 'is"}'), CallEnd(0)]
    assert parser.feed("}\n</tool_call>") == []


def test_text_streams_but_for_what_may_begin_a_marker() -> None:
    parser = new_parser("hermes")
    assert parser.feed("a < b <tool") == [TextPart("a < b ")]
    assert parser.feed("ing") == [TextPart("<tooling")]


def test_a_tool_that_is_not_offered_streams_as_text() -> None:
    parser = new_parser("hermes")
    assert parser.feed('<tool_call>{"name": "rm", ') == [TextPart('<tool_call>{"name": "rm", ')]
    assert parser.feed('"arguments": {"a') == [TextPart('"arguments": {"a')]


def test_line_breaks_within_strings_of_arguments_become_escapes() -> None:
    parts = parse(new_parser("hermes"), ['<tool_call>{"name": "get", "arguments":\n{"code": "a\n\tb"\n}}</tool_call>'])
    (call,) = calls(parts)
    assert json.loads(call[1]) == {"code": "a\n\tb"}


def test_without_tools_every_text_is_content() -> None:
    parser = parser_for("hermes", None, tools=[], reasoning="none", id_source=str)
    text = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert parse(parser, [text]) == [TextPart(text)]


REASONED = (
    ("<think>\nhm</think>\n\nyes", "", "\nhm", "\n\nyes"),
    ("\n<think>hm</think>yes", "", "hm", "yes"),
    ("hm</think>yes", "<think>\n", "hm", "yes"),
    ("<think>hm</think>yes", "x<think>", "hm", "yes"),
    ("hm", "<think>", "hm", ""),
    ("<think>hm </thin", "", "hm </thin", ""),
    ("no <think>hm</think>", "", "", "no <think>hm</think>"),
    ("<thi", "", "", "<thi"),
    ("<think>a</think>b<think>c</think>", "", "a", "b<think>c</think>"),
)


@pytest.mark.parametrize(("text", "prompt", "reasoning", "rest"), REASONED)
def test_reasoning_is_what_stands_between_the_markers_at_the_beginning(
    text: str, prompt: str, reasoning: str, rest: str
) -> None:
    for pieces in ([text], text):
        parts = parse(new_parser("hermes", "think", prompt), pieces)
        assert reasoning_of(parts) == reasoning
        assert content(parts) == rest


def test_calls_are_found_after_reasoning_and_not_within_it() -> None:
    call = '<tool_call>{"name": "get", "arguments": {"a": "</think>"}}</tool_call>'
    parts = parse(new_parser("hermes", "think"), [f"<think>{call[:30]}</think>\n{call}"])
    assert reasoning_of(parts) == call[:30]
    assert calls(parts) == [("get", '{"a": "</think>"}')]
    assert content(parts) == ""


def is_subsequence(short: str, long: str) -> bool:
    rest = iter(long)
    return all(char in rest for char in short)
