"""Conversations: turns Anthropic's system, messages and tools into the form that chat templates take.

::

    system blocks              -> one system message
    user: text blocks          -> a user message for each run of them
          tool_result          -> a tool message
    assistant: text, tool_use  -> one assistant message with its calls; thinking is left out

The beginning of a conversation up to any of its blocks is a conversation too; breakpoints are located with it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from pagedkv.engine import Chat
from pagedkv.server.anthropic.requests import CountRequest
from pagedkv.server.errors import ApiError

__all__ = ["Block", "Blocks", "Conversation", "answer_message", "conversation_of"]

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
