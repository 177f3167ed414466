"""Responses to OpenAI's clients, as types; the OpenAPI document has their schemas.

A field marked NotRequired is absent where it is unknown, never null.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

__all__ = [
    "ChatAnswer",
    "CompletionAnswer",
    "Detokenized",
    "Model",
    "ModelList",
    "OpenAIError",
    "ResponseAnswer",
    "Tokenized",
    "Version",
]

CLOSED = ConfigDict(extra="forbid")
"""Every field is declared."""


@with_config(CLOSED)
class ErrorBody(TypedDict):
    """Message and type of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


@with_config(CLOSED)
class OpenAIError(TypedDict):
    """An error in OpenAI's form."""

    error: ErrorBody


@with_config(CLOSED)
class PromptDetails(TypedDict):
    """Tokens of the prompt, by their source."""

    cached_tokens: int
    cache_write_tokens: int
    x_cached_tokens_by_medium: NotRequired[dict[str, int]]


@with_config(CLOSED)
class CompletionDetails(TypedDict):
    """Guessed tokens of a prediction."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@with_config(CLOSED)
class CompletionUsage(TypedDict):
    """Tokens of a chat or text completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]


@with_config(CLOSED)
class Explained(TypedDict):
    """Where a prompt's hit ended, and why."""

    num_prompt_tokens: int
    num_hit_tokens: int
    cause: str
    position: int


@with_config(CLOSED)
class FunctionCall(TypedDict):
    """A function and its arguments, as JSON."""

    name: str
    arguments: str


@with_config(CLOSED)
class ToolCall(TypedDict):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


@with_config(CLOSED)
class ChatMessage(TypedDict):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@with_config(CLOSED)
class TopToken(TypedDict):
    """A likely token at a position."""

    token: str
    logprob: float
    bytes: list[int]


@with_config(CLOSED)
class ChatToken(TopToken):
    """A token of an answer."""

    top_logprobs: list[TopToken]


@with_config(CLOSED)
class ChatLogprobs(TypedDict):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatToken]
    refusal: None


@with_config(CLOSED)
class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


@with_config(CLOSED)
class ChatAnswer(TypedDict):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    cache_leases_refused: NotRequired[int]
    cache_explanation: NotRequired[Explained | None]


@with_config(CLOSED)
class TextLogprobs(TypedDict):
    """Log-probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


@with_config(CLOSED)
class TextChoice(TypedDict):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


@with_config(CLOSED)
class CompletionAnswer(TypedDict):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    cache_explanations: NotRequired[list[Explained | None]]


@with_config(CLOSED)
class OutputText(TypedDict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


@with_config(CLOSED)
class ReasoningText(TypedDict):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


@with_config(CLOSED)
class MessageItem(TypedDict):
    """A message of a response's output."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


@with_config(CLOSED)
class ReasoningItem(TypedDict):
    """Reasoning of a response's output."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    status: Literal["completed", "incomplete"]
    content: list[ReasoningText]


@with_config(CLOSED)
class CallItem(TypedDict):
    """A call of a response's output."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


@with_config(CLOSED)
class OutputDetails(TypedDict):
    """Tokens of reasoning."""

    reasoning_tokens: int


@with_config(CLOSED)
class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


@with_config(CLOSED)
class Incomplete(TypedDict):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


@with_config(CLOSED)
class CacheOptionsAnswer(TypedDict):
    """How long the prompt stays cached."""

    mode: Literal["implicit", "explicit"]
    ttl: Literal["30m", "12h"]


@with_config(CLOSED)
class ResponseAnswer(TypedDict):
    """The answer of ``/v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem | ReasoningItem | CallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    prompt_cache_key: NotRequired[str]
    prompt_cache_options: NotRequired[CacheOptionsAnswer]
    cache_leases_refused: NotRequired[int]


@with_config(CLOSED)
class Tokenized(TypedDict):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


@with_config(CLOSED)
class Detokenized(TypedDict):
    """The answer of ``/detokenize``."""

    prompt: str


@with_config(CLOSED)
class Model(TypedDict):
    """The model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


@with_config(CLOSED)
class ModelList(TypedDict):
    """All models: the one that is served."""

    object: Literal["list"]
    data: list[Model]


@with_config(CLOSED)
class Version(TypedDict):
    """The server's version."""

    version: str
