"""Breakpoints of Anthropic's protocol: blocks and tools with ``cache_control``."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from pagedkv.engine import Breakpoint
from pagedkv.server.access import Caller
from pagedkv.server.anthropic.conversations import Block, Conversation
from pagedkv.server.anthropic.requests import CacheControl
from pagedkv.server.breakpoints import MOST_BREAKPOINTS, breakpoints_at
from pagedkv.server.chat_prompts import ChatPrompts
from pagedkv.server.errors import ApiError
from pagedkv.server.generation import PreparedPrompt

__all__ = ["HOUR_S", "breakpoints_of"]

FIVE_MINUTES_S: Final = 300.0
HOUR_S: Final = 3600.0


def breakpoints_of(
    conversation: Conversation, whole: CacheControl | None, prepared: PreparedPrompt, chats: ChatPrompts, caller: Caller
) -> tuple[Breakpoint, ...]:
    """Find the breakpoints of a conversation, in their order. O(text) for each.

    Args:
        conversation: some of its blocks and tools have ``cache_control``.
        whole: the request's own ``cache_control``, which marks the last block.
        prepared: the whole prompt.
        chats: makes prompts.
        caller: the sender of the request.

    Raises:
        ApiError: there are more than four breakpoints, or one is invalid.
    """
    marked = list(islice(_marked(conversation), MOST_BREAKPOINTS + 1))  # each includes everything before it
    if whole is not None:
        marked.append((conversation, whole))
    if len(marked) > MOST_BREAKPOINTS:
        raise ApiError(
            400,
            f"at most {MOST_BREAKPOINTS} blocks may have cache_control, and this request has more",
            param="cache_control",
        )
    beginnings = [(each.chat(), HOUR_S if control.ttl == "1h" else FIVE_MINUTES_S) for each, control in marked]
    return breakpoints_at(beginnings, conversation.chat(), prepared, chats, caller)


def _marked(whole: Conversation) -> Iterator[tuple[Conversation, CacheControl]]:
    """Yield the conversation up to each marked block."""
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
