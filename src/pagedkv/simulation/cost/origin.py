"""CostOrigin: the source of a cost model's seconds, which readers of figures need to judge them.

There are three kinds: computed from a GPU's data sheet; fitted to measured steps (``pagedkv calibrate`` writes the
error of the fit into its file); or stated by a file or a name without a measurement. The origin is separate from the
model, since models with equal parameters may have different origins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pagedkv.errors import ConfigurationError

__all__ = ["CALIBRATED", "CALIBRATION_KEY", "DATA_SHEET", "STATED", "CostOrigin", "origin_in_file"]

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
