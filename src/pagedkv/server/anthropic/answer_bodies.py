"""Responses to Anthropic's clients, as types; the OpenAPI document has their schemas."""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

__all__ = ["AnthropicError", "MessageBody", "TokenCount"]

CLOSED = ConfigDict(extra="forbid")
"""Every field is declared."""


@with_config(CLOSED)
class AnthropicErrorBody(TypedDict):
    """Type and message of an error."""

    type: str
    message: str


@with_config(CLOSED)
class AnthropicError(TypedDict):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: AnthropicErrorBody


@with_config(CLOSED)
class TextBlock(TypedDict):
    """Text of an answer."""

    type: Literal["text"]
    text: str


@with_config(CLOSED)
class ThinkingBlock(TypedDict):
    """Reasoning of an answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str


@with_config(CLOSED)
class ToolUseBlock(TypedDict):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@with_config(CLOSED)
class CacheCreation(TypedDict):
    """Created tokens, by lifetime."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


@with_config(CLOSED)
class MessageUsage(TypedDict):
    """Tokens of a message."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


@with_config(CLOSED)
class MissReason(TypedDict):
    """Why a prompt hit fewer tokens than an earlier message had cached."""

    type: str
    cache_missed_input_tokens: NotRequired[int]
    cause: NotRequired[str]
    position: NotRequired[int]


@with_config(CLOSED)
class Diagnostics(TypedDict):
    """Result of the comparison with an earlier message."""

    cache_miss_reason: MissReason


@with_config(CLOSED)
class MessageBody(TypedDict):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: Diagnostics | None
    cache_leases_refused: NotRequired[int]


@with_config(CLOSED)
class TokenCount(TypedDict):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
