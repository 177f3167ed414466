"""ChatPrompts: turns a conversation into token ids, by the tokenizer's template and the tokens of earlier turns.

A client sends back earlier answers as text. Tokenising this text often gives other tokens than the model sampled; and
templates leave out reasoning, or write tool calls as other JSON. Each of these differences ends the prefix hit before
the last answer. So the server keeps the tokens of prompt and answer, by a digest of the conversation's messages. A
conversation that begins with the same messages begins with the kept tokens, and only the text after the last kept
answer is tokenised.

::

    messages   system | user | assistant | user          digest of each beginning: d1 d2 d3 d4
    kept                      d3 -> tokens of prompt and answer
    prompt     `------ kept tokens -----'`- template's text after the answer, tokenised --'

Breakpoints are places in a prompt up to which a client asks to keep the prompt cached. A breakpoint's place in tokens
is the length of the common prefix of two prompts: the whole prompt, and the prompt of the conversation up to the marked
part. After a part, templates write the end of its message and the head of the next one; the prefix includes them as far
as both prompts have them.
"""

import hashlib
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final

import numpy as np
from pydantic_core import from_json

from pagedkv.contract.arrays import Int32Array
from pagedkv.engine import Breakpoint
from pagedkv.engine.llm import plain_encoding
from pagedkv.engine.prompts import Chat, chat_text
from pagedkv.errors import RequestError
from pagedkv.server.config import Caller
from pagedkv.server.generation import PreparedPrompt

TEMPLATE_FIELDS: Final = ("role", "content", "name", "tool_call_id")
"""Fields of a message that a template may write, apart from its tool calls."""
ANSWER_ROLE: Final = "assistant"
LONGEST_TOKEN: Final = 1024
"""Assumed length of the longest token, in characters, where a tokenizer does not list its tokens."""
PLACEHOLDER_QUESTION: Final = {"role": "user", "content": "?"}
"""Added after a beginning that a template refuses without a user's message. Its text is unlike that of real messages,
so that its tokens are not part of the common prefix by chance."""


@final
class KeptAnswers:
    """Tokens of conversations, by the conversation's digest.

    Above the limit, the least recently used conversations of the tenant with the most tokens are dropped. So a tenant
    within its equal share loses none, whatever others do. Thread-safe.

    Args:
        max_tokens: most tokens that are kept, 4 bytes each.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._num_tokens: dict[str | None, int] = {}
        self._kept: dict[str | None, OrderedDict[bytes, Int32Array]] = {}

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are kept."""
        with self._lock:
            return sum(self._num_tokens.values())

    def keep(self, digest: bytes, token_ids: Sequence[int] | Int32Array, tenant: str | None = None) -> None:
        """Keep the tokens of a conversation that ended with an answer. O(tokens + tenants x conversations dropped)."""
        if len(token_ids) > self._max_tokens:
            return
        with self._lock:
            self._drop(tenant, digest)
            self._kept.setdefault(tenant, OrderedDict())[digest] = np.array(token_ids, np.int32)
            self._num_tokens[tenant] = self._num_tokens.get(tenant, 0) + len(token_ids)
            while sum(self._num_tokens.values()) > self._max_tokens:
                largest = max(self._num_tokens, key=self._num_tokens.__getitem__)
                self._drop(largest, next(iter(self._kept[largest])))

    def find(self, digest: bytes, tenant: str | None = None) -> Int32Array | None:
        """Return the tokens of a tenant's conversation, int32; None if they are not kept."""
        with self._lock:
            kept = self._kept.get(tenant, OrderedDict())
            found = kept.get(digest)
            if found is not None:
                kept.move_to_end(digest)
            return found

    def pop(self, digest: bytes, tenant: str | None = None) -> Int32Array | None:
        """Drop the tokens of a tenant's conversation, and return them, int32; None if they are not kept."""
        with self._lock:
            return self._drop(tenant, digest)

    def _drop(self, tenant: str | None, digest: bytes) -> Int32Array | None:
        dropped = self._kept.get(tenant, OrderedDict()).pop(digest, None)
        if dropped is None:
            return None
        self._num_tokens[tenant] -= len(dropped)
        if not self._kept[tenant]:
            del self._kept[tenant], self._num_tokens[tenant]
        return dropped


BETWEEN: Final = -1
"""Stands between two branches of a session, where no token is."""


