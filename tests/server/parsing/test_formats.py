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

from pagedkv.server.parsing import FORMATS, CallArguments, CallBegin, CallEnd, TextPart, parser_for
from pagedkv.server.parsing.json_calls import DEEPSEEK_CALL, DEEPSEEK_NAME_END, DEEPSEEK_SECTION
from tests.server.parsing.reading import NAMES, calls, content, new_parser, parse, pieces_of, reasoning_of

AS_JSON = ("hermes", "llama3_json", "mistral", "granite", "deepseek_v3", "deepseek_v31", "kimi_k2")
"""Formats whose arguments are written as JSON and passed on as they are."""


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
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        (("get_weather", '{"city": "Paris"}'),),
    ),
    Golden(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "n": [1, -2.5e3]}}',
        "",
        (("get_weather", '{"city": "Paris", "n": [1, -2.5e3]}'),),
    ),
    Golden(
        "llama3_json",
        '{"name": "get_weather", "parameters": {}}; {"name": "get_time", "arguments": {"zone": null}}',
        "",
        (("get_weather", "{}"), ("get_time", '{"zone": null}')),
    ),
    Golden("llama3_json", 'So: <|python_tag|>{"name": "get", "parameters": {}}', "So: ", (("get", "{}"),)),
    Golden("llama3_json", '<|python_tag|>get.call(q="x")', '<|python_tag|>get.call(q="x")'),
    Golden("llama3_json", '{"answer": 42}', '{"answer": 42}'),
    Golden("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}'),
    Golden(
        "llama3_json",
        'It is {"name": "get", "parameters": {}}; yes',
        'It is {"name": "get", "parameters": {}}; yes',
    ),
    Golden("llama3_json", '{"name": "get", "parameters": {}} ; then', " ; then", (("get", "{}"),)),
    Golden("llama3_json", '{"name": "get", "parameters": {}};; then', ";; then", (("get", "{}"),)),
    Golden("llama3_json", "; {", "; {"),
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

GRANITE = (  # ibm-granite/granite-3.3 and, with the second marker, 3.1
    Golden(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
        "",
        (("get_weather", '{"city": "Paris"}'), ("get_time", "{}")),
    ),
    Golden("granite", 'So:\n<tool_call> [{"arguments": {}, "name": "get"}]', "So:\n", (("get", "{}"),)),
    Golden("granite", '<|tool_call|>{"name": "get", "arguments": {}}', '<|tool_call|>{"name": "get", "arguments": {}}'),
    Golden("granite", "<|tool_call|>[]", "<|tool_call|>[]"),
    Golden("granite", '<|tool_call|>[{"name": "get", "arguments": {"a": 1', "", (("get", '{"a": 1'),)),
)

SECTION, SECTION_END = DEEPSEEK_SECTION
CALL, CALL_END, SEP = *DEEPSEEK_CALL, DEEPSEEK_NAME_END
DEEPSEEK = (  # deepseek-ai/DeepSeek-V3-0324 and R1-0528; DeepSeek-V3.1
    Golden(
        "deepseek_v3",
        f'I look.\n\n{SECTION}{CALL}function{SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{CALL_END}\n'
        f"{CALL}function{SEP}get_time\n```json\n{{}}\n```{CALL_END}{SECTION_END}",
        "I look.\n\n",
        (("get_weather", '{"city": "Paris"}'), ("get_time", "{}")),
    ),
    Golden("deepseek_v3", f"{CALL}function{SEP}get\n```json\n{{}}\n", "", (("get", "{}"),)),
    Golden("deepseek_v3", f"{CALL}function{SEP}get\n```json\n{{}} and", " and", (("get", "{}"),)),
    Golden("deepseek_v3", f"{CALL}function{SEP}get\n```python\n", f"{CALL}function{SEP}get\n```python\n"),
    Golden(
        "deepseek_v3",
        f"{SECTION}{CALL}function{SEP}rm\n```json\n{{}}",
        f"{SECTION}{CALL}function{SEP}rm\n```json\n{{}}",
    ),
    Golden(
        "deepseek_v31",
        f'{SECTION}{CALL}get_weather{SEP}{{"city": "Paris"}}{CALL_END}{CALL}get_time{SEP}{{}}{CALL_END}{SECTION_END}',
        "",
        (("get_weather", '{"city": "Paris"}'), ("get_time", "{}")),
    ),
    Golden("deepseek_v31", f'{CALL}get{SEP}{{"a": "{CALL_END}"', "", (("get", f'{{"a": "{CALL_END}"'),)),
    Golden("deepseek_v31", f"{SECTION}{SECTION}no", f"{SECTION}{SECTION}no"),
    Golden("deepseek_v31", f"{CALL}get{SEP}{{}}{CALL_END}{CALL_END}", CALL_END, (("get", "{}"),)),
)

KIMI = (  # moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md
    Golden(
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        (("get_weather", '{"city": "Paris"}'), ("get_time", "{}")),
    ),
    Golden("kimi_k2", "<|tool_call_begin|>functions.get:x", "<|tool_call_begin|>functions.get:x"),
    Golden(
        "kimi_k2",
        "<|tool_call_begin|> functions.rm:0 <|tool_call_argument_begin|> {}",
        "<|tool_call_begin|> functions.rm:0 <|tool_call_argument_begin|> {}",
    ),
)

QWEN_CODER = (  # Qwen/Qwen3-Coder and Qwen3.5
    Golden(
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        "I look.\n",
        (("get_weather", '{"city": "Paris", "days": 3}'), ("get_time", "{}")),
    ),
    Golden(  # texts as they are, but for one line break on each side; other values by their types
        "qwen3_coder",
        '<tool_call>\n<function=note>\n<parameter=text>\n\n "1" </param\n\n</parameter>\n<parameter=kind>\nlong\n'
        "</parameter>\n<parameter=days>\n12\n</parameter>\n<parameter=until>\nnull\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        (("note", '{"text": "\\n \\"1\\" </param\\n", "kind": "long", "days": 12, "until": null}'),),
    ),
    Golden(  # literals of Python, no opening marker
        "qwen3_coder",
        "<function=get><parameter=a>{'b': [True, None]}</parameter><parameter=c>[1</parameter></function></tool_call>",
        "",
        (("get", '{"a": {"b": [true, null]}, "c": "[1"}'),),
    ),
    Golden("qwen3_coder", "<tool_call>\n<function=note>\n<parameter=text>\nab\n", "", (("note", '{"text": "ab'),)),
    Golden("qwen3_coder", "<function=note>\n<parameter=days>\n5\n</parameter>\n", "", (("note", '{"days": 5}'),)),
    Golden("qwen3_coder", "<function=note>\n<parameter=days>\n5", "", (("note", '{"days": '),)),
    Golden("qwen3_coder", "<function=note></function> so", " so", (("note", "{}"),)),
    Golden("qwen3_coder", "<function=note>\n<parameter=days>5</parameter> so", " so", (("note", '{"days": 5}'),)),
    Golden("qwen3_coder", "<function=note> is", "<function=note> is"),
    Golden(  # a tool that is not offered, with a call of one that is within a value
        "qwen3_coder",
        "<function=rm><parameter=a><function=get></function></parameter></function>",
        "<function=rm><parameter=a><function=get></function></parameter></function>",
    ),
)

GLM = (  # zai-org/GLM-4.5 and, without line breaks, GLM-4.7
    Golden(
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        "I look.\n",
        (("get_weather", '{"city": "Paris", "days": 3}'), ("get_time", "{}")),
    ),
    Golden(
        "glm45",
        "<tool_call>note<arg_key>text</arg_key><arg_value>\n5</arg_value><arg_key>until</arg_key><arg_value>null</arg_value>"
        "</tool_call>",
        "",
        (("note", '{"text": "\\n5", "until": null}'),),
    ),
    Golden("glm45", "<tool_call>note<arg_key>text</arg_key>5", "5", (("note", "{}"),)),
    Golden("glm45", "<tool_call>note<arg_key>te", "", (("note", "{}"),)),
    Golden("glm45", "<tool_call>rm</tool_call><tool_call>get", "<tool_call>rm</tool_call><tool_call>get"),
)

HARMONY = (  # openai/gpt-oss
    Golden(
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "",
        (("get_weather", '{"city": "Paris"}'),),
    ),
    Golden(
        "openai", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Rain.", "Rain."
    ),
    Golden(
        "openai",
        "<|channel|>commentary<|message|>I look. <|end|><|start|>assistant to=functions.get<|channel|>commentary"
        '<|message|>{"a": "<|end|>"}',
        "I look. ",
        (("get", '{"a": "<|end|>"}'),),
    ),
    Golden("openai", "<|channel|>commentary to=functions.rm<|message|>{}<|call|>", "{}"),
    Golden("openai", "<|channel|>commentary to=functions.get<|message|> no<|end|> so", " no so"),
    Golden("openai", '<|channel|>commentary to=functions.get<|message|>{"a": ', "", (("get", '{"a": '),)),
    Golden("openai", "plain <|en", "plain <|en"),
    Golden("openai", "<|channel|>fin", ""),
)

PYTHONIC = (  # meta-llama/Llama-3.2 and Llama-4: a list of Python
    Golden(
        "pythonic",
        "[get_weather(city='Paris', days=3), get_time()]",
        "",
        (("get_weather", '{"city": "Paris", "days": 3}'), ("get_time", "{}")),
    ),
    Golden(
        "pythonic",
        ' [get(a=[1, -2.5, (True, None)], b={"c": ")]\\"é"}, d=null)]',
        "",
        (("get", '{"a": [1, -2.5, [true, null]], "b": {"c": ")]\\"é"}, "d": null}'),),
    ),
    Golden("pythonic", "[get(a=1), rm(a=2)]", ", rm(a=2)]", (("get", '{"a": 1}'),)),
    Golden("pythonic", "[get(1)]", "[get(1)]"),
    Golden("pythonic", "[get(a=b)]", "[get(a=b)]"),
    Golden("pythonic", "[get(a='\\ud800')]", "[get(a='\\ud800')]"),
    Golden("pythonic", "[get(a={1: 2})]", "[get(a={1: 2})]"),
    Golden("pythonic", "[get(a='\\d')] yes", " yes", (("get", '{"a": "\\\\d"}'),)),
    Golden("pythonic", "[get(a=", "[get(a="),
    Golden("pythonic", "It is [get()]", "It is [get()]"),
    Golden("pythonic", "[1, 2]", "[1, 2]"),
)

AGAIN = (  # a marker twice: the first one is text
    Golden("hermes", '<tool_call><tool_call>{"name": "get"}', "<tool_call>", (("get", "{}"),)),
    Golden("llama3_json", '<|python_tag|> <|python_tag|>{"name": "get"}', "<|python_tag|> ", (("get", "{}"),)),
    Golden("mistral", "[TOOL_CALLS]get[TOOL_CALLS]get{}", "[TOOL_CALLS]get", (("get", "{}"),)),
    Golden("mistral", "[TOOL_CALLS]get[CALL_ID]a[TOOL_CALLS]get{}", "[TOOL_CALLS]get[CALL_ID]a", (("get", "{}"),)),
    Golden("mistral", "[TOOL_CALLS][TOOL_CALLS]get{}", "[TOOL_CALLS]", (("get", "{}"),)),
)

ALL = (*(*AGAIN, *HERMES, *LLAMA, *MISTRAL, *GRANITE, *DEEPSEEK, *KIMI, *QWEN_CODER, *GLM, *HARMONY, *PYTHONIC),)


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
    *(
        "<|tool_call|>",
        SECTION,
        CALL,
        SEP,
        CALL_END,
        SECTION_END,
        "function",
        "```json",
        "\n```",
        "<|tool_call_begin|>",
    ),
    *("<|tool_calls_section_begin|>", "functions.get:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<function=get>", "<function=note>", "<parameter=text>", "<parameter=a>", "</parameter>", "</function>"),
    *("<arg_key>", "days</arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|channel|>", "<|message|>"),
    *("analysis", "final", "commentary to=functions.get", "<|end|>", "<|start|>assistant", "[get(", "a=1", ")", "'"),
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
    name=st.sampled_from(list(FORMATS)),
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


@given(text=texts, name=st.sampled_from(AS_JSON))
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
    name=st.sampled_from(AS_JSON),
)
def test_a_call_behind_a_quiet_text_is_found_with_its_arguments(
    text: str, arguments: dict[str, object], name: str
) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    call = {
        "hermes": f'<tool_call>\n{{"name": "get", "arguments": {written}}}\n</tool_call>',
        "llama3_json": f'<|python_tag|>{{"name": "get", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]get[ARGS]{written}",
        "granite": f'<|tool_call|>[{{"name": "get", "arguments": {written}}}]',
        "deepseek_v3": f"{SECTION}{CALL}function{SEP}get\n```json\n{written}\n```{CALL_END}{SECTION_END}",
        "deepseek_v31": f"{SECTION}{CALL}get{SEP}{written}{CALL_END}{SECTION_END}",
        "kimi_k2": f"<|tool_call_begin|>functions.get:3<|tool_call_argument_begin|>{written}<|tool_call_end|>",
    }[name]
    quiet = re.sub(r"[<\[{\"]", "", text)
    parts = parse(new_parser(name), quiet + call)
    assert calls(parts) == [("get", written)]
    assert content(parts) == (quiet if quiet.strip(" \t\r\n") else "")


@given(text=texts, name=st.sampled_from(list(FORMATS)))
def test_calls_come_in_order_with_whole_names_and_unique_identities(text: str, name: str) -> None:
    identities: set[str] = set()
    open_index = None
    for part in parse(new_parser(name), text):
        match part:
            case CallBegin():
                assert open_index is None
                assert part.name in NAMES
                shape = {"mistral": "[0-9A-Za-z]{9}", "kimi_k2": r"functions\.get:0"}.get(name, "call_[0-9a-f]{24}")
                assert re.fullmatch(shape, part.call_id)
                assert part.call_id not in identities or name == "kimi_k2"  # of which the model writes them
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
