"""Diagnostics: why a prompt hit fewer tokens than the prompt of an earlier message had cached.

For each message the server keeps digests of the parts of its prompt. The first part that differs, in the order in which
templates write the parts, is the reason; the engine's explanation gives the tokens and the position. No text is kept,
and only the tenant that sent a message can refer to it. Where no part differs and the prompt still hits fewer tokens,
the content was evicted: the reason is ``unavailable``, with the engine's cause beside it.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from pagedkv.contract.answers import Explanation
from pagedkv.server.access import Caller
from pagedkv.server.anthropic.conversations import IGNORED_KINDS, Blocks, Conversation
from pagedkv.server.anthropic.requests import MessagesRequest
from pagedkv.server.usage import as_explanation

__all__ = ["Fingerprint", "MessageMemory", "cache_miss_reason", "fingerprint_of"]

NUM_DIGEST_BYTES: Final = 16
DEFAULT_NBYTES: Final = 16 * 2**20
BASE_NBYTES: Final = 512
"""Approximate size of a fingerprint without the digests of its messages, in bytes."""


@final
@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of the parts of a prompt.

    Args:
        model, system, tools: digests of these parts.
        beginnings: 16 bytes for each message: the digest of all messages up to it.
        num_reusable: leading tokens of the prompt that later prompts can hit; 0 until they are computed.
    """

    model: bytes
    system: bytes
    tools: bytes
    beginnings: bytes
    num_reusable: int = 0

    @property
    def nbytes(self) -> int:
        """Approximate size in memory, in bytes."""
        return BASE_NBYTES + len(self.beginnings)

    def continues(self, before: "Fingerprint") -> bool:
        """Return whether the messages of one prompt begin with those of the other."""
        length = min(len(self.beginnings), len(before.beginnings))
        return self.beginnings[:length] == before.beginnings[:length]


@final
class MessageMemory:
    """Fingerprints by message; the oldest are dropped first.

    Args:
        max_nbytes: most bytes of all fingerprints.
    """

    def __init__(self, max_nbytes: int = DEFAULT_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._by_message: OrderedDict[tuple[str | None, str], Fingerprint] = OrderedDict()

    def keep(self, caller: Caller, message_id: str, fingerprint: Fingerprint) -> None:
        """Keep the fingerprint of a message that was answered."""
        self._by_message[caller.tenant, message_id] = fingerprint
        self._nbytes += fingerprint.nbytes
        while self._nbytes > self._max_nbytes:
            _, dropped = self._by_message.popitem(last=False)
            self._nbytes -= dropped.nbytes

    def find(self, caller: Caller, message_id: str) -> Fingerprint | None:
        """Return the fingerprint of one of the caller's messages; None where it is not kept."""
        return self._by_message.get((caller.tenant, message_id))


def fingerprint_of(body: MessagesRequest, conversation: Conversation) -> Fingerprint:
    """Compute the digests of a request. O(text)."""
    beginnings: list[bytes] = []
    digest = b""
    for role, blocks in conversation.turns:
        digest = _digest([digest.hex(), role, _plain(blocks)])
        beginnings.append(digest)
    return Fingerprint(
        _digest(body.model),
        _digest([_plain(conversation.system), dict(conversation.options)]),
        _digest(_plain(conversation.tools)),
        b"".join(beginnings),
    )


def cache_miss_reason(
    before: Fingerprint | None, now: Fingerprint, num_hit: int, explanation: Explanation | None, caller: Caller
) -> dict[str, Any] | None:
    """Return why a prompt hit fewer tokens than the earlier one had cached.

    None if it hit as many and no part of the prompt differs.

    Args:
        before: fingerprint of the earlier message; None: it is not kept.
        now: fingerprint of this message, with ``num_reusable``.
        num_hit: cached tokens of this message's prompt.
        explanation: the engine's explanation of where the hit ended.
        caller: the sender of the request.

    Returns:
        Anthropic's ``cache_miss_reason``, with our ``cause`` and ``position`` (of the first token that missed).
    """
    if before is None:
        return {"type": "previous_message_not_found"}
    num_missed = max(0, before.num_reusable - num_hit)
    kind = _difference(before, now)
    if kind is None:
        num_missed = max(0, min(before.num_reusable, now.num_reusable) - num_hit)
        if not num_missed:
            return None
        kind = "unavailable"
    fields = as_explanation(explanation, caller) or {}
    place: dict[str, Any] = {name: fields[name] for name in ("cause", "position") if name in fields}
    return {"type": kind, "cache_missed_input_tokens": num_missed, **place}


def _difference(before: Fingerprint, now: Fingerprint) -> str | None:
    if before.model != now.model:
        return "model_changed"
    if before.system != now.system:
        return "system_changed"
    if before.tools != now.tools:
        return "tools_changed"
    if not now.continues(before):
        return "messages_changed"
    return None


def _plain(blocks: Blocks) -> list[dict[str, Any]]:
    """Return blocks without the fields that do not change the prompt."""
    return [
        {
            name: _plain(value) if _is_result(block) and name == "content" and isinstance(value, list) else value
            for name, value in block.items()
            if name != "cache_control"
        }
        for block in blocks
        if not _is_ignored(block)
    ]


def _is_ignored(block: Mapping[str, Any]) -> bool:
    kind = block.get("type")
    return isinstance(kind, str) and kind in IGNORED_KINDS


def _is_result(block: Mapping[str, Any]) -> bool:
    """Return whether a block's content is a list of blocks, each checked."""
    return block.get("type") == "tool_result"


def _digest(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:NUM_DIGEST_BYTES]
