"""Breakpoints: the places of a prompt up to which ``cache_control`` asks that it stays cached.

A breakpoint's place in tokens is the length of the prefix that the whole prompt has in common with the prompt of the
conversation up to the marked block. Templates write the end of a message and the head of the next one behind a block;
as far as these are common to both they belong to the prefix.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from pagedkv.memory.contract.errors import RequestError
from pagedkv.serving.engine import Breakpoint, Chat
from pagedkv.serving.server.access import Caller
from pagedkv.serving.server.anthropic.conversations import Block, Conversation
from pagedkv.serving.server.anthropic.requests import CacheControl
from pagedkv.serving.server.chat_prompts import ChatPrompts
from pagedkv.serving.server.errors import ApiError
from pagedkv.serving.server.generation import Prepared

__all__ = ["HOUR_S", "breakpoints_of", "num_common"]

MOST: Final = 4
MINUTES_S: Final = 300.0
HOUR_S: Final = 3600.0
SOME_QUESTION: Final = {"role": "user", "content": "?"}
"""Stands behind a beginning that a template refuses by itself."""


def breakpoints_of(
    conversation: Conversation, whole: CacheControl | None, prepared: Prepared, chats: ChatPrompts, caller: Caller
) -> tuple[Breakpoint, ...]:
    """Find the breakpoints of a conversation, in their order. O(text) for each.

    Args:
        conversation: with ``cache_control`` in some of its blocks and tools.
        whole: the request's own ``cache_control``, which marks the last block.
        prepared: the whole prompt.
        chats: makes prompts; caller: whose request it is.

    Raises:
        ApiError: there are more than four, or one is not what it must be.
    """
    marked = list(_marked(conversation))
    if whole is not None:
        marked.append((conversation, whole))
    if len(marked) > MOST:
        raise ApiError(
            400, f"at most {MOST} blocks may have cache_control, and {len(marked)} have", param="cache_control"
        )
    places: list[Breakpoint] = []
    for beginning, control in marked:
        num_tokens = _num_tokens(beginning, conversation, prepared, chats, caller)
        if num_tokens:
            places.append(Breakpoint(num_tokens, HOUR_S if control.ttl == "1h" else MINUTES_S))
    return tuple(places)


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the leading tokens that two sequences have in common.

    >>> num_common([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = min(len(first), len(second))
    differs = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(differs.argmax()) if differs.any() else length


def _marked(whole: Conversation) -> Iterator[tuple[Conversation, CacheControl]]:
    """List the marked blocks, each as the conversation up to it."""
    for place, tool in enumerate(whole.tools):
        if (control := _control(tool, f"tools.{place}")) is not None:
            yield Conversation([], [], whole.tools[: place + 1], whole.options), control
    for place, block in enumerate(whole.system):
        if (control := _control(block, f"system.{place}")) is not None:
            yield Conversation(whole.system[: place + 1], [], whole.tools, whole.options), control
    for number, (role, blocks) in enumerate(whole.turns):
        for place, block in enumerate(blocks):
            where = f"messages.{number}.content.{place}"
            for last, control in _marked_within(block, where):
                turns = [*whole.turns[:number], (role, [*blocks[:place], last])]
                yield Conversation(whole.system, turns, whole.tools, whole.options), control


def _marked_within(block: Block, where: str) -> Iterator[tuple[Block, CacheControl]]:
    if block["type"] == "tool_result":
        for place, part in enumerate(block["content"]):
            if (control := _control(part, f"{where}.content.{place}")) is not None:
                yield {**block, "content": block["content"][: place + 1]}, control
    if (control := _control(block, where)) is not None:
        yield block, control


def _control(block: Block, where: str) -> CacheControl | None:
    given = block.get("cache_control")
    if given is None:
        return None
    try:
        return CacheControl.model_validate(given)
    except ValueError as problem:
        raise ApiError(
            400, f'{where}.cache_control must have type "ephemeral" and may have ttl "5m" or "1h"', param=where
        ) from problem


def _num_tokens(
    beginning: Conversation, whole: Conversation, prepared: Prepared, chats: ChatPrompts, caller: Caller
) -> int:
    messages = beginning.messages()
    if messages == whole.messages() and beginning.tools == whole.tools:
        return len(prepared.token_ids)
    for behind in ([], [SOME_QUESTION]):
        if not messages and not behind:
            continue
        chat = Chat([*messages, *behind], tools=beginning.functions() or None, options=whole.options)
        try:
            return num_common(chats.prepare(chat, caller).token_ids, prepared.token_ids)
        except RequestError:
            continue
    return 0
