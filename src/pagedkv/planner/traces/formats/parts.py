"""Conversations and answers of logs as parts of text, so that conversations share whole parts.

Bodies and answers have the shapes of OpenAI's and Anthropic's interfaces, and of those like them: a body has
``messages`` or ``prompt``; in the Responses API ``input``, in Gemini's ``contents``, in Cohere's ``message`` and
``chat_history``. An answer has ``choices``, ``content`` or ``output``.

A chat template puts marks around messages, which differ from model to model. Here a message is one part for its role,
then the parts of its content; the prompt ends with the role of the answer. So the next turn of a conversation begins
with the parts of the previous turn, including its answer. Ids and caching directives for a provider are left out, since
they are not part of the prompt. A picture, or other content that is not text, is a part as well, identified by its
data; a model does not read it as text.

Logs name a message's role and text in many ways (:func:`_message`). A message whose text is under none of the known
keys makes the content of its whole prompt unknown, with the reason: it is never taken for an empty one, since then all
such prompts would be equal.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

import msgspec
import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.planner.traces.formats.parsing import checked_tokens
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.token_blocks import TextTokens, marked_tokens

JsonObject = Mapping[str, Any]
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
MEDIA_KEYS: Final = ("inlineData", "inline_data", "fileData", "file_data", "image", "video", "document", "audio")
"""Keys of a part that holds an object of media: Gemini's and Bedrock's, whose parts have no type."""
NAMED_CONTENT: Final = ("text", "content", "input_text", "output_text", "refusal", "thinking")
"""Keys for the text of a content part: of OpenAI, Anthropic, and OpenTelemetry's conventions."""
TEXT_KEYS: Final = ("content", "contents", "parts", "text", "value", "message")
"""Keys for the content of a message: the first that has any counts."""
CALL_KEYS: Final = ("tool_calls", "function_call")
ROLE_KEYS: Final = ("role", "from", "type", "speaker", "author")
ENVELOPES: Final = ("message", "data", "kwargs")
"""Keys of an object within a message that has its text."""
FLAT: Final = ("message.", "message_content.")
"""What OpenInference's keys begin with."""
ROLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("ai", "assistant", "bard", "bing", "chatbot", "chatgpt", "gpt", "model"), "assistant"),
    "system": "system",
    "tool": "tool",
}
"""Roles, by the names that logs have for them; others stay as they are."""
TURNS: Final = ("messages", "input", "contents", "prompt")
TOOLS: Final = ("tools", "toolConfig", "functions")
SYSTEMS: Final = ("system", "instructions", "systemInstruction", "system_instruction", "preamble")
SHOWN: Final = 8
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
        is_mark: whether it is no content of the log: it marks a role, or stands for what the log leaves out.
        num_characters: characters of its text, which a log may have cut.
        unknown: why its content is not known, in words for users; None for content that is.
    """

    pieces: Int32Array
    weight: int
    is_media: bool = False
    is_exact: bool = False
    is_mark: bool = False
    num_characters: int = 0
    unknown: str | None = None


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


def unknown_part(reason: str) -> Part:
    """Make a part for content that a log does not show."""
    return Part(EMPTY, 0, unknown=reason)


def prompt_parts(line: Line, body: Mapping[str, Any], texts: TextTokens) -> list[Part] | None:
    """Read the parts of a request's body: tools, system text, messages; or its prompt. None if it has none of these.

    Raises:
        TraceError: the prompt is a list of tokens, and an entry is not a token.
    """
    prompt = body.get("prompt", body.get("inputText"))
    if isinstance(prompt, str):
        return [text_part(prompt, texts)]
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        return [ids_part(checked_tokens(line, prompt))]
    turns = _turns(body)
    if turns is None:
        return None
    parts = []
    for key in TOOLS:
        if body.get(key):
            parts += _headed("tools", body[key], texts)
    for key in SYSTEMS:
        if body.get(key):
            parts += _headed("system", _inside(body[key]), texts)
    for turn in turns:
        parts += turn_parts(turn, texts)
    return [*parts, role_part(ANSWERER, texts)]


def answer_parts(answer: object, texts: TextTokens) -> list[Part] | None:
    """Read the parts of an answer: a text, parts, or a message; None if there is none."""
    if isinstance(answer, dict) and not answer.keys().isdisjoint(("role", *ENVELOPES, "message.role")):
        return _content(_message(answer), texts)
    return None if answer is None else list(_parts(answer, texts))


def _turns(body: Mapping[str, Any]) -> list[object] | None:
    """Return the turns: ``messages``, ``input`` of the Responses API, ``contents`` of Gemini's, Cohere's history."""
    if isinstance(body.get("message"), str):
        return [*(body.get("chat_history") or ()), {"role": "user", "message": body["message"]}]
    turns = as_list(next((body[key] for key in TURNS if body.get(key) is not None), None))
    if isinstance(turns, str):
        return [turns]
    if isinstance(turns, list) and len(turns) == 1 and isinstance(turns[0], list):
        turns = turns[0]  # LangChain's batch of one
    return turns if isinstance(turns, list) else None


def turn_parts(turn: object, texts: TextTokens) -> list[Part]:
    """Read the parts of a turn: the mark of its role, and its content; a text is a user's."""
    if isinstance(turn, str):
        turn = {"role": "user", "content": turn}
    if isinstance(turn, list) and len(turn) == len(("role", "text")) and all(isinstance(each, str) for each in turn):
        turn = {"role": turn[0], "content": turn[1]}
    if not isinstance(turn, dict):
        return [unknown_part(f"a message is {turn!r:.40}")]
    if "role" not in turn and turn.get("type") in TURN_TYPES:
        return [text_part(_plain(turn), texts)]
    message = _message(turn)
    return [role_part(message["role"], texts), *_content(message, texts)]


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with ``role``, and its content and calls under one of the known keys.

    Known are ``role`` or ``from`` beside a text; the text in an object within (``message``, LangChain's ``data``, or
    ``kwargs`` of its constructors, whose class is the last of ``id``); and OpenInference's flat keys.
    """
    message = _inside(turn)
    role = next((message[key] for key in ROLE_KEYS if isinstance(message.get(key), str)), "")
    if role == "constructor" and isinstance(message.get("id"), list) and message["id"]:
        role = str(message["id"][-1]).removesuffix("Chunk").removesuffix("Message")
    inner = next((message[key] for key in ENVELOPES if isinstance(message.get(key), dict)), None)
    if inner is not None:
        return {**(inner := _message(inner)), "role": inner["role"] or ROLES.get(role.lower(), role)}
    return {**message, "role": ROLES.get(role.lower(), role)}


def _inside(part: object) -> Any:  # noqa: ANN401 - as the log has it
    """Return an object without the prefixes of OpenInference's keys."""
    if not isinstance(part, dict) or not any(key.startswith(FLAT) for key in part):
        return part
    return {key.removeprefix(FLAT[0]).removeprefix(FLAT[1]): value for key, value in part.items()}


