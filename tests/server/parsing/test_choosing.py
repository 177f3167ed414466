"""Which parser is taken: by name, by the chat template's markers, by the response template."""

import re

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.server.parsing import (
    CallArguments,
    CallBegin,
    Part,
    PlainParser,
    end_of_open_reasoning,
    parser_for,
    parser_name,
)
from pagedkv.server.parsing.choosing import OTHER_NAMES, ReasoningParser
from pagedkv.server.parsing.json_calls import BAR
from tests.server.parsing.reading import TOOLS, calls, content, new_parser, parse, reasoning_of

TEMPLATES = {
    "hermes": 'return json\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "llama3_json": "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
    "glm45": "<tool_call>{{ tc.name }}\n{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>",
    "qwen3_coder": "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}",
    "deepseek_v3": "'<{0}tool▁call▁begin{0}>' + tool['type'] + '<{0}tool▁sep{0}>' + name + '\\n' + '```json'".replace(
        "{0}", BAR
    ),
    "deepseek_v31": "'<{0}tool▁call▁begin{0}>'+ name + '<{0}tool▁sep{0}>' + args".replace("{0}", BAR),
    "kimi_k2": "<|tool_calls_section_begin|>{%- for tool_call in calls -%}<|tool_call_begin|>{{ tool_call['id'] }}",
    "openai": "<|start|>assistant<|channel|>final<|message|>{{ message.content }}",
    "granite": "respond with <|tool_call|> followed by a JSON list of tools used",
    "none": "{% for message in messages %}{{ message.content }}{% endfor %}",
}


class Templated:
    """A tokenizer as far as its chat template goes."""

    def __init__(self, template: object, beginning: str = "") -> None:
        self.chat_template = template
        self.beginning = beginning

    def apply_chat_template(self, messages: object, **options: object) -> str:
        """Write a turn and what begins the answer."""
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return f"{messages}{self.beginning}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_goes_by_the_markers_of_the_template(name: str) -> None:
    assert parser_name("auto", Templated(TEMPLATES[name])) == name
    assert parser_name(None, Templated({"default": "", "tool_use": TEMPLATES[name]})) == name
    assert parser_name("llama3_json", Templated(TEMPLATES[name])) == "llama3_json"


def test_a_fence_in_another_template_is_no_marker() -> None:
    assert parser_name("auto", Templated("answer in ```json\n" + TEMPLATES["hermes"])) == "hermes"


def test_without_a_template_there_is_only_text() -> None:
    assert parser_name("auto", None) == "none"
    parser = parser_for("auto", None, tools=TOOLS, reasoning="auto", id_source=str)
    assert isinstance(parser, PlainParser)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'herms'; there are auto, hf, glm45, qwen3_coder, .*, none"):
        new_parser("herms")
    with pytest.raises(ConfigurationError, match=r"'thing'; there are auto, think, hf, deepseek_r1, .*, none"):
        new_parser("hermes", "thing")


@pytest.mark.parametrize(("beginning", "reasoning"), [("<think>\n", "a"), ("", ""), ("<think>\n\n</think>\n\n", "")])
def test_the_template_says_whether_it_begins_the_reasoning(beginning: str, reasoning: str) -> None:
    tokenizer = Templated("<think></think>", beginning)
    parser = parser_for("none", tokenizer, tools=[], reasoning="auto", id_source=str)
    assert isinstance(parser, ReasoningParser)
    assert reasoning_of(parse(parser, ["a</think>b"])) == reasoning


def test_mistrals_markers_are_taken_where_the_template_has_them() -> None:
    tokenizer = Templated("[THINK][/THINK]")
    parser = parser_for("none", tokenizer, tools=[], reasoning="auto", id_source=str)
    for pieces in (["[THINK]a[/THINK]b"], "[THINK]a[/THINK]b"):
        assert reasoning_of(parse(parser, pieces)) == "a"
        parser = parser_for("none", tokenizer, tools=[], reasoning="think", id_source=str)


def test_the_prompt_goes_before_the_template() -> None:
    tokenizer = Templated("<think></think>", "<think>")
    parser = parser_for("none", tokenizer, tools=[], reasoning="auto", id_source=str, prompt="continue: ")
    assert reasoning_of(parse(parser, ["a</think>b"])) == ""


