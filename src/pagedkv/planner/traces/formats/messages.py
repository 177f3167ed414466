"""Splits a conversation's messages into parts of text, so that conversations share whole parts.

A chat template puts marks around messages, which differ from model to model. Here a message is one part for its role,
then the parts of its content; the prompt ends with the role of the answer. So the next turn of a conversation begins
with the parts of the previous turn, including its answer. Ids and caching directives for a provider are left out, since
they are not part of the prompt. A picture, or other content that is not text, is a part as well, identified by its
data; a model does not read it as text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.planner.traces.formats.parsing import checked_tokens
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.texts import TextTokens, marked_tokens

__all__ = ["PICTURE_TOKENS", "Part", "answer_parts", "ids_part", "joined_parts", "prompt_parts", "text_part"]

ANSWERER: Final = "assistant"
NO_CONTENT: Final = frozenset({"cache_control", "id", "prompt_cache_breakpoint"})
"""Keys that do not change the prompt."""
PICTURE_TOKENS: Final = 1000
"""Tokens of a picture without a stated length: about what providers charge for a million pixels."""
BYTES_PER_TOKEN: Final = 4
MEDIA_TYPES: Final = frozenset(
    {"image", "image_url", "input_image", "input_audio", "audio", "audio_url", "video", "video_url", "document", "file"}
    | {"input_file", "blob", "uri"}
)
NAMED_CONTENT: Final = ("text", "content", "input_text", "output_text", "refusal", "thinking")
"""Keys for the text of a content part: of OpenAI, Anthropic, and OpenTelemetry's conventions."""
TURN_TYPES: Final = frozenset({"function_call", "function_call_output", "reasoning", "item_reference"})
"""Items of an input that are not messages, in the Responses API."""
EMPTY: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A piece of a prompt or an answer that has the same tokens wherever it is repeated.

    Args:
        pieces: int32 ``[n]``, tokens made from its text; equal texts have equal ones.
        weight: its share of a stated length of the whole: bytes of the text, since the bytes per token differ little
            between scripts.
        is_media: whether it is a picture, a sound or a file, with a round number of pieces.
        is_exact: whether its pieces are the tokens that were computed, taken from the log.
        num_characters: characters of its text, which a log may have cut.
    """

    pieces: Int32Array
    weight: int
    is_media: bool = False
    is_exact: bool = False
    num_characters: int = 0


def text_part(text: str, texts: TextTokens) -> Part:
    """Make a part from a text. O(characters)."""
    weight = len(text.encode("utf-8", "surrogatepass"))
    return Part(texts.token_ids(text), weight, num_characters=len(text))


def ids_part(token_ids: Int32Array) -> Part:
    """Make a part from tokens in the log."""
    return Part(token_ids, BYTES_PER_TOKEN * len(token_ids), is_exact=True)


def joined_parts(parts: Sequence[Part]) -> Int32Array:
    """Concatenate the pieces of parts."""
    return np.concatenate([EMPTY, *(part.pieces for part in parts)])


def prompt_parts(line: Line, body: Mapping[str, Any], texts: TextTokens) -> list[Part] | None:
    """Read the parts of a request's body: tools, system text, messages; or its prompt. None if it has none of these.

    Raises:
        TraceError: the prompt is a list of tokens, and an entry is not a token.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [text_part(prompt, texts)]
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        return [ids_part(checked_tokens(line, prompt))]
    turns = _turns(body)
    if turns is None:
        return None
    parts = _with_role("tools", body["tools"], texts) if body.get("tools") else []
    for key in ("system", "instructions"):
        if body.get(key):
            parts += _with_role("system", body[key], texts)
    for turn in turns:
        parts += _turn(turn, texts)
    return [*parts, _role(ANSWERER, texts)]


def answer_parts(answer: object, texts: TextTokens) -> list[Part] | None:
    """Read the parts of an answer: a text, parts, or a message; None if there is none."""
    if isinstance(answer, dict) and "role" in answer:
        return _content(answer, texts)
    return None if answer is None else list(_parts(answer, texts))


def _turns(body: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the turns: ``messages``, or ``input`` of the Responses API, which may be one text."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [turn for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else None


def _turn(turn: Mapping[str, Any], texts: TextTokens) -> list[Part]:
    if "role" not in turn and turn.get("type") in TURN_TYPES:
        return [text_part(_plain(turn), texts)]
    return [_role(str(turn.get("role", "")), texts), *_content(turn, texts)]


def _content(message: Mapping[str, Any], texts: TextTokens) -> list[Part]:
    """Read the parts of a message's content, and of its tool calls."""
    calls = message.get("tool_calls")
    content = message.get("content", message.get("parts"))
    return [*_parts(content, texts), *(_parts(calls, texts) if calls else ())]


def _with_role(role: str, content: object, texts: TextTokens) -> list[Part]:
    return [_role(role, texts), *_parts(content, texts)]


def _role(role: str, texts: TextTokens) -> Part:
    return text_part(f"<|{role}|>", texts)


def _parts(content: object, texts: TextTokens) -> Iterator[Part]:
    if content is None:
        return
    if isinstance(content, str):
        yield text_part(content, texts)
        return
    for part in content if isinstance(content, list) else [content]:
        if _is_media(part):
            yield _media(part)
            continue
        if isinstance(part, dict) and isinstance(part.get("content"), list):  # the result of a tool has its own parts
            yield from _parts(part["content"], texts)
            continue
        named = (part.get(key) for key in NAMED_CONTENT) if isinstance(part, dict) else ()
        text = next((text for text in named if isinstance(text, str)), None)
        yield text_part(_plain(part) if text is None else text, texts)


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in MEDIA_TYPES and not isinstance(part.get("text"), str)


def _media(part: object) -> Part:
    digest = sha256(_plain(part).encode("utf-8", "surrogatepass")).digest()
    return Part(marked_tokens(digest, PICTURE_TOKENS), BYTES_PER_TOKEN * PICTURE_TOKENS, is_media=True)


def _plain(part: object) -> str:
    """Write a part that is not text (an image, a tool call, its result) as a text; equal parts give equal texts."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if key not in NO_CONTENT}
    return part if isinstance(part, str) else json.dumps(part, sort_keys=True)
