"""Breakpoints of OpenAI's protocols: parts with ``prompt_cache_breakpoint``, and ``prompt_cache_options``.

With options of the mode ``implicit``, the default, the whole prompt and the last three breakpoints are leased; with the
mode ``explicit``, only the last four breakpoints. Without options and breakpoints no part of the prompt is leased: its
blocks stay cached until they are evicted.
"""

from collections.abc import Iterator
from typing import Final

from pagedkv.engine import Breakpoint, Chat
from pagedkv.server.access import Caller
from pagedkv.server.breakpoints import MOST_BREAKPOINTS, breakpoints_at
from pagedkv.server.chat_prompts import ChatPrompts
from pagedkv.server.errors import ApiError
from pagedkv.server.generation import PreparedPrompt
from pagedkv.server.openai.request_fields import as_chat
from pagedkv.server.openai.requests import CacheBreakpoint, ChatRequest

__all__ = ["DEFAULT_TTL", "breakpoints_of"]

DEFAULT_TTL: Final = "30m"
SECONDS: Final = {"30m": 1800.0, "12h": 43_200.0}


def breakpoints_of(
    body: ChatRequest, chat: Chat, prepared: PreparedPrompt, chats: ChatPrompts, caller: Caller
) -> tuple[Breakpoint, ...]:
    """Find the breakpoints of a request, in their order. O(text) for each.

    Args:
        body: the request.
        chat: its conversation.
        prepared: its prompt.
        chats: makes prompts.
        caller: the sender of the request.

    Raises:
        ApiError: a breakpoint is invalid.
    """
    options = body.prompt_cache_options
    ttl = (options.ttl if options else None) or DEFAULT_TTL
    last = list(_marked(body))[-MOST_BREAKPOINTS:]
    marked = [(as_chat(_beginning(body, *place)), SECONDS[each.ttl or ttl]) for place, each in last]
    if options is not None and options.mode != "explicit":
        marked = [*marked[1 - MOST_BREAKPOINTS :], (chat, SECONDS[ttl])]
    return breakpoints_at(marked[-MOST_BREAKPOINTS:], chat, prepared, chats, caller)


def _marked(body: ChatRequest) -> Iterator[tuple[tuple[int, int], CacheBreakpoint]]:
    """Yield the places of marked parts: index of the message and of the part."""
    for number, message in enumerate(body.messages):
        if not isinstance(message.content, list):
            continue
        for place, part in enumerate(message.content):
            given = part.get("prompt_cache_breakpoint")
            if given is None:
                continue
            where = f"messages[{number}].content[{place}].prompt_cache_breakpoint"
            try:
                each = CacheBreakpoint.model_validate(given)
            except ValueError as problem:
                refusal = f'{where} must have mode "explicit" and may have ttl "30m" or "12h"'
                raise ApiError(400, refusal, param=where) from problem
            yield (number, place), each


def _beginning(body: ChatRequest, number: int, place: int) -> ChatRequest:
    """Return the request with its messages cut after one part."""
    message = body.messages[number]
    assert isinstance(message.content, list), "a part of a message that has none"
    last = message.model_copy(update={"content": message.content[: place + 1]})
    return body.model_copy(update={"messages": [*body.messages[:number], last]})
