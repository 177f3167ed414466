"""KeptAnswers: the very tokens of conversations so far, so that a next turn continues them and hits.

A conversation that comes back has its answers as text. Tokenised anew they are often other tokens; a template leaves
their reasoning out, or writes their tool calls as other JSON. Each of these differences ends the prefix hit before the
last answer. So the server keeps the tokens that it computed, prompt and answer, by a digest of the conversation's
messages. A conversation that begins with the same messages continues with the kept tokens, and only what follows the
last known answer is tokenised.

::

    messages   system | user | assistant | user          digest of each beginning: d1 d2 d3 d4
    kept                      d3 -> tokens of prompt and answer
    prompt     `------ kept tokens -----'`- template's text behind the answer, tokenised -'
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

import numpy as np
from pydantic_core import from_json

from pagedkv.memory.contract.arrays import Int32Array

__all__ = ["KeptAnswers", "conversation_digests", "next_digest"]

TOLD: Final = ("role", "content", "name", "tool_call_id")
"""Fields of a message that a template may write, besides its tool calls."""


@final
class KeptAnswers:
    """Tokens by the digest of the conversation that they are; those used least recently are dropped first.

    Args:
        max_tokens: tokens that are kept at most, 4 bytes each.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._by_digest: OrderedDict[bytes, Int32Array] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return self._num_tokens

    def keep(self, digest: bytes, token_ids: Sequence[int]) -> None:
        """Keep the tokens of a conversation that ended with an answer. O(tokens)."""
        if len(token_ids) > self._max_tokens:
            return
        self._drop(digest)
        self._by_digest[digest] = np.array(token_ids, np.int32)
        self._num_tokens += len(token_ids)
        while self._num_tokens > self._max_tokens:
            self._drop(next(iter(self._by_digest)))

    def find(self, digest: bytes) -> Int32Array | None:
        """Return the tokens of a conversation: int32; None where they are not kept."""
        found = self._by_digest.get(digest)
        if found is not None:
            self._by_digest.move_to_end(digest)
        return found

    def _drop(self, digest: bytes) -> None:
        self._num_tokens -= len(self._by_digest.pop(digest, ()))


def conversation_digests(salt: bytes, setting: object, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the digest of a conversation's beginning up to each of its messages.

    Args:
        salt: of its tenant; others' conversations have other digests.
        setting: what else the template writes: tools, options.
        messages: the conversation. Of an answer its content and calls count, not its reasoning, which clients drop.
    """
    digest = hashlib.sha256(salt + _canonical(setting)).digest()
    digests: list[bytes] = []
    for message in messages:
        digest = next_digest(digest, message)
        digests.append(digest)
    return digests


def next_digest(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a conversation with one message more."""
    told = (
        {name: message[name] for name in TOLD if message.get(name) not in {None, ""}} if _is_plain(message) else message
    )
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return hashlib.sha256(digest + _canonical([told, calls])).digest()


def _is_plain(message: Mapping[str, Any]) -> bool:
    return all(isinstance(message.get(name), str | None) for name in TOLD)


def _call(call: Mapping[str, Any]) -> object:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = from_json(arguments)
    return [function.get("name"), arguments]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode(errors="surrogatepass")
