"""Kept answers: a next turn continues with the tokens that were computed, and no other conversation does."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pagedkv.engine import Chat
from pagedkv.server.chat_prompts import ChatPrompts, KeptAnswers, conversation_digests, next_digest
from pagedkv.server.config import Caller

ALONE = Caller(None)
FIRST = [{"role": "user", "content": "one"}]
ANSWER = {"role": "assistant", "content": "two"}
SECOND = [*FIRST, ANSWER, {"role": "user", "content": "three"}]


class Letters:
    """A tokenizer of letters: a token a character, by its code."""

    chat_template = "by the class"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a token a character."""
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tokenize: bool, **_more: object
    ) -> str:
        """Write each message in brackets; of answers, thoughts are left out and blanks are stripped."""
        assert not tokenize
        said = "".join(f"[{message['role']}:{self._said(message)}]" for message in messages)
        return said + ("[assistant:" if add_generation_prompt else "")

    @staticmethod
    def _said(message: Mapping[str, Any]) -> str:
        if message.get("tool_calls"):
            if not message["tool_calls"][0]["function"]["arguments"]:
                raise ValueError("a call without arguments")
            return "call"
        return str(message["content"]).rpartition("</think>")[2].strip()


def prompts(max_tokens: int = 10_000) -> ChatPrompts:
    """Make prompts by letters."""
    return ChatPrompts(Letters(), KeptAnswers(max_tokens))


def text(token_ids: Sequence[int]) -> str:
    """Read letters."""
    return "".join(map(chr, token_ids))


def test_a_next_turn_continues_with_the_computed_tokens() -> None:
    chats = prompts()
    first = chats.prepare(Chat(FIRST), ALONE)
    assert text(first.token_ids) == "[user:one][assistant:"
    computed = [*b"<think>so</think>  TWO"]  # other tokens than those of its text: as a sampler draws them
    chats.keep(first, ANSWER, computed)
    second = chats.prepare(Chat(SECOND), ALONE)
    assert text(second.token_ids) == "[user:one][assistant:<think>so</think>  TWO][user:three][assistant:"
    assert second.num_kept_tokens == len(first.token_ids) + len(computed)


def test_a_third_turn_continues_with_the_second() -> None:
    chats = prompts()
    chats.keep(chats.prepare(Chat(FIRST), ALONE), ANSWER, [*b"TWO"])
    second = chats.prepare(Chat(SECOND), ALONE)
    answer = {"role": "assistant", "content": "four"}
    chats.keep(second, answer, [*b"FOUR"])
    third = chats.prepare(Chat([*SECOND, answer, {"role": "user", "content": "five"}]), ALONE)
    assert text(third.token_ids) == "[user:one][assistant:TWO][user:three][assistant:FOUR][user:five][assistant:"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "ONE"}, *SECOND[1:]],
        [*FIRST, {"role": "assistant", "content": "two "}, SECOND[2]],
        [{"role": "system", "content": "be"}, *SECOND],
    ],
)
def test_a_conversation_that_differs_is_written_by_the_template(messages: list[dict[str, str]]) -> None:
    chats = prompts()
    chats.keep(chats.prepare(Chat(FIRST), ALONE), ANSWER, [*b"TWO"])
    assert "TWO" not in text(chats.prepare(Chat(messages), ALONE).token_ids)


@pytest.mark.parametrize("chat", [Chat(SECOND, tools=[{"type": "function"}]), Chat(SECOND, options={"thinking": True})])
def test_other_tools_and_options_are_another_conversation(chat: Chat) -> None:
    chats = prompts()
    chats.keep(chats.prepare(Chat(FIRST), ALONE), ANSWER, [*b"TWO"])
    assert "TWO" not in text(chats.prepare(chat, ALONE).token_ids)


def test_another_tenant_has_other_conversations() -> None:
    chats = prompts()
    mine, other = Caller("a", b"salt of a"), Caller("b", b"salt of b")
    chats.keep(chats.prepare(Chat(FIRST), mine), ANSWER, [*b"TWO"], mine.tenant)
    assert "TWO" in text(chats.prepare(Chat(SECOND), mine).token_ids)
    assert "TWO" not in text(chats.prepare(Chat(SECOND), other).token_ids)


def test_calls_are_equal_by_their_arguments() -> None:
    """Clients write the JSON of a call anew, and templates write it in their own way."""

    def message(arguments: object) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    start = conversation_digests(b"", None, FIRST)[-1]
    assert next_digest(start, message('{"a": 1,  "b": 2}')) == next_digest(start, message({"b": 2, "a": 1}))
    assert next_digest(start, message('{"a": 1}')) != next_digest(start, message('{"a": 2}'))
    assert next_digest(start, {"role": "assistant", "content": ""}) == next_digest(start, {"role": "assistant"})
    assert next_digest(start, ANSWER) == next_digest(start, {**ANSWER, "reasoning": "so"})


def test_an_answer_to_be_continued_is_not_replaced() -> None:
    chats = prompts()
    chats.keep(chats.prepare(Chat(FIRST), ALONE), ANSWER, [*b"TWO"])
    prepared = chats.prepare(Chat([*FIRST, ANSWER], is_continued=True), ALONE)
    assert "TWO" not in text(prepared.token_ids)
    assert prepared.conversation is None


def test_no_more_tokens_are_kept_than_configured() -> None:
    kept = KeptAnswers(10)
    for number in range(5):
        kept.keep(bytes([number]), [number] * 4)
    assert kept.num_tokens == 8
    assert [number for number in range(5) if kept.find(bytes([number])) is not None] == [3, 4]
    kept.keep(b"\4", [9])
    assert kept.num_tokens == 5
    kept.keep(b"large", [0] * 11)
    assert kept.find(b"large") is None
    kept.find(b"\3")
    kept.keep(b"new", [0] * 6)
    assert kept.find(b"\4") is None, "the one that was used least recently goes first"
    assert kept.num_tokens == 10
