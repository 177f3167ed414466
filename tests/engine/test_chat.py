"""Conversations as prompts: what a template makes of them, and the error where there is none."""

from dataclasses import replace
from typing import Any

import pytest

from pagedkv.engine import LLM, Chat, SamplingParams
from pagedkv.errors import RequestError
from tests.engine.families import make_model
from tests.engine.serving import CONFIG
from tests.engine.words import UNKNOWN, make_tokenizer

WORDS = (UNKNOWN, "<user>", "<model>", "<system>", "<tools>", "how", "are", "you", "fine", "thanks", "and", "loudly")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if tools %}<tools> {% endif %}{{ mood }} {% if add_generation_prompt %}<model>{% endif %}"
)
TALK = [
    {"role": "user", "content": "how are you"},
    {"role": "model", "content": "fine thanks"},
    {"role": "user", "content": "and how"},
]
PARAMS = SamplingParams(max_tokens=6)


def tokenizer(template: str | None = TEMPLATE) -> Any:  # noqa: ANN401 - of transformers
    return make_tokenizer({word: place for place, word in enumerate(WORDS)}, template)


def make_llm(given: object) -> LLM:
    return LLM(make_model("llama"), replace(CONFIG, num_blocks=100), tokenizer=given)  # type: ignore[arg-type]


def words(*given: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in given)


WRITTEN = words("<user>", "how", "are", "you", "<model>", "fine", "thanks", "<user>", "and", "how")


def test_messages_become_what_the_template_writes() -> None:
    llm = make_llm(tokenizer())
    chats: list[Any] = [
        TALK,
        Chat(TALK, options={"mood": "loudly"}),
        Chat(TALK[:2], is_continued=True),
        Chat(TALK, tools=[{"type": "function"}]),
        Chat(TALK[:1], template="{{ messages[0].content }}"),
    ]
    prompts = [output.prompt_token_ids for output in llm.generate(chats, PARAMS)]
    assert prompts == [
        WRITTEN + words("<model>"),
        WRITTEN + words("loudly", "<model>"),
        WRITTEN[:7],
        WRITTEN + words("<tools>", "<model>"),
        words("how", "are", "you"),
    ]


def test_a_conversation_that_goes_on_hits_what_was_said() -> None:
    llm = make_llm(tokenizer())
    llm.generate([TALK[:1]], PARAMS)
    assert llm.generate([TALK], PARAMS)[0].num_cached_tokens == 4


def test_conversations_stand_beside_texts_and_tokens() -> None:
    llm = make_llm(tokenizer())
    text, tokens, chat = llm.generate(["how are you", [5, 6, 7], Chat(TALK[:1], template="how are you")], PARAMS)
    assert text.prompt_token_ids == tokens.prompt_token_ids == chat.prompt_token_ids
    assert text.token_ids == tokens.token_ids == chat.token_ids


BAD: dict[str, tuple[Any, str]] = {
    "nothing said": (Chat([]), "prompt 1: a conversation needs at least one message"),
    "no role": ([{"content": "how"}], "prompt 1: message 0 must be a mapping with a role"),
    "no message": ([*TALK, "how"], "prompt 1: message 3 must be a mapping with a role, .* got 'how'"),
    "a message alone": (TALK[0], "prompt 1: a message stands by itself"),
    "a role that is refused": ([{"role": "nobody"}], "prompt 1: the chat template refuses it: nobody may not speak"),
    "a broken template": (Chat(TALK, template="{% if %}"), "prompt 1: the chat template refuses it: "),
}


@pytest.mark.parametrize("what", BAD)
def test_a_conversation_that_is_none_is_refused_and_disturbs_nobody(what: str) -> None:
    prompt, message = BAD[what]
    llm = make_llm(tokenizer())
    with pytest.raises(RequestError, match=message):
        llm.generate([TALK, prompt], PARAMS)
    assert not llm.core.has_work


def test_who_has_no_template_says_so() -> None:
    class Plain:
        """A tokenizer without any."""

        def encode(self, text: str) -> list[int]:
            """Count letters."""
            return [len(text)]

        def decode(self, token_ids: object) -> str:
            """Return an empty text."""
            return str(token_ids)[:0]

    for given, message in (
        (tokenizer(None), "its tokenizer has no chat template: give it one"),
        (Plain(), "its tokenizer has no chat template"),
        (None, "the engine has no tokenizer"),
    ):
        with pytest.raises(RequestError, match=f"prompt 0: it is a list of messages, but {message}"):
            make_llm(given).generate([TALK], PARAMS)
