"""Calibration: a cost model fitted to steps, and its error on steps left out of the fit.

Errors are relative. Five fits, each to four fifths of the steps (one in five is left out), give the errors on the
steps left out. The model itself is fitted to all steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Float64Array
from pagedkv.errors import ConfigurationError
from pagedkv.simulation.calibration.fitting import COUNTED_BY, fit, predicted_s
from pagedkv.simulation.calibration.steps import MeasuredSteps
from pagedkv.simulation.cost import CostModel

__all__ = ["FEWEST_STEPS", "Calibration", "ErrorSummary", "Validation", "calibrate", "validate"]

FEWEST_STEPS: Final = 20
NUM_PARTS: Final = 5
UPPER_EDGES: Final = (8, 64, 512, 4096)
"""Bounds, in tokens of a step, that group the errors."""
CONSTANTS: Final = ("weights_s", "fixed_s")
OF_PROMPTS: Final = ("token_compute_s", "pair_compute_s")
"""Not fitted if steps only decode, since then the number of tokens is that of sequences."""
NO_COST: Final = CostModel()


@dataclass(frozen=True, slots=True)
class ErrorSummary:
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

    def as_dict(self) -> dict[str, float]:
        """Return the values for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of a fit.

    Args:
        model: the cost model.
        fitted: the parameters that the steps determined; the others are those of the base model.
        overall: errors of all steps.
        by_tokens: the same by tokens of a step, for groups that have steps.
        notes: warnings about the model, one sentence each.
    """

    model: CostModel
    fitted: tuple[str, ...]
    overall: ErrorSummary
    by_tokens: tuple[ErrorSummary, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the values for JSON."""
        return {
            "cost_model": self.model.as_dict(),
            "fitted": list(self.fitted),
            "errors": {
                "overall": self.overall.as_dict(),
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
    """Fit a cost model to measured steps. Six fits, O(steps) each: a second for 10,000 steps.

    Args:
        steps: measured steps.
        base: has the parameters that the steps do not determine; None: those are 0.

    Raises:
        ConfigurationError: the steps are too few, or too similar, to determine any parameter.
    """
    _require_enough(steps)
    names = _names(steps, base)
    start = NO_COST if base is None else base
    model = fit(steps, start, names)
    numbers = np.arange(len(steps))
    errors = np.empty(len(steps))
    for part in range(NUM_PARTS):
        left_out = numbers % NUM_PARTS == part
        partial = fit(steps.chosen(numbers[~left_out]), start, names)
        tested = steps.chosen(numbers[left_out])
        errors[left_out] = predicted_s(partial, tested) / tested.seconds - 1
    return Calibration(
        model=model,
        fitted=names,
        overall=_summary(steps, errors),
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
    if num_sizes == 1 and base is None:
        raise ConfigurationError(
            f"all {len(steps)} steps compute {int(steps.num_new_tokens[0]):,} tokens, so they do not determine the "
            "cost of a token: measure steps of different sizes, prompts as well as decoding, or name a model with the "
            "other parameters (`base=llama-3.1-8b/h100`)"
        )
    names = tuple(name for name in COUNTED_BY if name in CONSTANTS or COUNTED_BY[name] in varied)
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
