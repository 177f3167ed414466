"""Warnings about the figures of a replay, one sentence each: in tables, page and JSON."""

from collections.abc import Iterator

from pagedkv.cli.seconds_source import SecondsSource
from pagedkv.cli.typed_names import as_typed
from pagedkv.report.pool_balance import pool_balance
from pagedkv.simulation import ServingResult

__all__ = ["warnings_of"]


def warnings_of(result: ServingResult, seconds: SecondsSource) -> list[str]:
    """List warnings about the assumptions of a result.

    Args:
        result: the figures.
        seconds: their source.
    """
    return [*_seconds(result, seconds), *_content(result), *_rejected(result), *_pools(result)]


def _seconds(result: ServingResult, seconds: SecondsSource) -> Iterator[str]:
    model = result.config["model"]
    remedy = f"{'--model and --gpu' if model is None else '--gpu'} or --cost-model"
    return seconds.warnings(remedy, model)


def _content(result: ServingResult) -> Iterator[str]:
    num_requests, num_known = result.requests["num_requests"], result.requests["num_with_content"]
    if num_requests and not num_known:
        yield "the trace has lengths but no content: hits are unknown, and no blocks are shared"
    elif num_known < num_requests:
        num_unknown = num_requests - num_known
        yield f"the content of {num_unknown:,} of {num_requests:,} requests is unknown: they count as sharing nothing"


def _rejected(result: ServingResult) -> Iterator[str]:
    num_requests, num_rejected = result.requests["num_requests"], result.requests["num_rejected"]
    if num_rejected:
        yield (
            f"{num_rejected:,} of {num_requests:,} requests ({num_rejected / num_requests:.1%}) were rejected, being "
            "too large for the pools: no figure counts them"
        )


def _pools(result: ServingResult) -> Iterator[str]:
    balance = as_typed(pool_balance(result.pools))
    if balance:
        yield f"{balance[0].lower()}{balance[1:]}"
