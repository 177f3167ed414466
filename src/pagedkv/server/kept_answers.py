"""KeptAnswers: the exact tokens of earlier turns, so that a conversation's next turn hits all of them.

A client sends back earlier answers as text. Tokenising this text often gives other tokens than the model sampled; and
templates leave out reasoning, or write tool calls as other JSON. Each of these differences ends the prefix hit before
the last answer. So the server keeps the tokens of prompt and answer, by a digest of the conversation's messages. A
conversation that begins with the same messages begins with the kept tokens, and only the text after the last kept
answer is tokenised.

::

    messages   system | user | assistant | user          digest of each beginning: d1 d2 d3 d4
    kept                      d3 -> tokens of prompt and answer
    prompt     `------ kept tokens -----'`- template's text after the answer, tokenised --'
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

import numpy as np
from pydantic_core import from_json

from pagedkv.contract.arrays import Int32Array

__all__ = ["KeptAnswers", "conversation_digests", "next_digest"]

TEMPLATE_FIELDS: Final = ("role", "content", "name", "tool_call_id")
"""Fields of a message that a template may write, apart from its tool calls."""


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

    def keep(self, digest: bytes, token_ids: Sequence[int], tenant: str | None = None) -> None:
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

    def _drop(self, tenant: str | None, digest: bytes) -> None:
        dropped = self._kept.get(tenant, OrderedDict()).pop(digest, None)
        if dropped is None:
            return
        self._num_tokens[tenant] -= len(dropped)
        if not self._kept[tenant]:
            del self._kept[tenant], self._num_tokens[tenant]


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
    fields = (
        {name: message[name] for name in TEMPLATE_FIELDS if message.get(name) not in {None, ""}}
        if _is_plain(message)
        else message
    )
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return hashlib.sha256(digest + _canonical([fields, calls])).digest()


def _is_plain(message: Mapping[str, Any]) -> bool:
    return all(isinstance(message.get(name), str | None) for name in TEMPLATE_FIELDS)


def _call(call: Mapping[str, Any]) -> object:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = from_json(arguments)
    return [function.get("name"), arguments]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode(errors="surrogatepass")
