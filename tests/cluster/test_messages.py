"""What travels arrives as it was, and what belongs to a front stays there."""

import pickle
from typing import TypeVar

import numpy as np
import pytest

from pagedkv.cluster.messages import RoutedRequest
from pagedkv.engine import Breakpoint, Intent, SamplingParams
from pagedkv.errors import EngineError, PagedKVError, QueueFullError, RequestError
from pagedkv.server.http import as_sendable

T = TypeVar("T")


def travelled(value: T) -> T:
    """Return a value as it arrives."""
    arrived: T = pickle.loads(pickle.dumps(value))  # noqa: S301 - pickled here
    return arrived


def test_a_request_arrives_as_it_was() -> None:
    params = SamplingParams(
        n=2, temperature=0.7, seed=5, stop=["a"], logit_bias={3: 1.5}, bad_words=[[1, 2]], logprobs=2, min_tokens=1
    )
    intent = Intent(salt=b"x", tenant="a", priority=2, breakpoints=(Breakpoint(2, 5.0),), answered=(), prediction=(4,))
    request = RoutedRequest(7, np.array([1, 2, 3], np.int32), params, intent, 2.5, link=object())
    arrived = travelled(request)
    assert (arrived.number, arrived.deadline_s, arrived.params, arrived.intent) == (7, 2.5, params, intent)
    assert arrived.prompt_token_ids.tolist() == [1, 2, 3]
    assert arrived.link is None
    assert arrived.choice is None


@pytest.mark.parametrize(
    "problem", [RequestError("no"), QueueFullError("full"), EngineError("gone"), ValueError("odd")]
)
def test_an_error_arrives_as_one_of_ours(problem: Exception) -> None:
    arrived = travelled(as_sendable(problem))
    assert isinstance(arrived, PagedKVError)
    assert str(problem) in str(arrived)
    if isinstance(problem, PagedKVError):
        assert type(arrived) is type(problem)