@final
class Sessions:
    """The tokens that each session of a client has computed, so that closing it can give back what it holds.

    A session's branches, such as those of subagents, are kept apart; a turn that continues a branch replaces it.
    Bounded, and shared out among tenants, as :class:`KeptAnswers`.

    Args:
        max_tokens: most tokens that are kept, 4 bytes each.
    """

    def __init__(self, max_tokens: int) -> None:
        self._kept = KeptAnswers(max_tokens)

    def note(self, name: str, token_ids: Sequence[int], tenant: str | None) -> None:
        """Keep the tokens of a prompt and its answer. O(tokens of the session)."""
        tokens = np.array(token_ids, np.int32)
        known = _branches(self._kept.find(name.encode(), tenant))
        others = [each for each in known if not np.array_equal(each, tokens[: len(each)])]
        parts = [part for each in (*others, tokens) for part in (np.array([BETWEEN], np.int32), each)]
        self._kept.keep(name.encode(), np.concatenate(parts[1:]), tenant)

    def close(self, name: str, tenant: str | None) -> list[Int32Array]:
        """Forget a session, and return the tokens of its branches, int32 ``[n]`` each; none if it is not known."""
        return _branches(self._kept.pop(name.encode(), tenant))


def _branches(joined: Int32Array | None) -> list[Int32Array]:
    if joined is None:
        return []
    return [part[part != BETWEEN] for part in np.split(joined, np.flatnonzero(joined == BETWEEN))]


def conversation_digests(salt: bytes, setting: object, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the digest of each beginning of a conversation, one for each message.

    Args:
        salt: the tenant's salt; conversations of different tenants have different digests.
        setting: everything else that the template writes: tools, options.
        messages: the conversation. Reasoning of an answer is left out, since clients drop it.
    """
    digest = hashlib.sha256(salt + _canonical(setting)).digest()
    digests: list[bytes] = []
    for message in messages:
        digest = next_digest(digest, message)
        digests.append(digest)
    return digests


def next_digest(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a conversation extended by one message."""
    fields = message
    if all(isinstance(message.get(name), str | None) for name in TEMPLATE_FIELDS):
        fields = {name: message[name] for name in TEMPLATE_FIELDS if message.get(name) not in {None, ""}}
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return hashlib.sha256(digest + _canonical([fields, calls])).digest()


def _call(call: Mapping[str, Any]) -> object:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = from_json(arguments)
    return [function.get("name"), arguments]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode(errors="surrogatepass")


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
        is_turn = chat.opens_answer and not chat.is_continued
        conversation = digests[-1] if is_turn and digests else None
        known = self._continued(chat, digests, caller) if is_turn else None
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


def breakpoints_at(
    beginnings: Sequence[tuple[Chat, float]], whole: Chat, prepared: PreparedPrompt, chats: ChatPrompts, caller: Caller
) -> tuple[Breakpoint, ...]:
    """Find places in tokens. O(text) for each.

    Args:
        beginnings: the conversation up to each place, at most four, and the seconds for which to keep it cached.
        whole: the conversation.
        prepared: the prompt of ``whole``.
        chats: makes prompts.
        caller: the sender of the request.

    Returns:
        The breakpoints, without those that share no token with the prompt.
    """
    places = [(_num_tokens(chat, whole, prepared, chats, caller), keep_for_s) for chat, keep_for_s in beginnings]
    return tuple(Breakpoint(num_tokens, keep_for_s) for num_tokens, keep_for_s in places if num_tokens)


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the leading tokens that two sequences have in common.

    >>> num_common([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = min(len(first), len(second))
    differs = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(differs.argmax()) if differs.any() else length


def _num_tokens(beginning: Chat, whole: Chat, prepared: PreparedPrompt, chats: ChatPrompts, caller: Caller) -> int:
    if beginning.messages == whole.messages and beginning.tools == whole.tools:
        return len(prepared.token_ids)
    for added in ([], [PLACEHOLDER_QUESTION], [PLACEHOLDER_QUESTION, *whole.messages[-1:]]):
        chat = replace(beginning, messages=[*beginning.messages, *added], is_continued=False)
        try:
            return num_common(chats.prepare(chat, caller).token_ids, prepared.token_ids)
        except RequestError:  # no message yet, or a template that requires a user's message
            continue
    return 0
