"""Items and tools of ``/v1/responses``, as messages and functions of chat completions.

::

    message                 -> a message; an assistant's continues the assistant's message before it
    function_call           -> a call of the assistant's message before it, or of a new one
    custom_tool_call        -> the same, its text as the argument ``input``
    ..._call_output         -> a tool's message
    reasoning               -> left out

    function                -> itself
    namespace               -> its functions, by the names NAMESPACE__NAME
    custom                  -> a function of one argument, ``input``; a grammar is told to the model, and not enforced
    web_search and others   -> none: a model cannot call what this server does not run

A call of a flattened or custom tool becomes an item in the tool's own form again. The names are vLLM's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from pagedkv.server.http import ApiError

Messages: TypeAlias = list[dict[str, Any]]
ROLES: Final = ("assistant", "developer", "system", "user")
MEDIA: Final = {"input_image": "images", "input_file": "files", "input_audio": "sound"}
INPUT: Final = "input"
"""The argument that holds the text of a custom tool's call."""
TEXT_ALONE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
RUN_ELSEWHERE: Final = frozenset(
    {
        *("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11", "file_search"),
        *("code_interpreter", "image_generation", "computer", "computer_use_preview", "mcp", "local_shell", "shell"),
        *("apply_patch", "tool_search"),
    }
)
"""Types of tools that OpenAI's servers or clients run by items of their own."""


def flat_name(namespace: object, name: str) -> str:
    """Return the name of a function for the model."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


@dataclass(frozen=True, slots=True)
class ToolName:
    """How a client names a tool.

    Args:
        name: its name; namespace: that of its group; None: it stands alone.
        is_custom: whether its calls have a text in place of arguments.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


@final
class ResponseTools:
    """The tools of a request.

    Args:
        given: as the client sent them.

    Attributes:
        functions: what the model may call, in the form of chat completions.

    Raises:
        ApiError: a tool is invalid, or of an unknown type.
    """

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        self._names: dict[str, ToolName] = {}
        for place, tool in enumerate(given):
            where = f"tools[{place}]"
            match tool.get("type"):
                case "function":
                    self._add(tool, where, ToolName(_name_of(tool, where)))
                case "namespace":
                    group, tools = _name_of(tool, where), tool.get("tools")
                    for at, inner in enumerate(tools if isinstance(tools, list) else ()):
                        if isinstance(inner, dict) and inner.get("type") == "function":
                            inside = f"{where}.tools[{at}]"
                            self._add(inner, inside, ToolName(_name_of(inner, inside), group))
                case "custom":
                    shown = {"description": _described(tool), "parameters": TEXT_ALONE}
                    self._add(shown, where, ToolName(_name_of(tool, where), is_custom=True))
                case str(kind) if kind in RUN_ELSEWHERE:
                    pass
                case other:
                    raise ApiError(
                        400,
                        f"{where} is of type {str(other)[:50]!r}; this server takes function, namespace and custom, "
                        "and leaves out tools that other servers run",
                        param=where,
                    )

    def named(self, name: str) -> ToolName:
        """Return how the client names a function that the model calls."""
        return self._names.get(name, ToolName(name))

    def choice(self, given: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
        """Return a tool choice with the name that the model sees. Raises ApiError."""
        if not isinstance(given, Mapping):
            return given
        if given.get("type") not in {"function", "custom"}:
            raise ApiError(
                400,
                "tool_choice must be auto, none, required, or a tool of type function or custom with its name",
                param="tool_choice",
            )
        name = given.get("name")
        found = [flat for flat, each in self._names.items() if name in {flat, each.name}]
        if len(found) > 1 and name not in found:
            raise ApiError(400, f"tool_choice {name!r} is one of {', '.join(found)}: give that", param="tool_choice")
        return {"type": "function", "name": name if name in found or not found else found[0]}

    def _add(self, tool: Mapping[str, Any], where: str, name: ToolName) -> None:
        parameters = tool.get("parameters")
        if not isinstance(parameters, dict | None):
            raise ApiError(400, f"{where}.parameters must be a schema", param=where)
        flat = flat_name(name.namespace, name.name)
        self._names[flat] = name
        function = {"name": flat, "description": tool.get("description") or "", "parameters": parameters or {}}
        self.functions.append({"type": "function", "function": function})


def _name_of(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"{where} must have a name", param=where)
    return name


def _described(tool: Mapping[str, Any]) -> str:
    """Return the description of a custom tool, with the grammar of its text."""
    told, given = str(tool.get("description") or ""), tool.get("format")
    if not isinstance(given, Mapping) or given.get("type") != "grammar":
        return told
    return f"{told}\n\nThe text follows this {given.get('syntax')} grammar:\n{given.get('definition')}".strip()


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
                _add_call(messages, item, where, _required(item, "arguments", where))
            case "custom_tool_call":
                _add_call(messages, item, where, json.dumps({INPUT: _required(item, "input", where)}))
            case "function_call_output" | "custom_tool_call_output":
                content = _text(item.get("output"), f"{where}.output")
                call_id = _required(item, "call_id", where)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "reasoning":
                pass
            case other:
                raise ApiError(
                    400,
                    f"{where} is of type {str(other)[:50]!r}; this server takes message, function_call, "
                    "custom_tool_call, the outputs of both, and reasoning",
                    param=where,
                )
    return messages


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


def _add_call(messages: Messages, item: Mapping[str, Any], where: str, arguments: str) -> None:
    name = flat_name(item.get("namespace"), _required(item, "name", where))
    function = {"name": name, "arguments": arguments}
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
