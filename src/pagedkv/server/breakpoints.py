"""Breakpoints: places in a prompt up to which a client asks to keep the prompt cached.

A breakpoint's place in tokens is the length of the common prefix of two prompts: the whole prompt, and the prompt of
the conversation up to the marked part. After a part, templates write the end of its message and the head of the next
one; the prefix includes them as far as both prompts have them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from pagedkv.engine import Breakpoint, Chat
from pagedkv.errors import RequestError
from pagedkv.server.access import Caller
from pagedkv.server.chat_prompts import ChatPrompts
from pagedkv.server.generation import PreparedPrompt

__all__ = ["MOST_BREAKPOINTS", "breakpoints_at", "num_common"]

MOST_BREAKPOINTS: Final = 4
PLACEHOLDER_QUESTION: Final = {"role": "user", "content": "?"}
"""Added after a beginning that a template refuses without a user's message. Its text is unlike that of real messages,
so that its tokens are not part of the common prefix by chance."""


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
