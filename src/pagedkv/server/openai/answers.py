"""Parts of responses in OpenAI's form: messages, deltas, log-probabilities, usage, finish reasons."""

from collections.abc import Callable, Sequence
from typing import Any

from pagedkv.engine import TokenLogprobs
from pagedkv.engine.outputs import FinishReason
from pagedkv.server.parsing import CallArguments, CallBegin, Part, ReasoningPart, TextPart
from pagedkv.server.usage import Usage

__all__ = ["as_delta", "as_finish_reason", "as_logprobs", "as_message", "as_prompt_details", "as_usage"]

Decode = Callable[[Sequence[int]], str]


def as_usage(usage: Usage, *, is_predicted: bool = False) -> dict[str, Any]:
    """Return the numbers of tokens, with OpenAI's names for those of the cache.

    Args:
        usage: usage of a request that has ended.
        is_predicted: whether the drafted tokens came from a prediction; then the usage counts right and wrong ones.
    """
    details = {
        "accepted_prediction_tokens": usage.num_accepted,
        "rejected_prediction_tokens": usage.num_drafted - usage.num_accepted,
    }
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_total,
        "prompt_tokens_details": as_prompt_details(usage),
        **({"completion_tokens_details": details} if is_predicted else {}),
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


def as_logprobs(logprobs: Sequence[TokenLogprobs], decode: Decode) -> dict[str, Any]:
    """Return log-probabilities of tokens in the form of chat completions."""
    return {"content": [_position(each, decode) for each in logprobs], "refusal": None}


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return list(calls.values())


def _position(each: TokenLogprobs, decode: Decode) -> dict[str, Any]:
    top = [_token(token, logprob, decode) for token, logprob in each.top]
    return {**_token(each.token_id, each.logprob, decode), "top_logprobs": top}


def _token(token_id: int, logprob: float, decode: Decode) -> dict[str, Any]:
    text = decode([token_id])
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode(errors="replace"))}
