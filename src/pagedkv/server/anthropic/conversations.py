"""Conversations: turns Anthropic's system, messages and tools into the form that chat templates take.

::

    system blocks              -> one system message
    user: text blocks          -> a user message for each run of them
          tool_result          -> a tool message
    assistant: text, tool_use  -> one assistant message with its calls; thinking is left out

The beginning of a conversation up to any of its blocks is a conversation too; breakpoints, which are
blocks and tools with ``cache_control``, are located with it. ContentBlocks is the way back: it turns an answer's parts
into content blocks and the events that stream them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias, final

from pydantic_core import from_json

from pagedkv.engine import Breakpoint, Chat
from pagedkv.scheduling.config import MOST_BREAKPOINTS
from pagedkv.server.anthropic.bodies import CacheControl, CountRequest
from pagedkv.server.chat_prompts import ChatPrompts, breakpoints_at
from pagedkv.server.config import Caller
from pagedkv.server.generation import PreparedPrompt
from pagedkv.server.http import ApiError
from pagedkv.server.parsing import CallArguments, CallBegin, CallEnd, Part, ReasoningPart, TextPart

NEW: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}

Block: TypeAlias = Mapping[str, Any]
Blocks: TypeAlias = Sequence[Block]
IGNORED_KINDS: Final = frozenset({"thinking", "redacted_thinking"})
UNSERVED: Final = {
    "image": "images",
    "document": "documents",
    "search_result": "search results",
    "container_upload": "files",
    "server_tool_use": "calls of tools that a server runs",
}
FIVE_MINUTES_S: Final = 300.0
HOUR_S: Final = 3600.0


@final
class ContentBlocks:
    """Builds the content of one answer.

    Attributes:
        blocks: the blocks so far; the input of a call is complete once its block has ended.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: str | None = None
        self._pieces: list[str] = []

    def add(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        """Add parts; yield the events that report them."""
        for part in parts:
            match part:
                case TextPart():
                    yield from self._opened("text")
                    yield self._delta("text_delta", "text", part.text)
                case ReasoningPart():
                    yield from self._opened("thinking")
                    yield self._delta("thinking_delta", "thinking", part.text)
                case CallBegin():
                    yield from self._closed()
                    block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
                    yield self._begin("tool_use", block)
                case CallArguments():
                    yield self._delta("input_json_delta", "partial_json", part.text)
                case CallEnd():
                    yield from self._closed()

    def finish(self) -> Iterator[dict[str, Any]]:
        """End the last block; yield the event that reports its end."""
        yield from self._closed()

    def _opened(self, kind: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._closed()
            yield self._begin(kind, dict(NEW[kind]))

    def _begin(self, kind: str, block: dict[str, Any]) -> dict[str, Any]:
        self._open = kind
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        self._pieces.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, field: text}}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        text = "".join(self._pieces)
        block = self.blocks[-1]
        if self._open == "tool_use":
            block["input"] = _as_input(text)
        else:
            block[self._open] = text
        self._open = None
        self._pieces.clear()
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}


def _as_input(text: str) -> dict[str, Any]:
    """Read a call's arguments; incomplete ones give an empty object."""
    with suppress(ValueError):
        value = from_json(text)
        if isinstance(value, dict):
            return value
    return {}


@final
@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, with its content in blocks.

    Args:
        system: blocks of text.
        turns: role and blocks of each message.
        tools: offered tools, in Anthropic's form.
        options: further variables of the template.
    """

    system: Blocks
    turns: Sequence[tuple[str, Blocks]]
    tools: Blocks
    options: Mapping[str, Any]

    @property
    def is_continued(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        if not self.turns:
            return False
        role, blocks = self.turns[-1]
        kinds = {block["type"] for block in blocks} - IGNORED_KINDS
        return role == "assistant" and kinds == {"text"}

    def functions(self) -> list[dict[str, Any]]:
        """Return the tools in the form of templates and of parsers."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["input_schema"],
                },
            }
            for tool in self.tools
        ]

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that a template takes."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": text_of(self.system)})
        for role, blocks in self.turns:
            if role == "assistant":
                messages.append(answer_message(blocks))
            else:
                messages += _user_messages(role, blocks)
        return messages

    def chat(self) -> Chat:
        """Return the conversation in the form that the template takes."""
        return Chat(
            self.messages(),
            tools=self.functions() or None,
            is_continued=self.is_continued,
            options=self.options,
        )


