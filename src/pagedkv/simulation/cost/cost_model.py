"""The seconds of a step, and where they come from.

Seconds of one step of an engine, from counts of its work: a roofline (Williams et al., 2009).

A step does arithmetic and reads memory, and the two overlap; the longer of them counts::

    step    = fixed_s + max(compute, memory) + num_sequences * sequence_s
    compute = num_new_tokens * token_compute_s
            + num_attended_pairs                           * pair_compute_s
            + min(num_attended_pairs, num_new_tokens * window) * window_pair_compute_s
    memory  = weights_s + experts_s * (1 - (1 - expert_share) ** num_new_tokens)
            + num_context_tokens                           * context_token_s
            + min(num_context_tokens, num_sequences * window)  * window_token_s
            + num_sequences * sequence_state_s

Every term grows with every count, so more work never shortens a step. The limit of a window or a chunk applies to the
sums. That is exact if all sequences are shorter than the window, or all longer, and too high in between. The experts'
term is the expected share of experts that at least one of the step's tokens uses, if tokens choose independently and
all experts are equally likely.

Ignored: writing the new keys and values (small against all weights), the bandwidth between GPUs (``fixed_s`` has only
the delay of each exchange), the imbalance of experts and of GPUs, and the lower efficiency of small batches.

CostOrigin: the source of a cost model's seconds, which readers of figures need to judge them.

There are three kinds: computed from a GPU's data sheet; fitted to measured steps (``pagedkv calibrate`` writes the
error of the fit into its file); or stated by a file or a name without a measurement. The origin is separate from the
model, since models with equal parameters may have different origins.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from reprlib import repr as short_repr
from typing import Final

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError

__all__ = ["CALIBRATED", "CALIBRATION_KEY", "DATA_SHEET", "STATED", "CostModel", "CostOrigin", "origin_in_file"]
LONGEST_S: Final = 1e6
"""No part of a step takes days; larger numbers must be in another unit."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of everything that a step computes, reads or moves. All fields ending in ``_s`` are seconds.

    Args:
        fixed_s: every step: launching, exchanging between GPUs, scheduling.
        token_compute_s: arithmetic for one new token, except attention.
        pair_compute_s: arithmetic for one query attending to one key, in layers that see the whole context.
        weights_s: reading the weights that every step needs.
        experts_s: reading all routed experts of a mixture; 0 for a dense model.
        expert_share: share of the experts that one token uses, in (0, 1].
        context_token_s: reading one token's keys and values, in layers that see the whole context.
        window: tokens that windowed (or chunked) layers see; 0: there are none.
        window_pair_compute_s: as ``pair_compute_s``, in windowed layers.
        window_token_s: as ``context_token_s``, in windowed layers.
        sequence_state_s: reading and writing one sequence's recurrent state.
        sequence_s: sampling and bookkeeping for one sequence; not overlapped.
        swap_fixed_s: fixed time of moving blocks to or from host memory in a step.
        swap_token_s: moving one token's keys and values.

    Raises:
        ConfigurationError: a field is negative, not a number, or absurd.
    """

    fixed_s: float = 0.0
    token_compute_s: float = 0.0
    pair_compute_s: float = 0.0
    weights_s: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 1.0
    context_token_s: float = 0.0
    window: int = 0
    window_pair_compute_s: float = 0.0
    window_token_s: float = 0.0
    sequence_state_s: float = 0.0
    sequence_s: float = 0.0
    swap_fixed_s: float = 0.0
    swap_token_s: float = 0.0

    def __post_init__(self) -> None:
        """Check every field."""
        object.__setattr__(self, "window", as_count(self.window, "window"))
        for name in (field.name for field in fields(self) if field.name.endswith("_s")):
            object.__setattr__(self, name, _checked_seconds(name, getattr(self, name)))
        share = self.expert_share
        if not _is_number(share) or not 0 < share <= 1:
            raise ConfigurationError(f"expert_share must be over 0 and at most 1, got {short_repr(share)}")
        object.__setattr__(self, "expert_share", float(share))

    def step_s(
        self, num_new_tokens: int, num_attended_pairs: int, num_context_tokens: int, num_sequences: int
    ) -> float:
        """Return the seconds of one step. O(1). Counts must not be negative, which is not checked.

        Args:
            num_new_tokens: tokens computed in this step, over all sequences.
            num_attended_pairs: pairs of a new token and a token to which it may attend, including itself, as if there
                were no windows: for ``n`` new tokens after ``c`` computed ones ``n * c + n * (n + 1) / 2``.
            num_context_tokens: tokens whose keys and values are read: each sequence's length after the step.
            num_sequences: sequences with tokens in the step.
        """
        window_pairs = min(num_attended_pairs, num_new_tokens * self.window)
        compute_s = (
            num_new_tokens * self.token_compute_s
            + num_attended_pairs * self.pair_compute_s
            + window_pairs * self.window_pair_compute_s
        )
        share_of_experts = 1.0 - (1.0 - self.expert_share) ** num_new_tokens
        memory_s = (
            self.weights_s
            + share_of_experts * self.experts_s
            + num_context_tokens * self.context_token_s
            + min(num_context_tokens, num_sequences * self.window) * self.window_token_s
            + num_sequences * self.sequence_state_s
        )
        return self.fixed_s + max(compute_s, memory_s) + num_sequences * self.sequence_s

    def swap_s(self, num_tokens: float) -> float:
        """Return the seconds of moving keys and values to or from host memory in one step; 0 for no tokens."""
        return self.swap_fixed_s + num_tokens * self.swap_token_s if num_tokens > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the model for JSON; :func:`~pagedkv.simulation.cost.read_cost_model` reads it back."""
        return asdict(self)


