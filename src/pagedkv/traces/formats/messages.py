"""A conversation's messages as tokens, message by message, so that what conversations share they share as tokens.

A chat template puts marks around messages, which differ from model to model. Here a message is the tokens of its role,
then those of its parts; the prompt ends with the role of who answers. So a conversation that goes on begins with the
tokens of the one before, its answer included. What a provider is told about caching, and ids, are left out: they are
not part of the prompt.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from pagedkv.arrays import Int32Array
from pagedkv.traces.formats.parsing import checked_tokens
from pagedkv.traces.lines import Line
from pagedkv.traces.texts import TextTokens

__all__ = ["answer_tokens", "prompt_tokens"]

ANSWERER: Final = "assistant"
NO_CONTENT: Final = frozenset({"cache_control", "id"})
"""Keys whose values change without the prompt changing."""
EMPTY: Final = np.zeros(0, np.int32)


def prompt_tokens(line: Line, body: Mapping[str, Any], texts: TextTokens) -> Int32Array | None:
    """Make the tokens of a request's body: tools, system text, messages; or its prompt. None if it has none of them.

    Raises:
        TraceError: the prompt is a list of tokens, and one of them is none.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return texts.token_ids(prompt)
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        return checked_tokens(line, prompt)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    parts = [_told("tools", body["tools"], texts)] if body.get("tools") else []
    if body.get("system"):
        parts.append(_told("system", body["system"], texts))
    parts += [_message(message, texts) for message in messages if isinstance(message, dict)]
    return np.concatenate([*parts, _role(ANSWERER, texts)])


def answer_tokens(answer: object, texts: TextTokens) -> Int32Array | None:
    """Make the tokens of an answer: a text, parts, or a message; None if there is none."""
    if isinstance(answer, dict) and "role" in answer:
        return _content(answer, texts)
    return None if answer is None else np.concatenate([EMPTY, *_parts(answer, texts)])


def _message(message: Mapping[str, Any], texts: TextTokens) -> Int32Array:
    return np.concatenate([_role(str(message.get("role", "")), texts), _content(message, texts)])


def _content(message: Mapping[str, Any], texts: TextTokens) -> Int32Array:
    """Make the tokens of a message's content, and of the calls of tools beside it."""
    calls = message.get("tool_calls")
    parts = [*_parts(message.get("content"), texts), *(_parts(calls, texts) if calls else ())]
    return np.concatenate([EMPTY, *parts])


def _told(role: str, content: object, texts: TextTokens) -> Int32Array:
    return np.concatenate([_role(role, texts), *_parts(content, texts)])


def _role(role: str, texts: TextTokens) -> Int32Array:
    return texts.token_ids(f"<|{role}|>")


def _parts(content: object, texts: TextTokens) -> Iterator[Int32Array]:
    if content is None:
        return
    if isinstance(content, str):
        yield texts.token_ids(content)
        return
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else None
        yield texts.token_ids(text if isinstance(text, str) else _plain(part))


def _plain(part: object) -> str:
    """Write a part that is no text (an image, a call of a tool, its result) the same way whenever it comes again."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if key not in NO_CONTENT}
    return part if isinstance(part, str) else json.dumps(part, sort_keys=True)
