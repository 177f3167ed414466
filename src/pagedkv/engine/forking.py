"""Forks of requests: their leading tokens, and their parameters, derived from those of the parent."""

from dataclasses import replace

from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.sampling import SamplingParams
from pagedkv.errors import RequestError

__all__ = ["fork_params", "fork_prefix"]


def fork_prefix(request: EngineRequest, sample: int, at: int | None) -> Int32Array:
    """Give the tokens that a fork begins with: int32 ``[at]``. Raises RequestError for places that are not there."""
    index = as_count(sample, "sample", most=len(request.samples) - 1, error=RequestError)
    tokens = request.tokens_of(request.samples[index])
    return tokens[: len(tokens) if at is None else as_count(at, "at", least=1, most=len(tokens), error=RequestError)]


def fork_params(
    request: EngineRequest, n: int | None, params: SamplingParams | None, num_tokens: int
) -> SamplingParams:
    """Return the parameters of a fork with ``n`` answers that begins with ``num_tokens`` tokens.

    Raises:
        RequestError: ``n`` and ``params`` contradict each other, or no tokens are left to generate.
    """
    given_n = None if n is None else as_count(n, "n", least=1, error=RequestError)
    if params is None:
        return replace(_left_of(request, num_tokens), n=given_n or 1)
    if given_n is not None and params.n not in {1, given_n}:
        raise RequestError(f"fork(n={n}) contradicts its params, which ask for n={params.n}: say it in one place")
    return replace(params, n=given_n or params.n)


def _left_of(request: EngineRequest, num_tokens: int) -> SamplingParams:
    """Return parameters with the tokens that are left, and other noise. Raises RequestError if none are left."""
    num_generated = max(0, num_tokens - len(request.prompt_token_ids))
    num_left = request.spec.max_tokens - num_generated
    if num_left < 1:
        raise RequestError(
            f"request {request.number} has all of its {request.spec.max_tokens} tokens: fork it at an earlier place, "
            "or give params with another max_tokens"
        )
    return replace(
        request.params,
        max_tokens=num_left,
        min_tokens=max(0, request.params.min_tokens - num_generated),
        seed=None,
        prompt_logprobs=None,
    )
