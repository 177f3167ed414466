"""ChatPrompts: turns a conversation into token ids, by the tokenizer's template and the kept answers."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from pagedkv.engine.chat import Chat, chat_text
from pagedkv.engine.llm import plain_encoding
from pagedkv.errors import RequestError
from pagedkv.server.access import Caller
from pagedkv.server.generation import PreparedPrompt
from pagedkv.server.kept_answers import KeptAnswers, conversation_digests, next_digest

__all__ = ["ChatPrompts", "longest_token", "require_short"]

ANSWER_ROLE: Final = "assistant"
LONGEST_TOKEN: Final = 1024
"""Assumed length of the longest token, in characters, where a tokenizer does not list its tokens."""


@final
class ChatPrompts:
    """Turns conversations into prompts.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.
        kept: the kept answers.
        longest_text: most characters of a text; longer ones are refused before they are tokenised.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - of transformers, or like it
        kept: KeptAnswers,
        longest_text: int = 2**40,
    ) -> None:
        self._longest_text = longest_text
        self._tokenizer = tokenizer
        self._encode = None if tokenizer is None else plain_encoding(tokenizer)
        self._kept = kept
        self._mark = f"answer{secrets.token_hex(16)}"

    @property
    def num_kept_tokens(self) -> int:
        """Number of tokens that are kept for next turns."""
        return self._kept.num_tokens

    def prepare(self, chat: Chat, caller: Caller) -> PreparedPrompt:
        """Turn a conversation into a prompt. O(its text).

        Raises:
            RequestError: there is no template, or the template refuses the conversation.
        """
        setting = [chat.tools, chat.template, dict(chat.options), chat.is_continued]
        digests = conversation_digests(caller.salt, setting, chat.messages)
        conversation = None if chat.is_continued else digests[-1] if digests else None
        known = None if chat.is_continued else self._continued(chat, digests, caller)
        if known is not None:
            token_ids, num_kept_tokens = known
            return PreparedPrompt(token_ids, conversation, num_kept_tokens)
        text = chat_text(self._tokenizer, chat)
        assert self._encode is not None, "a template without a tokenizer"
        require_short(text, self._longest_text)
        return PreparedPrompt(self._encode(text), conversation)

    def keep(
        self, prepared: PreparedPrompt, message: Mapping[str, Any], token_ids: Sequence[int], tenant: str | None = None
    ) -> None:
        """Keep the tokens of a conversation and its answer for the next turn.

        Args:
            prepared: the conversation's prompt.
            message: the answer, as the client got it.
            token_ids: the answer's tokens, without the token that ended it.
            tenant: the tenant of the conversation.
        """
        if prepared.conversation is not None:
            digest = next_digest(prepared.conversation, message)
            self._kept.keep(digest, [*prepared.token_ids, *token_ids], tenant)

    def _continued(self, chat: Chat, digests: Sequence[bytes], caller: Caller) -> tuple[list[int], int] | None:
        """Find the last kept answer; return its conversation's tokens and those after it, and the number kept."""
        for place in range(len(digests) - 1, -1, -1):
            if chat.messages[place].get("role") != ANSWER_ROLE:
                continue
            kept = self._kept.find(digests[place], caller.tenant)
            if kept is None:
                continue
            tail = self._tail_after(chat, place)
            if tail is None or self._encode is None:
                return None
            require_short(tail, self._longest_text)
            return [*kept.tolist(), *self._encode(tail)], len(kept)
        return None

    def _tail_after(self, chat: Chat, place: int) -> str | None:
        """Return the text that the template writes after a message; None if that text cannot be separated."""
        marked = {"role": ANSWER_ROLE, "content": self._mark}
        messages = [*chat.messages[:place], marked, *chat.messages[place + 1 :]]
        try:
            text = chat_text(self._tokenizer, Chat(messages, chat.tools, chat.template, options=chat.options))
        except Exception:  # noqa: BLE001 - a template that needs the calls before their results: render the whole chat
            return None
        _, found, tail = text.partition(self._mark)
        return tail if found and self._mark not in tail else None


def longest_token(tokenizer: Any) -> int:  # noqa: ANN401 - of transformers, or like it
    """Return the number of characters of the longest token; a byte token counts each byte. O(vocabulary)."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return max(map(len, vocabulary), default=LONGEST_TOKEN)


def require_short(text: str, longest: int) -> None:
    """Refuse a text too long for any prompt, before it is tokenised. Raises RequestError."""
    if len(text) > longest:
        raise RequestError(
            f"the text has {len(text):,} characters, more than any prompt of the longest sequence can have: {longest:,}"
        )
