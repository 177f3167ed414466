"""Fits the parameters of a cost model to measured steps.

A step takes ``fixed_s + max(compute, memory) + num_sequences * sequence_s``: linear in the parameters once the longer
of the two is known. So steps are divided by the longer term, the parameters are found by least squares, and the steps
are divided again by these parameters, until nothing changes (the least squares partition algorithm: Magnani and Boyd,
Convex piecewise-linear fitting, 2009). This finds a good solution, not always the best. So it starts from several
divisions and returns the best of all solutions.

Errors are relative to the measured seconds, since steps differ by three orders of magnitude. An outlier (a compilation,
another process) that took a hundred times as long is then off by 99 %, not by 9,900.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Float64Array
from pagedkv.simulation.calibration.nonnegative import nonnegative_least_squares
from pagedkv.simulation.calibration.steps import MeasuredSteps
from pagedkv.simulation.cost import CostModel

__all__ = ["COUNTED_BY", "fit", "predicted_s"]

COUNTED_BY: Final[Mapping[str, str]] = {
    "weights_s": "num_new_tokens",
    "fixed_s": "num_new_tokens",
    "token_compute_s": "num_new_tokens",
    "pair_compute_s": "num_attended_pairs",
    "context_token_s": "num_context_tokens",
    "sequence_s": "num_sequences",
}
"""The fitted parameters, with the count of each. The two constants are distinguished by steps that are limited by
memory and steps that are limited by compute. If all steps are of one kind, ``weights_s`` gets the whole constant."""

IN_COMPUTE: Final = ("token_compute_s", "pair_compute_s")
IN_MEMORY: Final = ("weights_s", "context_token_s")
START_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MOST_ROUNDS: Final = 50


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of steps: a column for each fitted parameter, and the cost of all others.

    Args:
        columns: float64 ``[steps]`` by parameter, its count in each step.
        compute_s, memory_s, other_s: float64 ``[steps]``, seconds from the parameters that are not fitted.
    """

    columns: Mapping[str, Float64Array]
    compute_s: Float64Array
    memory_s: Float64Array
    other_s: Float64Array


def fit(steps: MeasuredSteps, base: CostModel, names: tuple[str, ...]) -> CostModel:
    """Fit some parameters of a cost model to steps; the others are unchanged.

    Args:
        steps: measured steps.
        base: the model with the other parameters.
        names: the parameters to fit, of ``COUNTED_BY``.
    """
    terms = _terms(steps, base, names)
    best, least = base, np.inf
    for model in _candidates(steps, base, terms):
        error = float(np.mean((predicted_s(model, steps) / steps.seconds - 1) ** 2))
        if error < least:
            best, least = model, error
    return best


def predicted_s(model: CostModel, steps: MeasuredSteps) -> Float64Array:
    """Return the seconds that a model predicts for each step: float64 ``[steps]``."""
    counts = (
        steps.counts(name).tolist()
        for name in ("num_new_tokens", "num_attended_pairs", "num_context_tokens", "num_sequences")
    )
    return np.array([model.step_s(*step) for step in zip(*counts, strict=True)])


def _candidates(steps: MeasuredSteps, base: CostModel, terms: _Terms) -> Iterator[CostModel]:
    """Yield the models found from each initial division of the steps."""
    for share in START_SHARES:
        computes = steps.num_new_tokens > np.quantile(steps.num_new_tokens, share)
        if share == 0:
            computes = np.ones(len(steps), bool)
        for _ in range(MOST_ROUNDS):
            found = _solved(steps, terms, computes)
            yield _with(base, found)
            compute_s = terms.compute_s + _sum_of(terms, found, IN_COMPUTE)
            divided = compute_s > terms.memory_s + _sum_of(terms, found, IN_MEMORY)
            if (divided == computes).all():
                break
            computes = divided


def _solved(steps: MeasuredSteps, terms: _Terms, computes: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Find the parameters for a given division into steps limited by compute and steps limited by memory."""
    applies = {
        name: computes if name in IN_COMPUTE else ~computes if name in IN_MEMORY else np.ones(len(steps), bool)
        for name in terms.columns
    }
    columns = np.stack([np.where(applies[name], column, 0.0) for name, column in terms.columns.items()], axis=1)
    rest_s = steps.seconds - terms.other_s - np.where(computes, terms.compute_s, terms.memory_s)
    found = nonnegative_least_squares(columns / steps.seconds[:, np.newaxis], rest_s / steps.seconds)
    return dict(zip(terms.columns, found.tolist(), strict=True))


def _with(model: CostModel, values: Mapping[str, float]) -> CostModel:
    """Return a model with other values of some parameters, all of them seconds."""
    return CostModel(**(model.as_dict() | dict(values)))  # type: ignore[arg-type] # CostModel checks each value itself


def _sum_of(terms: _Terms, found: Mapping[str, float], names: tuple[str, ...]) -> Float64Array:
    total = np.zeros_like(terms.other_s)
    for name in names:
        if name in terms.columns:
            total += found[name] * terms.columns[name]
    return total


def _terms(steps: MeasuredSteps, base: CostModel, names: tuple[str, ...]) -> _Terms:
    tokens, context = steps.num_new_tokens, steps.counts("num_context_tokens")
    sequences, pairs = steps.counts("num_sequences"), steps.counts("num_attended_pairs")
    ones = np.ones(len(steps))
    columns = {
        "weights_s": ones,
        "fixed_s": ones,
        "token_compute_s": tokens,
        "pair_compute_s": pairs,
        "context_token_s": context,
        "sequence_s": sequences,
    }
    kept = _with(base, dict.fromkeys(names, 0.0))
    share_of_experts = 1.0 - (1.0 - kept.expert_share) ** tokens
    return _Terms(
        columns={name: columns[name].astype(np.float64) for name in names},
        compute_s=tokens * kept.token_compute_s
        + pairs * kept.pair_compute_s
        + np.minimum(pairs, tokens * kept.window) * kept.window_pair_compute_s,
        memory_s=kept.weights_s
        + share_of_experts * kept.experts_s
        + context * kept.context_token_s
        + np.minimum(context, sequences * kept.window) * kept.window_token_s
        + sequences * kept.sequence_state_s,
        other_s=ones * kept.fixed_s + sequences * kept.sequence_s,
    )
