"""Breakpoints: the places of a prompt up to which a client asks that it stays cached.

A breakpoint's place in tokens is the length of the prefix that the whole prompt has in common with the prompt of the
conversation up to the marked part. Templates write the end of a message and the head of the next one behind a part; as
far as these are common to both they belong to the prefix.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from pagedkv.memory.contract.errors import RequestError
from pagedkv.serving.engine import Breakpoint, Chat
from pagedkv.serving.server.access import Caller
from pagedkv.serving.server.chat_prompts import ChatPrompts
from pagedkv.serving.server.generation import Prepared

__all__ = ["MOST_BREAKPOINTS", "breakpoints_at", "num_common"]

MOST_BREAKPOINTS: Final = 4
SOME_QUESTION: Final = {"role": "user", "content": "?"}
"""Stands behind a beginning that a template refuses by itself, so that nothing behind it is common by chance."""


def breakpoints_at(
    beginnings: Sequence[tuple[Chat, float]], whole: Chat, prepared: Prepared, chats: ChatPrompts, caller: Caller
) -> tuple[Breakpoint, ...]:
    """Find places in tokens. O(text) for each.

    Args:
        beginnings: the conversation up to each place, at most four, and seconds for which it is to stay cached.
        whole: the conversation; prepared: its prompt.
        chats: makes prompts; caller: whose request it is.

    Returns:
        The breakpoints, without those that have no token in common with the prompt.
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


def _num_tokens(beginning: Chat, whole: Chat, prepared: Prepared, chats: ChatPrompts, caller: Caller) -> int:
    if beginning.messages == whole.messages and beginning.tools == whole.tools:
        return len(prepared.token_ids)
    for behind in ([], [SOME_QUESTION], [SOME_QUESTION, *whole.messages[-1:]]):
        chat = replace(beginning, messages=[*beginning.messages, *behind], is_continued=False)
        try:
            return num_common(chats.prepare(chat, caller).token_ids, prepared.token_ids)
        except RequestError:  # no message yet, or a template that refuses a conversation without its question
            continue
    return 0
