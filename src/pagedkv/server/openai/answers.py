"""Answers in OpenAI's form: messages, deltas, log-probabilities, usage, finish reasons; and responses as types.

The OpenAPI document has the types' schemas. A field marked NotRequired is absent where it is unknown, never null.
"""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from pagedkv.engine import TokenLogprobs
from pagedkv.engine.outputs import FinishReason
from pagedkv.server.generation import Usage
from pagedkv.server.openai.requests import SamplingFields
from pagedkv.server.openai.token_texts import LEAST_LOGPROB, TokenTexts
from pagedkv.server.parsing import CallArguments, CallBegin, Part, ReasoningPart, TextPart


def as_usage(usage: Usage, *, is_predicted: bool = False, num_reasoning: int = 0) -> dict[str, Any]:
    """Return the numbers of tokens, with OpenAI's names for those of the cache.

    Args:
        usage: usage of a request that has ended.
        is_predicted: whether the drafted tokens came from a prediction; then the usage counts right and wrong ones.
        num_reasoning: tokens of thoughts, which are told if there are any.
    """
    details: dict[str, int] = {"reasoning_tokens": min(num_reasoning, usage.num_generated)} if num_reasoning else {}
    if is_predicted:
        details["accepted_prediction_tokens"] = usage.num_accepted
        details["rejected_prediction_tokens"] = usage.num_drafted - usage.num_accepted
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_total,
        "prompt_tokens_details": as_prompt_details(usage),
        **({"completion_tokens_details": details} if details else {}),
    }


def as_usage_so_far(num_prompt: int, num_generated: int) -> dict[str, int]:
    """Return the numbers of tokens of a request under way, of which nothing more is known."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def as_prompt_details(usage: Usage) -> dict[str, Any]:
    """Return the tokens of a prompt by their source; by medium where tiers brought any, under a name of our own."""
    by_medium = usage.read_by_medium
    return {
        "cached_tokens": usage.num_read,
        "cache_write_tokens": usage.num_written,
        **({"x_cached_tokens_by_medium": by_medium} if by_medium else {}),
    }


def as_finish_reason(reason: FinishReason | None, *, has_calls: bool) -> str | None:
    """Return the finish reason in OpenAI's words."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def as_stop_reason(stop: int | str | None, body: SamplingFields) -> int | str | None:
    """Return the stop text, or the token of ``stop_token_ids``, that ended an answer, as vLLM tells it."""
    return stop if isinstance(stop, str) or stop in (body.stop_token_ids or ()) else None


def as_message(parts: Sequence[Part]) -> dict[str, Any]:
    """Join an answer's parts into its message."""
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    calls = _calls(parts)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def as_delta(parts: Sequence[Part]) -> dict[str, Any]:
    """Join new parts of an answer into the delta of a chunk; empty where nothing is new."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case TextPart():
                delta["content"] = delta.get("content", "") + part.text
            case ReasoningPart():
                delta["reasoning"] = delta.get("reasoning", "") + part.text
            case CallBegin():
                function = {"name": part.name, "arguments": ""}
                calls[part.index] = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
            case CallArguments():
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
            case _:
                pass
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def as_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts, *, has_own: bool = False) -> dict[str, Any]:
    """Return log-probabilities of tokens in the form of chat completions.

    Args:
        logprobs: of each token; texts: of tokens.
        has_own: whether each token stands before the further tokens of its place too.
    """
    return {"content": [texts.position(each, has_own=has_own) for each in logprobs], "refusal": None}


def as_prompt_logprobs(
    logprobs: Sequence[TokenLogprobs | None], count: int, texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt's tokens in vLLM's form: by the ids of the likeliest tokens, and its own.

    Args:
        logprobs: of each token; None for the first.
        count: number of likeliest tokens.
        texts: of tokens.
    """

    def position(each: TokenLogprobs) -> dict[str, Any]:
        told = {token: (logprob, rank) for rank, (token, logprob) in enumerate(each.top[:count], 1)}
        told.setdefault(each.token_id, (each.logprob, each.rank))
        return {
            str(token): {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": texts.text_of(token)}
            for token, (logprob, rank) in told.items()
        }

    return [None if each is None else position(each) for each in logprobs]


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return list(calls.values())


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
    """Tokens of thoughts, and guessed tokens of a prediction."""

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


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
    stop_reason: int | str | None
    token_ids: list[int] | None


@with_config(CLOSED)
class PromptToken(TypedDict):
    """A likely token at a position of a prompt, or the prompt's own."""

    logprob: float
    rank: int
    decoded_token: str


@with_config(CLOSED)
class HintTold(TypedDict):
    """What became of a hint about the cache."""

    hint: str
    action_id: NotRequired[str]
    status: Literal["applied", "refused", "ignored"]
    num_tokens: NotRequired[int]
    reason: NotRequired[str]


@with_config(CLOSED)
class ClosedSession(TypedDict):
    """The answer of ``/close_session``."""

    session_id: str
    num_branches: int
    num_freed_blocks: int


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
    cache_hints: NotRequired[list[HintTold]]
    cache_explanation: NotRequired[Explained | None]
    prompt_logprobs: list[dict[str, PromptToken] | None] | None
    prompt_token_ids: list[int] | None


@with_config(CLOSED)
class TextLogprobs(TypedDict):
    """Log-probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@with_config(CLOSED)
class TextChoice(TypedDict):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, PromptToken] | None] | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


@with_config(CLOSED)
class CompletionAnswer(TypedDict):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    cache_hints: NotRequired[list[HintTold]]
    cache_explanations: NotRequired[list[Explained | None]]


@with_config(CLOSED)
class OutputText(TypedDict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatToken]


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
    namespace: NotRequired[str]
    arguments: str
    status: Literal["completed", "incomplete"]


@with_config(CLOSED)
class CustomCallItem(TypedDict):
    """A call of a custom tool: a text in place of arguments."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
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
    output: list[MessageItem | ReasoningItem | CallItem | CustomCallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    prompt_cache_key: NotRequired[str]
    prompt_cache_options: NotRequired[CacheOptionsAnswer]
    cache_leases_refused: NotRequired[int]
    cache_hints: NotRequired[list[HintTold]]


@with_config(CLOSED)
class DeletedResponse(TypedDict):
    """The answer to deleting a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


@with_config(CLOSED)
class InputTokens(TypedDict):
    """The answer of ``/v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int


@with_config(CLOSED)
class Tokenized(TypedDict):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@with_config(CLOSED)
class Detokenized(TypedDict):
    """The answer of ``/detokenize``."""

    prompt: str


@with_config(CLOSED)
class TokenizerInfo(TypedDict):
    """The answer of ``/tokenizer_info``; None: the tokenizer has no such token, or no template."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    model_max_length: int
    chat_template: str | None


@with_config(CLOSED)
class Model(TypedDict):
    """The model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None


@with_config(CLOSED)
class ModelList(TypedDict):
    """All models: the one that is served."""

    object: Literal["list"]
    data: list[Model]


@with_config(CLOSED)
class Version(TypedDict):
    """The server's version."""

    version: str
