"""Calibration: a cost model fitted to steps, its error on steps left out of the fit, and the speed of a tier.

A step takes ``fixed_s + max(compute, memory) + num_sequences * sequence_s``, and ``several_s`` and ``chunk_s`` in steps
of their kind: linear in the parameters once the longer of the two is known. So steps are divided by the longer term,
the parameters are found by least squares, and the steps are divided again by these parameters, until nothing changes
(the least squares partition algorithm: Magnani and Boyd, Convex piecewise-linear fitting, 2009). This finds a good
solution, not always the best. So it starts from several divisions and returns the best of all solutions.

Costs are never negative, so neither are the coefficients: least squares by the active set method of Lawson and Hanson
(1974), chapter 23. If the plain solution gives a column a negative coefficient, the column explains no more than the
others do, and is left out.

Errors are relative to the measured seconds, since steps differ by three orders of magnitude. Outliers (a compilation,
another process, a time that was not one step's) do not move the fit: steps that differ from the median of steps of
their size by more than four times have no weight at first; then each has the bisquare weight of its error (Beaton and
Tukey 1974) at six median errors of steps of its size, and the fit is repeated. A fit whose median error is above a
quarter is refused.

A load is decided by sums of many steps, and steps vary more to the longer side. So the parameters are scaled such that
all steps but outliers take as long together as was measured. And the error of sums is measured by ten fits, each
without a tenth of the steps in a row: the root mean square of how far off the sum of those is.

Five fits, each to four fifths of the steps (one in five is left out), give the errors on the steps left out. The model
itself is fitted to all steps.

The bandwidth and latency of a tier, which a simulated tier takes, are measured through its store.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from pagedkv.contract.arrays import BoolArray, Float64Array, Int64Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.results import Result
from pagedkv.simulation.calibration.steps import MeasuredSteps
from pagedkv.simulation.cost import CostModel
from pagedkv.tiers import (
    GroupLayout,
    Identity,
    ModelIdentity,
    Run,
    StoreOutcome,
    Tier,
    TierStore,
    compute_check,
    runs_of,
)
from pagedkv.warming import make_ready, of_stores

TOLERANCE: Final = 1e-10
ROUNDS_A_COLUMN: Final = 10


def nonnegative_least_squares(columns: Float64Array, target: Float64Array) -> Float64Array:
    """Find coefficients, none negative, that minimise the squared error of ``columns @ coefficients`` to ``target``.

    Of equivalent columns, the first one gets the coefficient. O(rows * columns^2) for each used column.

    Args:
        columns: float64 ``[rows, columns]``.
        target: float64 ``[rows]``.

    Returns:
        float64 ``[columns]``.

    >>> nonnegative_least_squares(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([2.0, 1.0])).round(6).tolist()
    [1.5, 0.0]
    """
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    scaled = columns / norms
    num_columns = columns.shape[1]
    used = np.zeros(num_columns, bool)
    found = np.zeros(num_columns)
    least = TOLERANCE * max(float(np.linalg.norm(target)), 1e-300)
    for _ in range(ROUNDS_A_COLUMN * num_columns):
        gains = scaled.T @ (target - scaled @ found)
        gains[used] = 0.0
        if gains.max(initial=0.0) <= least:
            break
        used[int(gains.argmax())] = True
        found = _solved(scaled, target, used, found)
    coefficients: Float64Array = found / norms
    return coefficients


def _solved(scaled: Float64Array, target: Float64Array, used: BoolArray, found: Float64Array) -> Float64Array:
    """Solve for the used columns, leaving out those whose coefficient would be negative; changes ``used``."""
    while used.any():
        plain = np.zeros_like(found)
        plain[used] = np.linalg.lstsq(scaled[:, used], target, rcond=None)[0]
        negative = used & (plain <= 0)
        if not negative.any():
            return plain
        falls = found[negative] - plain[negative]
        shares = np.divide(found[negative], falls, out=np.zeros_like(falls), where=falls > 0)
        found = found + shares.min() * (plain - found)  # until the first coefficient becomes 0
        used &= found > TOLERANCE * np.abs(found).max(initial=0.0)
        found = np.where(used, found, 0.0)
    return np.zeros_like(found)


COUNTED_BY: Final[Mapping[str, str]] = {
    "weights_s": "num_new_tokens",
    "fixed_s": "num_new_tokens",
    "token_compute_s": "num_new_tokens",
    "pair_compute_s": "num_attended_pairs",
    "context_token_s": "num_context_tokens",
    "sequence_s": "num_sequences",
    "several_s": "num_new_tokens",
    "chunk_s": "num_sequences",
}
"""The fitted parameters, with the count of each. The two constants are distinguished by steps that are limited by
memory and steps that are limited by compute. If all steps are of one kind, ``weights_s`` gets the whole constant."""
IN_COMPUTE: Final = ("token_compute_s", "pair_compute_s")
IN_MEMORY: Final = ("weights_s", "context_token_s")
START_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MOST_ROUNDS: Final = 50
MOST_OF_A_SIZE: Final = 512
"""Steps of a fit that compute about as many tokens; the errors are those of all steps."""
NUM_WEIGHTINGS: Final = 3
SIZES_A_DOUBLING: Final = 2
FURTHEST: Final = 4.0
WIDTH: Final = 6.0
LEAST_SCALE: Final = 0.01
MOST_SCALE: Final = 0.5
"""Bounds of a median error of steps of one size: exact steps have no outliers, and lone steps may be some."""


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
    all_steps, steps = steps, steps.chosen(_representative(_sizes(steps)))
    sizes = _sizes(steps)
    terms = _terms(steps, base, names)
    weights = _first_weights(steps, sizes)
    for _ in range(NUM_WEIGHTINGS):
        best, least = base, np.inf
        for model in _candidates(steps, base, terms, weights):
            error = float(np.mean(weights * (predicted_s(model, steps) / steps.seconds - 1) ** 2))
            if error < least:
                best, least = model, error
        weights = _bisquare(predicted_s(best, steps) / steps.seconds - 1, sizes)
    expected_s = predicted_s(best, all_steps)
    usual = _bisquare(expected_s / all_steps.seconds - 1, _sizes(all_steps)) > 0
    factor = float(all_steps.seconds[usual].sum() / expected_s[usual].sum()) if usual.any() else 1.0
    return _with(best, {name: factor * getattr(best, name) for name in names})


def _sizes(steps: MeasuredSteps) -> Int64Array:
    """Return a number for each step, equal for steps that compute about as many tokens: int64 ``[steps]``."""
    sizes: Int64Array = np.floor(SIZES_A_DOUBLING * np.log2(np.maximum(1, steps.num_new_tokens))).astype(np.int64)
    return sizes


def _representative(sizes: Int64Array) -> Int64Array:
    """Return the places of steps of every size, evenly from those of a frequent one: int64 ``[n]``, ascending."""
    places = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
    taken = [each[np.linspace(0, len(each) - 1, min(len(each), MOST_OF_A_SIZE)).astype(np.int64)] for each in places]
    chosen: Int64Array = np.sort(np.concatenate(taken))
    return chosen


def _first_weights(steps: MeasuredSteps, sizes: Int64Array) -> Float64Array:
    """Return 1 for steps that took about as long as those of their size, and 0 for others: float64 ``[steps]``."""
    weights = np.ones(len(steps))
    for size in np.unique(sizes):
        places = np.flatnonzero(sizes == size)
        ratios = steps.seconds[places] / np.median(steps.seconds[places])
        weights[places] = (ratios <= FURTHEST) & (ratios >= 1 / FURTHEST)
    return weights


def _bisquare(errors: Float64Array, sizes: Int64Array) -> Float64Array:
    """Return the weight of each error among those of its size, from 1 for none to 0: float64 ``[steps]``."""
    weights = np.empty(len(errors))
    for size in np.unique(sizes):
        places = np.flatnonzero(sizes == size)
        scale = float(np.median(np.abs(errors[places])))
        reach = WIDTH * min(max(LEAST_SCALE, scale), MOST_SCALE)
        weights[places] = np.maximum(0.0, 1.0 - (errors[places] / reach) ** 2) ** 2
    return weights


def predicted_s(model: CostModel, steps: MeasuredSteps) -> Float64Array:
    """Return the seconds that a model predicts for each step: float64 ``[steps]``."""
    terms = _terms(steps, model, ())
    seconds: Float64Array = terms.other_s + np.maximum(terms.compute_s, terms.memory_s)
    return seconds


def _candidates(steps: MeasuredSteps, base: CostModel, terms: _Terms, weights: Float64Array) -> Iterator[CostModel]:
    """Yield the models found from each initial division of the steps."""
    for share in START_SHARES:
        computes = steps.num_new_tokens > np.quantile(steps.num_new_tokens, share)
        if share == 0:
            computes = np.ones(len(steps), bool)
        for _ in range(MOST_ROUNDS):
            found = _parameters_for(steps, terms, computes, weights)
            yield _with(base, found)
            compute_s = terms.compute_s + _sum_of(terms, found, IN_COMPUTE)
            divided = compute_s > terms.memory_s + _sum_of(terms, found, IN_MEMORY)
            if (divided == computes).all():
                break
            computes = divided


def _parameters_for(
    steps: MeasuredSteps, terms: _Terms, computes: BoolArray, weights: Float64Array
) -> dict[str, float]:
    """Find the parameters for a given division into steps limited by compute and steps limited by memory."""
    applies = {
        name: computes if name in IN_COMPUTE else ~computes if name in IN_MEMORY else np.ones(len(steps), bool)
        for name in terms.columns
    }
    columns = np.stack([np.where(applies[name], column, 0.0) for name, column in terms.columns.items()], axis=1)
    rest_s = steps.seconds - terms.other_s - np.where(computes, terms.compute_s, terms.memory_s)
    scale = np.sqrt(weights) / steps.seconds
    found = nonnegative_least_squares(columns * scale[:, np.newaxis], rest_s * scale)
    return dict(zip(terms.columns, found.tolist(), strict=True))


def _with(model: CostModel, values: Mapping[str, float]) -> CostModel:
    """Return a model with other values of some parameters, all of them seconds."""
    return CostModel(**(model.as_dict() | dict(values)))


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
        "several_s": tokens > 1,
        "chunk_s": tokens > sequences,
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
        other_s=ones * kept.fixed_s
        + sequences * kept.sequence_s
        + (tokens > 1) * kept.several_s
        + (tokens > sequences) * kept.chunk_s,
    )


FEWEST_STEPS: Final = 20
NUM_PARTS: Final = 5
NUM_SPANS: Final = 10
UPPER_EDGES: Final = (8, 64, 512, 4096)
"""Bounds, in tokens of a step, that group the errors."""
CONSTANTS: Final = ("weights_s", "fixed_s")
OF_PROMPTS: Final = ("token_compute_s", "pair_compute_s")
"""Not fitted if steps only decode, since then the number of tokens is that of sequences."""
NO_COST: Final = CostModel()
MOST_ERROR: Final = 0.25
"""Median error above which a fit is refused, and a plan that is based on it."""


@dataclass(frozen=True, slots=True)
class ErrorSummary(Result):
    """Relative errors of some steps.

    Args:
        least, most: tokens of these steps.
        num_steps: number of steps.
        median, p90: the absolute difference of predicted and measured seconds, as a share of the measured ones.
        bias: median of the signed difference; positive if predictions are too high.
    """

    least: int
    most: int
    num_steps: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of a fit.

    Args:
        model: the cost model.
        fitted: the parameters that the steps determined; the others are those of the base model.
        overall: errors of all steps.
        of_sums: relative error of the seconds of many steps together: the root mean square of those of a tenth of the
            steps in a row, left out of the fit.
        by_tokens: errors by tokens of a step, for groups that have steps.
        notes: warnings about the model, one sentence each.
    """

    model: CostModel
    fitted: tuple[str, ...]
    overall: ErrorSummary
    of_sums: float
    by_tokens: tuple[ErrorSummary, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the values for JSON."""
        return {
            "cost_model": self.model.as_dict(),
            "fitted": list(self.fitted),
            "errors": {
                "overall": self.overall.as_dict(),
                "of_sums": self.of_sums,
                "by_num_new_tokens": [each.as_dict() for each in self.by_tokens],
            },
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Validation:
    """Errors of a cost model on measured steps.

    Args:
        overall: errors of all steps.
        by_tokens: the same by tokens of a step, for groups that have steps.
        notes: warnings about the steps, one sentence each.
    """

    overall: ErrorSummary
    by_tokens: tuple[ErrorSummary, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the values for JSON."""
        errors = {
            "overall": self.overall.as_dict(),
            "by_num_new_tokens": [each.as_dict() for each in self.by_tokens],
        }
        return {"errors": errors, "notes": list(self.notes)}


def validate(steps: MeasuredSteps, model: CostModel) -> Validation:
    """Measure the errors of a cost model on measured steps. O(steps).

    Raises:
        ConfigurationError: there are no steps, or their seconds are not positive.
    """
    if not len(steps) or not (np.isfinite(steps.seconds).all() and (steps.seconds > 0).all()):
        raise ConfigurationError("there must be steps, and their seconds positive and finite")
    errors = predicted_s(model, steps) / steps.seconds - 1
    return Validation(_summary(steps, errors), tuple(_by_tokens(steps, errors)), steps.notes)


def calibrate(steps: MeasuredSteps, base: CostModel | None = None) -> Calibration:
    """Fit a cost model to measured steps. Sixteen fits, O(steps) each: seconds for 10,000 steps.

    Args:
        steps: measured steps.
        base: has the parameters that the steps do not determine; None: those are 0.

    Raises:
        ConfigurationError: the steps are too few, or too similar, to determine any parameter; or the fit is off by more
            than a quarter in the median.
    """
    _require_enough(steps)
    names = _names(steps, base)
    start = NO_COST if base is None else base
    model = fit(steps, start, names)
    numbers = np.arange(len(steps))

    def without(left_out: BoolArray) -> Float64Array:
        partial = fit(steps.chosen(numbers[~left_out]), start, names)
        return predicted_s(partial, steps.chosen(numbers[left_out]))

    errors = np.empty(len(steps))
    for part in range(NUM_PARTS):
        left_out = numbers % NUM_PARTS == part
        errors[left_out] = without(left_out) / steps.seconds[left_out] - 1
    usual = _bisquare(predicted_s(model, steps) / steps.seconds - 1, _sizes(steps)) > 0
    of_spans = []
    for span in np.array_split(numbers, NUM_SPANS):
        left_out = np.isin(numbers, span)
        counted = usual[left_out]
        if counted.any():
            sum_s = float(without(left_out)[counted].sum())
            of_spans.append(sum_s / float(steps.seconds[left_out][counted].sum()) - 1)
    overall = _summary(steps, errors)
    if overall.median > MOST_ERROR:
        raise ConfigurationError(
            f"the fitted cost model is off by {overall.median:.0%} in the median of {len(steps):,} steps, above "
            f"{MOST_ERROR:.0%}: the steps are not those of one engine at work, or something that they do not count "
            "decides their time. Measure steps on an idle machine, with all counts (StepRecords, a vLLM log)"
        )
    return Calibration(
        model=model,
        fitted=names,
        overall=overall,
        of_sums=float(np.sqrt(np.mean(np.square(of_spans)))),
        by_tokens=tuple(_by_tokens(steps, errors)),
        notes=(*steps.notes, *_notes(model, names, base)),
    )


def _require_enough(steps: MeasuredSteps) -> None:
    if len(steps) < FEWEST_STEPS:
        raise ConfigurationError(
            f"{len(steps)} steps are too few to fit a cost model to: measure {FEWEST_STEPS} or more, of different sizes"
        )
    if not (np.isfinite(steps.seconds).all() and (steps.seconds > 0).all()):
        raise ConfigurationError("seconds of steps must be positive and finite: leave out those that are not")


def _names(steps: MeasuredSteps, base: CostModel | None) -> tuple[str, ...]:
    """List the parameters that the steps determine: those whose counts differ from step to step."""
    num_sizes = len(np.unique(steps.num_new_tokens))
    varied = {name for name in set(COUNTED_BY.values()) if np.ptp(steps.counts(name)) > 0}
    kinds = {"several_s": steps.num_new_tokens > 1, "chunk_s": steps.num_new_tokens > steps.counts("num_sequences")}
    alike = {name for name, column in kinds.items() if column.all() or not column.any()}
    if num_sizes == 1 and base is None:
        raise ConfigurationError(
            f"all {len(steps)} steps compute {int(steps.num_new_tokens[0]):,} tokens, so they do not determine the "
            "cost of a token: measure steps of different sizes, prompts as well as decoding, or name a model with the "
            "other parameters (`base=llama-3.1-8b/h100`)"
        )
    names = tuple(
        name for name in COUNTED_BY if name in CONSTANTS or (COUNTED_BY[name] in varied and name not in alike)
    )
    if steps.num_sequences is None or (steps.num_new_tokens > steps.num_sequences).any():
        return names
    if base is None:
        raise ConfigurationError(
            f"all {len(steps)} steps only decode, so they do not determine the cost of prompts: measure steps with "
            "prompts, or name a model with the other parameters (`base=llama-3.1-8b/h100`)"
        )
    return tuple(name for name in names if name not in OF_PROMPTS)


def _notes(model: CostModel, names: tuple[str, ...], base: CostModel | None) -> list[str]:
    others = [name for name in COUNTED_BY if name not in names]
    notes = []
    if others:
        values = "cost nothing" if base is None else "are those of `base`"
        notes.append(f"the steps do not determine {', '.join(others)}: they {values}")
    if base is None:
        notes.append(
            "swaps cost nothing, since steps do not show them: set swap_fixed_s and swap_token_s, or give `base`"
        )
    if not model.token_compute_s and not model.pair_compute_s:
        notes.append("computing costs nothing beside reading memory: no step was long enough to show its cost")
    return notes


def _by_tokens(steps: MeasuredSteps, errors: Float64Array) -> list[ErrorSummary]:
    places = np.searchsorted(UPPER_EDGES, steps.num_new_tokens)
    return [
        _summary(steps.chosen(np.flatnonzero(places == place)), errors[places == place])
        for place in range(len(UPPER_EDGES) + 1)
        if (places == place).any()
    ]


def _summary(steps: MeasuredSteps, errors: Float64Array) -> ErrorSummary:
    sizes: Mapping[str, int] = {
        "least": int(steps.num_new_tokens.min()),
        "most": int(steps.num_new_tokens.max()),
        "num_steps": len(steps),
    }
    median, p90 = np.percentile(np.abs(errors), (50, 90)).tolist()
    return ErrorSummary(**sizes, median=median, p90=p90, bias=float(np.median(errors)))


BLOCK_SIZE: Final = 16
LARGE: Final = 2**22
SMALL: Final = 2**12
MOST_LARGE: Final = 32
FEWEST_LARGE: Final = 4
NUM_SMALL: Final = 32
NUM_ROUNDS: Final = 3
PATIENCE_S: Final = 120.0
IDENTITY: Final = Identity(
    (GroupLayout("full", BLOCK_SIZE, "uint8", "NC", (BLOCK_SIZE, 1), (1, 1)),),
    ModelIdentity("calibration of a tier", bytes(32)),
)


@dataclass(frozen=True, slots=True)
class TierRate(Result):
    """How fast a tier is.

    Args:
        name, medium: which tier.
        read_bandwidth, write_bandwidth: bytes a second of large entries, several at once, verification included.
        latency_s: median seconds to load one entry of 4 KiB alone.
        nbytes: bytes of the large entries of each round.
    """

    name: str
    medium: str
    read_bandwidth: float
    write_bandwidth: float
    latency_s: float
    nbytes: int


def measure_tier(tier: Tier) -> TierRate:
    """Store and load entries of an identity of their own, and remove them. The best of three rounds; seconds.

    It needs room for 16 to 128 MiB, by the tier's cap; what is least recently used may be evicted for it.

    The store's loops are compiled first, since compiling would count against the deadlines.

    Raises:
        ConfigurationError: it is host memory, does not answer, has a cap below 32 MiB, or did not store or load all.
        MissingExtraError: a package that its frames need is not installed.
    """
    if tier.medium == "host":
        raise ConfigurationError(
            "host memory is not measured: its entries are read in place, and a load takes the time of the bus"
        )
    num_large = min(MOST_LARGE, tier.cap_nbytes // (2 * LARGE))
    if num_large < FEWEST_LARGE:
        raise ConfigurationError(f"a tier is measured with at least {2 * FEWEST_LARGE * LARGE:,} bytes as its cap")
    compute_check((), tier.secret)
    make_ready(of_stores(tier.eviction))
    config = replace(tier.store_config(LARGE), admission="always")
    body = tier.open_body(IDENTITY.fingerprint)
    with TierStore(body, IDENTITY, config, secret=tier.secret) as store:
        large = runs_of(range(BLOCK_SIZE * num_large), BLOCK_SIZE, 1)
        small = runs_of(range(1, BLOCK_SIZE * NUM_SMALL + 1), BLOCK_SIZE, 1)
        writes, reads, single = [], [], list[float]()
        try:
            for _ in range(NUM_ROUNDS):
                writes.append(_stored_s(tier, store, large, LARGE))
                reads.append(_loaded_s(tier, store, large))
                _stored_s(tier, store, small, SMALL)
                single += [_loaded_s(tier, store, [run]) for run in small]
                _emptied(store)
        finally:
            _emptied(store)
    nbytes = num_large * LARGE
    return TierRate(tier.name, tier.medium, nbytes / min(reads), nbytes / min(writes), median(single), nbytes)


def _stored_s(tier: Tier, store: TierStore, runs: Sequence[Run], nbytes: int) -> float:
    outcomes = Counter[StoreOutcome]()
    content = bytes(range(256)) * (nbytes // 256)
    seconds = _seconds(
        lambda: store.offer(runs, [[content]] * len(runs), lambda _, outcome: outcomes.update([outcome])),
        lambda: store.wait_until_quiet(PATIENCE_S),
    )
    num_stored = int(store.contains([run.key for run in runs]).sum())
    if num_stored < len(runs):
        why = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or store.last_problem
        raise ConfigurationError(f"tier {tier.name} stored {num_stored} of {len(runs)} entries: {why}")
    return seconds


def _loaded_s(tier: Tier, store: TierStore, runs: Sequence[Run]) -> float:
    num_loaded, cause = 0, ""

    def load() -> None:
        nonlocal num_loaded, cause
        result = store.load(runs, PATIENCE_S).wait(PATIENCE_S)
        num_loaded, cause = result.num_runs, str(result.cause)

    seconds = _seconds(load)
    if num_loaded < len(runs):
        raise ConfigurationError(f"tier {tier.name} loaded {num_loaded} of {len(runs)} entries: {cause}")
    return seconds


def _seconds(*calls: Callable[[], object]) -> float:
    begun = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begun


def _emptied(store: TierStore) -> None:
    store.reset()
    store.wait_until_quiet(PATIENCE_S)
