"""Requests to ``/v1/messages`` by Anthropic's reference, and responses, as types, which the OpenAPI document has too.

Fields that are declared here are served; :mod:`pagedkv.server.fields` has the others.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from pagedkv.server.http import Body

LARGEST_COUNT = 2**31 - 1


class Fields(Body):
    """Fields of a body; of others those that are known are refused, unless they change no answer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class CacheControl(Fields):
    """A breakpoint: the prompt up to it is to stay cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Turn(Fields):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class ToolChoice(Fields):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]


class DiagnosticsOptions(Fields):
    """The earlier message with which a prompt's misses are compared; null: none yet."""

    previous_message_id: Annotated[str, Field(max_length=256)] | None = None


class OutputConfig(Fields):
    """The format of the answer."""

    format: dict[str, Any] | None = None


class CountRequest(Fields):
    """The body of ``/v1/messages/count_tokens``."""

    model: str
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1)]
    system: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest):
    """The body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    diagnostics: DiagnosticsOptions | None = None


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
