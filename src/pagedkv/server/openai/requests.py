"""Requests of OpenAI's protocols, by OpenAI's reference, with the fields of vLLM that clients use.

Unknown fields are ignored, since new versions of clients send further ones. :mod:`.request_fields` refuses, with a
message, a known field that would change the answer and is not served.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from pagedkv.server.bodies import Body

__all__ = [
    "CacheBreakpoint",
    "CacheOptions",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Message",
    "ResponsesRequest",
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LARGEST_COUNT = 2**31 - 1


class Fields(Body):
    """Fields of a body; unknown ones are ignored."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = False


class CacheBreakpoint(Fields):
    """A mark on a part: the prompt up to it is to stay cached."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheOptions(Fields):
    """How long a prompt stays cached, and whether all of it or only the part up to its breakpoints."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class SamplingFields(Fields):
    """How tokens are chosen, and when an answer ends."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Not OpenAI's
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    explain: bool | None = None
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = None
    cache_salt: Any = None


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class ChatRequest(SamplingFields):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    # Not OpenAI's
    structured_outputs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields):
    """The body of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = None


class ResponsesRequest(Fields):
    """The body of ``/v1/responses``."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    cache_salt: Any = None


class TokenizeRequest(Fields):
    """The body of ``/tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