def conversation_of(body: CountRequest) -> Conversation:
    """Read a conversation. Raises ApiError for content that is not served."""
    system = _blocks(body.system or [], "system", frozenset({"text"}))
    turns = [
        (turn.role, _blocks(turn.content, f"messages.{place}.content", _kinds_of(turn.role)))
        for place, turn in enumerate(body.messages)
    ]
    options = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    tools = body.tools or []
    for place, tool in enumerate(tools):
        _require_tool(tool, f"tools.{place}")
    return Conversation(system, turns, tools, options)


def answer_message(blocks: Blocks) -> dict[str, Any]:
    """Return the template's message for the model's answer: text and calls."""
    message: dict[str, Any] = {"role": "assistant", "content": text_of(blocks)}
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": block["input"]},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def text_of(blocks: Blocks) -> str:
    """Return the text of blocks, joined by line breaks."""
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _user_messages(role: str, blocks: Blocks) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[Block] = []
    for block in blocks:
        if block["type"] == "tool_result":
            _add_text(messages, role, texts)
            content = text_of(block["content"])
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        else:
            texts.append(block)
    _add_text(messages, role, texts)
    return messages


def _add_text(messages: list[dict[str, Any]], role: str, texts: list[Block]) -> None:
    if texts:
        messages.append({"role": role, "content": text_of(texts)})
        texts.clear()


def _kinds_of(role: str) -> frozenset[str]:
    match role:
        case "assistant":
            return frozenset({"text", "tool_use"}) | IGNORED_KINDS
        case "user":
            return frozenset({"text", "tool_result"})
        case _:
            return frozenset({"text"})


def _blocks(content: str | Sequence[object], where: str, kinds: frozenset[str]) -> list[Block]:
    """Read and check the blocks of a content; results of tools have blocks of their own."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks: list[Block] = []
    for place, block in enumerate(content):
        at = f"{where}.{place}"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or not isinstance(kind, str) or kind not in kinds:
            unserved = UNSERVED.get(str(kind))
            if unserved is not None:
                raise ApiError(400, f"{at} has {unserved}, and this server takes text alone", param=where)
            raise ApiError(400, f"{at} must be a block of type {', '.join(sorted(kinds))}", param=where)
        blocks.append(_checked(block, at))
    return blocks


def _checked(block: dict[str, Any], where: str) -> Block:
    match block["type"]:
        case "text":
            _require_text(block, "text", where)
        case "tool_use":
            _require_text(block, "id", where)
            _require_text(block, "name", where)
            if not isinstance(block.get("input"), dict):
                raise ApiError(400, f"{where}.input must be an object", param=where)
        case "tool_result":
            _require_text(block, "tool_use_id", where)
            content = block.get("content")
            if not isinstance(content, str | list | None):
                raise ApiError(400, f"{where}.content must be a text or blocks", param=where)
            return {**block, "content": _blocks(content or [], f"{where}.content", frozenset({"text"}))}
        case _:
            pass
    return block


def _require_text(block: Block, name: str, where: str) -> None:
    if not isinstance(block.get(name), str):
        raise ApiError(400, f"{where}.{name} must be a text", param=where)


def _require_tool(tool: Block, where: str) -> None:
    if tool.get("type") not in (None, "custom"):
        raise ApiError(
            400,
            f"{where} is of type {json.dumps(tool['type'])[:50]}, and this server does not run tools itself",
            param=where,
        )
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise ApiError(400, f"{where} must have a name and an input_schema", param=where)


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
