"""Small random traces and servers that are too small for them, and how two reports are compared."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cost import CostModel
from tests.simulation.naive_server import NaiveConfig

__all__ = ["assert_same", "costs", "crowds", "request_of", "scenes", "serve"]

RELATIVE = 1e-9
NUM_NULL_BLOCKS = 1
OUTPUT_TOKENS = 1000
"""Outputs that no other request has begin here."""


def request_of(
    prompt: Iterable[int],
    output: Iterable[int] = (),
    arrival_s: float = 0.0,
    *,
    num_samples: int = 1,
    priority: int = 0,
) -> TokenizedRequest:
    """Make one request of given tokens."""
    return TokenizedRequest(
        arrival_s=arrival_s,
        prompt_token_ids=np.array(list(prompt), np.int32),
        output_token_ids=np.array(list(output), np.int32),
        num_samples=num_samples,
        priority=priority,
    )


def serve(requests: Iterable[TokenizedRequest], config: NaiveConfig, cost: CostModel) -> dict[str, Any]:
    """Replay with the library."""
    return VirtualServer(ServingConfig(**asdict(config)), cost).run(requests).as_dict()


@st.composite
def prompts(draw: st.DrawFn, trunk: list[int]) -> list[int]:
    """Draw a prompt: some of a common trunk, then few tokens of few kinds, so that prefixes part anywhere."""
    num_common = draw(st.integers(0, len(trunk)))
    return trunk[:num_common] + draw(st.lists(st.integers(0, 1), min_size=num_common == 0, max_size=12))


@st.composite
def traces(draw: st.DrawFn, *, most_samples: int = 4) -> list[TokenizedRequest]:
    """Draw requests whose prompts share prefixes, at times with outputs of others within, in bursts and after gaps."""
    trunk = draw(st.lists(st.integers(0, 1), max_size=30))
    gaps_s = draw(st.sampled_from([[0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.5, 2.0, 40.0, 1000.0], [8.0, 30.0]]))
    most_output = draw(st.sampled_from([3, 20, 20]))
    arrival_s = draw(st.sampled_from([0.0, 3.0]))
    requests: list[TokenizedRequest] = []
    for number in range(draw(st.integers(1, 12) | st.integers(1, 25))):
        prompt = draw(prompts(trunk))
        num_output = draw(st.integers(0, most_output))
        # Equal outputs make duplicates; samples of equal requests are not told apart by the text, so they have none.
        first = OUTPUT_TOKENS * draw(st.sampled_from([number + 1, 1 if most_samples == 1 else number + 1]))
        if requests and draw(st.integers(0, 4)) == 0:  # the next turn of a conversation
            before = draw(st.sampled_from(requests))
            prompt = (before.prompt_token_ids.tolist() + before.output_token_ids.tolist() + prompt)[:60]
        requests.append(
            request_of(
                prompt,
                range(first, first + num_output),
                arrival_s,
                num_samples=draw(st.integers(1, most_samples)),
                priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
            )
        )
        arrival_s += draw(st.sampled_from(gaps_s))
    return requests


@st.composite
def scenes(
    draw: st.DrawFn, preemption: str, *, beam_width: int | None = None, most_samples: int = 4
) -> tuple[list[TokenizedRequest], NaiveConfig]:
    """Draw a trace, and a server that is short of blocks for it, of sequences and of budget."""
    requests = draw(traces(most_samples=most_samples))
    max_sequences = draw(st.integers(max(2, beam_width or 0), 12) | st.just(12))
    block_size = draw(st.integers(1, 8))
    num_blocks = most_blocks(draw(st.sampled_from(requests)), block_size, beam_width)
    num_spare_blocks = draw(st.just(0) | st.integers(0, 2 * num_blocks))
    num_host_blocks = draw(st.integers(1, 4 * num_blocks))
    config = NaiveConfig(
        num_blocks=num_blocks + num_spare_blocks + NUM_NULL_BLOCKS,
        block_size=block_size,
        num_host_blocks=num_host_blocks + NUM_NULL_BLOCKS if preemption == "swap" else 0,
        max_sequences=max_sequences,
        max_batched_tokens=max_sequences + draw(st.sampled_from([0, 1, 5, 20, 200])),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.1, 0.3])),
        preemption=preemption,
        num_samples=draw(st.sampled_from([None, None, None, 1, 2])) if most_samples > 1 and not beam_width else None,
        beam_width=beam_width,
        load=draw(st.sampled_from([1.0, 0.5, 4.0])),
        seed=draw(st.integers(0, 3)),
        max_length=draw(st.none() | st.just(100)),
    )
    return requests, config


def most_blocks(request: TokenizedRequest, block_size: int, beam_width: int | None) -> int:
    """Count the blocks that a request alone comes to hold."""
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    num_shared = num_prompt // block_size
    own = -(-(num_prompt + max(num_output, 1) - 1) // block_size) - num_shared
    return max(1, num_shared + (beam_width or request.num_samples) * own)


@st.composite
def crowds(draw: st.DrawFn, preemption: str) -> tuple[list[TokenizedRequest], NaiveConfig]:
    """Draw requests that say the same thing over and over, or each more urgent than the last, with hardly any budget.

    They compute the same content in different ways at the same time, and are preempted while they do.
    """
    num_requests = draw(st.integers(3, 8))
    is_equal = draw(st.booleans())
    max_sequences = draw(st.integers(2, 4))
    block_size = draw(st.integers(1, 3))
    requests: list[TokenizedRequest] = []
    arrival_s = 0.0
    for number in range(num_requests):
        requests.append(
            request_of(
                [0 if is_equal else number] * draw(st.integers(1, 14)) + [1] * draw(st.integers(0, 1)),
                [0] * draw(st.integers(0, 9)),
                arrival_s,
                num_samples=1 if is_equal else draw(st.integers(1, 2)),
                priority=draw(st.sampled_from([0, number, -number])),
            )
        )
        arrival_s += draw(st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0]))
    num_blocks = max(most_blocks(request, block_size, None) for request in requests)
    config = NaiveConfig(
        num_blocks=num_blocks + draw(st.integers(0, 3)) + NUM_NULL_BLOCKS,
        block_size=block_size,
        num_host_blocks=draw(st.sampled_from([5, 50])) if preemption == "swap" else 0,
        max_sequences=max_sequences,
        max_batched_tokens=max_sequences + draw(st.sampled_from([0, 1, 2, 4])),
        watermark=0.0,
        preemption=preemption,
    )
    return requests, config


costs = st.builds(
    CostModel,  # sums of these are exact, so that arrivals and ends of steps tie
    fixed_s=st.sampled_from([0.25, 1.0]),
    token_compute_s=st.sampled_from([0.0, 0.125]),
    pair_compute_s=st.sampled_from([0.0, 2.0**-8]),
    context_token_s=st.sampled_from([0.0, 2.0**-6]),
    sequence_s=st.sampled_from([0.0, 2.0**-5]),
    swap_token_s=st.sampled_from([0.0, 0.125]),
)


def assert_same(report: dict[str, Any], naive: dict[str, Any]) -> None:
    """Compare everything that the naive server reports; counts exactly."""
    for section in ("requests", "hits", "steps", "waste", "preemptions", "sharing", "latency"):
        assert_equal(report[section], naive[section], section)
    (pool,) = report["pools"].values()
    (naive_pool,) = naive["pools"].values()
    for key, expected in naive_pool.items():
        assert_equal(pool[key], expected, key)


def assert_equal(value: object, expected: object, where: str) -> None:
    """Compare whatever JSON can hold."""
    if isinstance(expected, dict):
        assert isinstance(value, dict), where
        assert list(value) == list(expected), where
        for key in expected:
            assert_equal(value[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, rel=RELATIVE, abs=RELATIVE), where
    else:
        assert value == expected, where
