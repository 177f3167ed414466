"""Which parser is taken: by name, by the chat template's markers, by the response template."""

import re

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.server.parsing import PlainParser, parser_for, parser_name
from pagedkv.server.parsing.choosing import ReasoningParser
from tests.server.parsing.reading import TOOLS, calls, new_parser, parse, reasoning_of

TEMPLATES = {
    "hermes": 'return json\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "llama": "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
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
    assert parser_name("llama", Templated(TEMPLATES[name])) == "llama"


def test_without_a_template_there_is_only_text() -> None:
    assert parser_name("auto", None) == "none"
    parser = parser_for("auto", None, tools=TOOLS, reasoning="auto", id_source=str)
    assert isinstance(parser, PlainParser)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("'herms'; there are auto, hermes, llama, mistral, none")):
        new_parser("herms")
    with pytest.raises(ConfigurationError, match="'thing'; there are auto, think, none"):
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
