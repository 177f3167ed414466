"""Items of the Responses protocol as messages of chat completions, and the stored conversations.

::

    message                 -> a message; an assistant's continues the assistant's message before it
    function_call           -> a call of the assistant's message before it, or of a new one
    function_call_output    -> a tool's message
    reasoning               -> left out
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, final

from pagedkv.server.access import Caller
from pagedkv.server.errors import ApiError

__all__ = ["StoredResponses", "as_chat_tools", "messages_of"]

Messages: TypeAlias = list[dict[str, Any]]

ROLES: Final = ("assistant", "developer", "system", "user")
MEDIA: Final = {"input_image": "images", "input_file": "files", "input_audio": "sound"}
DEFAULT_NBYTES: Final = 64 * 2**20


@final
class StoredResponses:
    """Conversations, by the response that ended them; the oldest are dropped first.

    Args:
        max_nbytes: most bytes of all conversations, as JSON.
    """

    def __init__(self, max_nbytes: int = DEFAULT_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._by_response: OrderedDict[tuple[str | None, str], tuple[Messages, int]] = OrderedDict()

    def keep(self, caller: Caller, response_id: str, messages: Messages) -> None:
        """Keep a conversation. O(its text)."""
        nbytes = len(json.dumps(messages))
        self._by_response[caller.tenant, response_id] = messages, nbytes
        self._nbytes += nbytes
        while self._nbytes > self._max_nbytes:
            _, (_, dropped) = self._by_response.popitem(last=False)
            self._nbytes -= dropped

    def find(self, caller: Caller, response_id: str) -> Messages:
        """Return the conversation that one of the caller's responses ended. Raises ApiError."""
        found = self._by_response.get((caller.tenant, response_id))
        if found is None:
            raise ApiError(
                404,
                f"there is no response {response_id!r} here: it was not stored, or has been dropped since. "
                "Send its conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found[0]


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> Messages:
    """Turn items into messages of chat completions. Raises ApiError for items that are not served."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: Messages = []
    for place, item in enumerate(given):
        where = f"input[{place}]"
        match item.get("type", "message"):
            case "message":
                if item.get("role") not in ROLES:
                    raise ApiError(400, f"the role of {where} must be one of {', '.join(ROLES)}", param=where)
                _add_message(messages, item, f"{where}.content")
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                content = _text(item.get("output"), f"{where}.output")
                call_id = _required(item, "call_id", where)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "reasoning":
                pass
            case other:
                raise ApiError(
                    400,
                    f"{where} is of type {str(other)[:50]!r}; this server takes message, function_call, "
                    "function_call_output and reasoning",
                    param=where,
                )
    return messages


def as_chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn tools into the form of chat completions. Raises ApiError for a tool that is not a function."""
    for place, tool in enumerate(tools):
        if (
            tool.get("type") != "function"
            or not isinstance(tool.get("name"), str)
            or not isinstance(tool.get("parameters"), dict | None)
        ):
            raise ApiError(
                400,
                f"tools[{place}] must be a function with a name, its parameters a schema: "
                "this server does not run tools itself",
                param=f"tools[{place}]",
            )
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters") or {},
            },
        }
        for tool in tools
    ]


def _add_message(messages: Messages, item: Mapping[str, Any], where: str) -> None:
    """Add a message. Items of one answer become one message, as a template writes it."""
    role, parts = item["role"], item.get("content")
    content = _text(parts, where)
    if role == "assistant" and messages and messages[-1]["role"] == "assistant":
        before = messages[-1]
        messages[-1] = {**before, "content": "\n".join(filter(None, (before["content"], content)))}
    elif role != "assistant" and isinstance(parts, list) and any("prompt_cache_breakpoint" in part for part in parts):
        messages.append({"role": role, "content": [{**part, "type": "text"} for part in parts]})
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: Messages, item: Mapping[str, Any], where: str) -> None:
    function = {"name": _required(item, "name", where), "arguments": _required(item, "arguments", where)}
    call = {"id": _required(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    before = messages[-1]
    messages[-1] = {**before, "tool_calls": [*before.get("tool_calls", ()), call]}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or parts", param=where)
    texts: list[str] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA:
            raise ApiError(400, f"{where}[{place}] has {MEDIA[kind]}, and this server takes text alone", param=where)
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise ApiError(400, f"{where}[{place}] must be a part of type input_text, with its text", param=where)
        texts.append(text)
    return "\n".join(texts)


def _required(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}.{name} must be a text", param=where)
    return value