def _content(message: Mapping[str, Any], texts: TextTokens) -> list[Part]:
    """Read the parts of a message's content, and of its calls of tools."""
    calls = [message[key] for key in CALL_KEYS if message.get(key)]
    content = next((message[key] for key in TEXT_KEYS if message.get(key) is not None), None)
    if content is None and not calls and message.keys().isdisjoint((*TEXT_KEYS, *CALL_KEYS)):
        names = ", ".join(f"{key:.30}" for key in sorted(message)[:SHOWN])
        return [unknown_part(f"a message has its text under none of {', '.join(TEXT_KEYS)}: it has {names}")]
    return [*_parts(content, texts), *(part for call in calls for part in _parts(call, texts))]


def _headed(role: str, content: object, texts: TextTokens) -> list[Part]:
    return [role_part(role, texts), *_parts(content, texts)]


def role_part(role: str, texts: TextTokens) -> Part:
    """Make the part that marks whose message begins."""
    return replace(text_part(f"<|{role}|>", texts), is_mark=True, num_characters=0)


def _parts(content: object, texts: TextTokens) -> Iterator[Part]:
    if content is None:
        return
    if isinstance(content, str):
        yield text_part(content, texts)
        return
    for each in content if isinstance(content, list) else [content]:
        part = _inside(each)
        if isinstance(part, dict) and isinstance(part.get("message_content"), dict):
            part = part["message_content"]
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
    if not isinstance(part, dict) or isinstance(part.get("text"), str):
        return False
    return part.get("type") in MEDIA_TYPES or any(isinstance(part.get(key), dict) for key in MEDIA_KEYS)


def _media(part: object) -> Part:
    digest = sha256(_plain(part).encode("utf-8", "surrogatepass")).digest()
    return Part(marked_tokens(digest, PICTURE_TOKENS), BYTES_PER_TOKEN * PICTURE_TOKENS, is_media=True)


def _plain(part: object) -> str:
    """Write a part that is not text (an image, a tool call, its result) as a text; equal parts give equal texts."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if key not in NO_CONTENT}
    return part if isinstance(part, str) else json.dumps(part, sort_keys=True)


def as_object(value: object) -> JsonObject:
    """Return an object, parsed if it is written as a text; an empty object for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> object:
    """Return a value; a list that is written as a text is parsed."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value
