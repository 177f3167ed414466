"""The source of the seconds of figures: the cost model's name and origin, worded equally in every command."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from pagedkv.report.documents import Seconds
from pagedkv.simulation.cost import CostOrigin, read_cost_origin
from pagedkv.simulation.cost.origin import DATA_SHEET

__all__ = ["SecondsSource", "origin_of", "shared_name"]


def shared_name(name: str) -> str:
    """Return a cost model's name without the user's folders; names of presets are unchanged.

    >>> shared_name("/home/me/cost.json"), shared_name("llama-3.1-8b/8xh100")
    ('cost.json', 'llama-3.1-8b/8xh100')
    """
    return PurePath(name).name if name.startswith(("/", "./", "../", "~")) or name.endswith(".json") else name


def origin_of(cost_model: str | None) -> CostOrigin:
    """Return the source of the seconds: that of ``--cost-model``; without that option, the GPU's data sheet.

    Raises:
        ConfigurationError: there is no such name or file, or its calibration cannot be read.
    """
    return CostOrigin(DATA_SHEET) if cost_model is None else read_cost_origin(cost_model)


@dataclass(frozen=True, slots=True)
class SecondsSource:
    """A cost model as named beside figures.

    Args:
        name: as typed, or of a preset.
        origin: the source of its seconds.
        is_assumed: whether no option determines the cost of steps.
    """

    name: str
    origin: CostOrigin
    is_assumed: bool = False

    @property
    def in_short(self) -> str:
        """The name and the origin: "cost.json, calibrated, error 12.7%"; and whether it is assumed."""
        return f"{shared_name(self.name)}, {self._origin_in_short}"

    def as_dict(self) -> Seconds:
        """Return the source for JSON and pages, which users share: a file is named without its folders."""
        return {
            "cost_model_name": shared_name(self.name),
            "in_short": self._origin_in_short,
            "is_assumed": self.is_assumed,
            "kind": self.origin.kind,
            "num_steps": self.origin.num_steps,
            "median": self.origin.median,
            "p90": self.origin.p90,
        }

    @property
    def _origin_in_short(self) -> str:
        return f"{self.origin.in_short}, assumed" if self.is_assumed else self.origin.in_short

    def warnings(self, remedy: str, model: str | None = None) -> Iterator[str]:
        """List the assumptions behind these seconds, one sentence each.

        Args:
            remedy: options that describe the hardware of a run.
            model: the served model, if it is known.
        """
        name = shared_name(self.name)
        others = model is not None and "/" in name and name.partition("/")[0].lower() != model.lower()
        if self.is_assumed:
            difference = f", not of {model}" if others else ""
            yield f"the seconds are those of {name}{difference}, since the hardware is not given: name it by {remedy}"
        elif others:
            yield f"the seconds are those of {name}, the memory is that of {model}"
        yield f"the seconds are those of {name}, {self.origin.sentence}"