def test_a_template_that_refuses_a_turn_begins_no_reasoning() -> None:
    class Refusing(Templated):
        def apply_chat_template(self, messages: object, **_options: object) -> str:
            raise RuntimeError(messages)

    parser = parser_for("none", Refusing("<think></think>"), tools=[], reasoning="auto", id_source=str)
    assert reasoning_of(parse(parser, ["<think>a</think>b"])) == "a"


def test_a_mistral_call_has_an_identity_of_nine_letters_and_digits() -> None:
    parser = parser_for("auto", Templated(TEMPLATES["mistral"]), tools=TOOLS, reasoning="none", id_source=str)
    (begin, *_) = parser.feed("[TOOL_CALLS]get{}")
    assert re.fullmatch("[0-9A-Za-z]{9}", begin.call_id)  # type: ignore[union-attr]
    assert calls([begin]) == [("get", "")]


@pytest.mark.parametrize(("other", "name"), OTHER_NAMES.items())
def test_a_format_has_each_of_its_names(other: str, name: str) -> None:
    assert parser_name(other, None) == name


def test_hf_needs_a_response_template() -> None:
    with pytest.raises(ConfigurationError, match="hf needs a tokenizer with a response template"):
        parser_name("hf", Templated(TEMPLATES["hermes"]))


OF_NAME = (  # reasoning parser, end of the prompt, answer, its reasoning, its content
    ("deepseek_r1", "", "hm</think>yes", "hm", "yes"),
    ("deepseek_r1", "", "<think>hm</think>yes", "hm", "yes"),
    ("deepseek_r1", "", "hm", "hm", ""),
    ("deepseek_v3", "</think>", "hm</think>yes", "", "hm</think>yes"),
    ("qwen3", "<think>\n", "hm</think>yes", "hm", "yes"),
    ("qwen3", "", "<think>hm</think>yes", "hm", "yes"),
    ("mistral", "", "[THINK]hm[/THINK]yes", "hm", "yes"),
    ("granite", "", "Here is my thought process: hm Here is my response: yes", " hm ", " yes"),
    ("granite", "", "Here is my thought.", "", "Here is my thought."),
    ("seed_oss", "", "<seed:think>hm</seed:think>yes", "hm", "yes"),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>yes", "hm", "yes"),
    ("none", "<think>", "hm</think>yes", "", "hm</think>yes"),
)


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "rest"), OF_NAME)
def test_reasoning_is_marked_as_the_name_says(name: str, prompt: str, text: str, reasoning: str, rest: str) -> None:
    for cut in range(len(text)):
        parts = parse(new_parser("none", name, prompt), [text[:cut], text[cut:]])
        assert (reasoning_of(parts), content(parts)) == (reasoning, rest)


@pytest.mark.parametrize(("name", "prompt", "text", "rest"), [(*each[:3], each[4]) for each in OF_NAME])
def test_a_format_waits_for_the_end_of_the_reasoning_that_the_parser_waits_for(
    name: str, prompt: str, text: str, rest: str
) -> None:
    """Where an answer begins within reasoning, and only there."""
    end = end_of_open_reasoning("none", name, None, prompt)
    is_open = bool(reasoning_of(parse(new_parser("none", name, prompt), ["a"])))
    assert (end is not None) == is_open
    if end is not None and rest:
        assert text.endswith(end + rest)


def test_kimis_call_has_the_identity_that_the_model_wrote() -> None:
    parser = new_parser("kimi_k2")
    (begin, *_) = parser.feed("<|tool_call_begin|>functions.get:7<|tool_call_argument_begin|>{")
    assert begin == CallBegin(0, "functions.get:7", "get")


def test_a_text_between_tags_streams_and_other_values_are_whole() -> None:
    parser = new_parser("qwen3_coder")
    parser.feed("<tool_call><function=note><parameter=text>\n")
    assert arguments_of(parser.feed("a\nb\n")) == "a\\nb"
    assert arguments_of(parser.feed("c\n</para")) == "\\nc"
    assert arguments_of(parser.feed("meter><parameter=days>1")) == '", "days": '
    assert arguments_of(parser.feed("2</parameter>")) == "12"


def arguments_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, CallArguments))
