"""What a fork asks for: the tokens that it begins with, and what is left of its parent's wishes."""

from dataclasses import replace

from pagedkv.arguments import as_count
from pagedkv.arrays import Int32Array
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.sampling import SamplingParams
from pagedkv.errors import RequestError

__all__ = ["fork_params", "fork_prefix"]


def fork_prefix(request: EngineRequest, sample: int, at: int | None) -> Int32Array:
    """Give the tokens that a fork begins with: int32 ``[at]``. Raises RequestError for places that are not there."""
    index = as_count(sample, "sample", most=len(request.samples) - 1, error=RequestError)
    tokens = request.tokens_of(request.samples[index])
    return tokens[: len(tokens) if at is None else as_count(at, "at", least=1, most=len(tokens), error=RequestError)]


def fork_params(request: EngineRequest, n: int, num_tokens: int) -> SamplingParams:
    """Say what a fork asks for if nobody does: what is left for its parent from there, with noise of its own.

    Raises:
        RequestError: nothing is left, or n answers without a temperature, which would be the same.
    """
    num_generated = max(0, num_tokens - len(request.prompt_token_ids))
    num_left = request.wish.max_tokens - num_generated
    if num_left < 1:
        raise RequestError(
            f"request {request.number} has all of its {request.wish.max_tokens} tokens: fork it at an earlier place, "
            "or give params with another max_tokens"
        )
    return replace(
        request.params,
        n=n,
        max_tokens=num_left,
        min_tokens=max(0, request.params.min_tokens - num_generated),
        seed=None,
        prompt_logprobs=None,
    )
