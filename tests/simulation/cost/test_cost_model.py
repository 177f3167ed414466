"""The roofline: against steps counted one token at a time, and that more never costs less."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, isclose, nan

import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import ConfigurationError
from pagedkv.simulation.cost import CostModel, cost_model_names, read_cost_model

TOLERANCE = 1e-9

# Each term on its own digits, so that a term left out or taken twice shows.
DISTINCT = CostModel(
    fixed_s=1.0,
    token_compute_s=1e-1,
    pair_compute_s=1e-3,
    weights_s=3.0,
    experts_s=8.0,
    expert_share=0.5,
    context_token_s=1e-2,
    window=10,
    window_pair_compute_s=2e-3,
    window_token_s=2e-2,
    sequence_state_s=0.25,
    sequence_s=0.125,
    several_s=0.0625,
    chunk_s=0.03125,
    swap_fixed_s=0.5,
    swap_token_s=1e-2,
)
COUNTS = st.tuples(st.integers(0, 20_000), st.integers(0, 10**9), st.integers(0, 10**7), st.integers(0, 2000))
SECONDS = st.floats(0, 10, allow_subnormal=False)
COST_MODELS = st.builds(
    CostModel,
    fixed_s=SECONDS,
    token_compute_s=SECONDS,
    pair_compute_s=SECONDS,
    weights_s=SECONDS,
    experts_s=SECONDS,
    expert_share=st.floats(1e-3, 1),
    context_token_s=SECONDS,
    window=st.integers(0, 10_000),
    window_pair_compute_s=SECONDS,
    window_token_s=SECONDS,
    sequence_state_s=SECONDS,
    sequence_s=SECONDS,
    several_s=SECONDS,
    chunk_s=SECONDS,
)


def counted_step_s(cost: CostModel, sequences: list[tuple[int, int]]) -> float:
    """The same step, token by token: sequences of (tokens computed before, new tokens)."""
    compute_s = memory_s = 0.0
    miss = 1.0
    for computed, new in sequences:
        for position in range(computed, computed + new):
            num_keys = position + 1
            compute_s += cost.token_compute_s + num_keys * cost.pair_compute_s
            compute_s += min(num_keys, cost.window) * cost.window_pair_compute_s
            miss *= 1 - cost.expert_share
        length = computed + new
        memory_s += length * cost.context_token_s + min(length, cost.window) * cost.window_token_s
        memory_s += cost.sequence_state_s
    memory_s += cost.weights_s + (1 - miss) * cost.experts_s
    once_s = cost.fixed_s
    if len(sequences) > 1 or any(new > 1 for _, new in sequences):
        once_s += cost.several_s
    if any(new > 1 for _, new in sequences):
        once_s += cost.chunk_s
    return once_s + max(compute_s, memory_s) + len(sequences) * cost.sequence_s


def step_s(cost: CostModel, sequences: list[tuple[int, int]]) -> float:
    num_new_tokens = sum(new for _, new in sequences)
    num_pairs = sum(computed * new + new * (new + 1) // 2 for computed, new in sequences)
    return cost.step_s(num_new_tokens, num_pairs, sum(map(sum, sequences)), len(sequences))


COMPUTE_ALONE = replace(
    DISTINCT, weights_s=0, experts_s=0, context_token_s=0, window_token_s=0, sequence_state_s=0, token_compute_s=0
)


@pytest.mark.parametrize("cost", [DISTINCT, COMPUTE_ALONE], ids=["both", "compute alone"])
@pytest.mark.parametrize(
    "sequences",
    [[(0, 8)], [(40, 1)] * 3, [(100, 60)], [(0, 5), (2, 3), (6, 1)]],
    ids=["prefill", "decode beyond the window", "chunk beyond the window", "all below the window"],
)
def test_a_step_costs_what_its_tokens_cost_one_by_one(cost: CostModel, sequences: list[tuple[int, int]]) -> None:
    assert isclose(step_s(cost, sequences), counted_step_s(cost, sequences), rel_tol=TOLERANCE)


def test_both_sides_of_the_roof_are_reached() -> None:
    decode = DISTINCT.step_s(1, 100, 100, 1)
    # memory: 3 weights, half of 8 for the experts, 100 and 10 tokens of context, a state
    assert isclose(decode, 1 + (3 + 4 + 100 * 1e-2 + 10 * 2e-2 + 0.25) + 0.125, rel_tol=TOLERANCE)
    prefill = DISTINCT.step_s(1000, 500_500, 1000, 1)
    # compute: a thousand tokens, their pairs, and ten keys each in the window
    assert isclose(
        prefill, 1 + (1000 * 1e-1 + 500_500 * 1e-3 + 10_000 * 2e-3) + 0.125 + 0.0625 + 0.03125, rel_tol=TOLERANCE
    )


@given(
    cost=COST_MODELS,
    sequences=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8),
)
def test_a_window_is_never_charged_too_little(cost: CostModel, sequences: list[tuple[int, int]]) -> None:
    assert step_s(cost, sequences) >= counted_step_s(cost, sequences) * (1 - TOLERANCE)


@given(cost=COST_MODELS, counts=COUNTS, more=COUNTS)
def test_more_never_costs_less(cost: CostModel, counts: tuple[int, ...], more: tuple[int, ...]) -> None:
    for place in range(4):
        grown = list(counts)
        grown[place] += more[place]
        if place == 3:
            grown[0] += more[3]  # each sequence has a token
        assert cost.step_s(*grown) >= cost.step_s(*counts) * (1 - TOLERANCE)


def test_swapping_costs_by_the_token_and_nothing_for_none() -> None:
    assert DISTINCT.swap_s(0) == 0
    assert DISTINCT.swap_s(100) == 1.5


def test_instant_takes_no_time() -> None:
    instant = read_cost_model("instant")
    assert instant.step_s(8192, 10**8, 10**6, 500) == 0
    assert instant.swap_s(10**6) == 0


def test_per_token_takes_a_millisecond_a_token() -> None:
    assert read_cost_model("per-token").step_s(250, 10**8, 10**6, 500) == 0.25


@pytest.mark.parametrize("name", cost_model_names())
def test_a_cost_model_survives_its_dictionary(name: str) -> None:
    cost = read_cost_model(name)
    assert CostModel(**cost.as_dict()) == cost


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "negative": (lambda: CostModel(fixed_s=-1e-3), r"fixed_s must be a number of seconds from 0 .* got -0\.001"),
    "NaN": (lambda: CostModel(weights_s=nan), "weights_s .* got nan"),
    "infinite": (lambda: CostModel(swap_token_s=inf), "swap_token_s .* got inf"),
    "milliseconds since 1970": (lambda: CostModel(sequence_s=1.7e12), "sequence_s .* got 17000"),
    "truth": (lambda: CostModel(pair_compute_s=True), "pair_compute_s .* got True"),
    "text": (lambda: CostModel(experts_s="1"), "experts_s .* got '1'"),  # type: ignore[arg-type]
    "integer beyond floats": (lambda: CostModel(experts_s=10**400), "experts_s .* got 1000"),
    "share of 0": (lambda: CostModel(expert_share=0), "expert_share must be over 0 and at most 1, got 0"),
    "share over 1": (lambda: CostModel(expert_share=1.01), "expert_share .* got 1.01"),
    "share that is no number": (lambda: CostModel(expert_share=nan), "expert_share .* got nan"),
    "negative window": (lambda: CostModel(window=-1), "window must be at least 0, got -1"),
    "half a window": (lambda: CostModel(window=0.5), "window must be an integer"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_a_cost_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build()