def _checked_seconds(name: str, value: object) -> float:
    # Compared before it is converted, since an integer of 400 digits does not fit a float. NaN fails both comparisons.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= LONGEST_S:
        raise ConfigurationError(
            f"{name} must be a number of seconds from 0 to {LONGEST_S:,.0f}, got {short_repr(value)}"
        )
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DATA_SHEET: Final = "data sheet"
CALIBRATED: Final = "calibrated"
STATED: Final = "stated"
CALIBRATION_KEY: Final = "calibration"
"""Key of the description of the fit in a cost model's file."""
BEYOND: Final = 1e15
NUMBERS: Final = ("num_steps", "median", "p90")


@dataclass(frozen=True, slots=True)
class CostOrigin:
    """Source of the seconds of a cost model.

    Args:
        kind: "data sheet", "calibrated" or "stated".
        num_steps: steps to which a calibrated model was fitted; else None.
        median, p90: relative errors of a calibrated model on steps left out of the fit, without sign; else None.
    """

    kind: str
    num_steps: int | None = None
    median: float | None = None
    p90: float | None = None

    @property
    def in_short(self) -> str:
        """The kind, and the error if it is known: "data sheet", "calibrated, error 12.7%"."""
        if self.kind == CALIBRATED:
            return f"{CALIBRATED}, error {self.median:.1%}"
        return self.kind if self.kind == DATA_SHEET else "stated, error unknown"

    @property
    def sentence(self) -> str:
        """Explain the consequence for figures in seconds."""
        if self.kind == CALIBRATED:
            return (
                f"calibrated on {self.num_steps:,} measured steps, with an error of {self.median:.1%} in the median "
                f"and {self.p90:.1%} at p90 on steps left out of the fit"
            )
        if self.kind == DATA_SHEET:
            return "computed from the GPU's data sheet and not measured: pagedkv calibrate fits them to measured steps"
        return "stated, with an unknown error: pagedkv validate measures it on measured steps"


def origin_in_file(where: str, values: Mapping[str, object]) -> CostOrigin:
    """Read the calibration from a cost model's file; the seconds of a file without one are "stated".

    Raises:
        ConfigurationError: the calibration cannot be read.
    """
    calibration = values.get(CALIBRATION_KEY)
    if calibration is None:
        return CostOrigin(STATED)
    numbers = [calibration.get(name) if isinstance(calibration, Mapping) else None for name in NUMBERS]
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < BEYOND for each in numbers):
        raise ConfigurationError(
            f"{where}: {CALIBRATION_KEY!r} must have the numbers {', '.join(NUMBERS)}. Write the file again with "
            "pagedkv calibrate, or leave the key out"
        )
    num_steps, median, p90 = (float(each) for each in numbers if isinstance(each, int | float))
    return CostOrigin(CALIBRATED, int(num_steps), median, p90)
