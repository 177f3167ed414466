"""Answers parsed by transformers' response templates: the same parts however they are cut, and nothing is lost."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pagedkv.server.parsing import Part, TextPart, parser_for
from pagedkv.server.parsing.response_templates import ResponseTemplateParser, has_response_template
from tests.server.parsing.reading import TOOLS, calls, content, parse, pieces_of, reasoning_of

CALLS: dict[str, Any] = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
TEMPLATE: dict[str, Any] = {  # in the shape of transformers' documentation of response templates
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": CALLS,
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}

TOKENIZER = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # of transformers
    tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),  # noqa: S106 - a token of text
    response_template=TEMPLATE,
)


def read(pieces: list[str], prompt: str = "") -> list[Part]:
    parser = parser_for("auto", TOKENIZER, tools=TOOLS, reasoning="auto", id_source=str, prompt=prompt)
    assert isinstance(parser, ResponseTemplateParser)
    return parse(parser, pieces)


def test_a_tokenizer_with_a_template_is_told_from_one_without() -> None:
    assert has_response_template(TOKENIZER)
    assert not has_response_template(object())
    assert not has_response_template(None)


def test_content_reasoning_and_calls_come_from_the_template() -> None:
    parts = read(
        ['<think>hm</think>I look.\n<tool_call>{"name": "get", "arguments": {"é": [1]}}</tool_call><|im_end|>']
    )
    assert reasoning_of(parts) == "hm"
    assert content(parts) == "I look."
    assert calls(parts) == [("get", '{"é": [1]}')]


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    parts = read(["hm</think>yes"], "<|im_start|>user\n<think><|im_start|>assistant\n<think>")
    assert reasoning_of(parts) == "hm"
    assert content(parts) == "yes"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>b', '{"name": "rm", "arguments": {}}b'),
        ('<tool_call>{"name": "get", "arguments": 5}</tool_call>b', '{"name": "get", "arguments": 5}b'),
        ("<tool_call>{broken</tool_call>b<tool_call>c", "{brokenb<tool_call>c"),
        ('<tool_call>{"name": "ge', '{"name": "ge'),
        ("<tool_call>5</tool_call>", "5"),
        ("<tool_call>{broken</tool", "{broken</tool"),
        ("<tool_call></tool", "</tool"),
    ],
)
def test_what_is_no_call_is_text_without_its_markers(text: str, expected: str) -> None:
    for pieces in ([text], list(text)):
        assert read(pieces) == [TextPart(expected)]


FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "get", "arguments": {}}',
    "{",
    "a",
    " ",
    "\n",
    "<",
    "<|im_end|>",
]


@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join), cuts=st.lists(st.integers(0, 99), max_size=9)
)
def test_the_parts_do_not_depend_on_the_cuts(text: str, cuts: list[int]) -> None:
    whole = read([text])
    assert read(pieces_of(text, cuts)) == whole
    assert read(list(text)) == whole


def test_content_streams_and_a_call_comes_when_it_closes() -> None:
    parser = parser_for("auto", TOKENIZER, tools=TOOLS, reasoning="auto", id_source=str, prompt="")
    assert parser.feed("I lo") == [TextPart("I lo")]
    assert parser.feed('ok.<tool_call>{"name": "get", "arguments": {') == [TextPart("ok.")]
    assert calls(parser.feed("}}</tool_call>")) == [("get", "{}")]
