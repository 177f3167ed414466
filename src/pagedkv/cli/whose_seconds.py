"""Whose seconds figures are in: the cost model by name, and where it comes from; the same words in every command."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from pagedkv.planner.report.documents import Seconds
from pagedkv.planner.simulation.cost import CostOrigin, read_cost_origin
from pagedkv.planner.simulation.cost.origin import DATA_SHEET

__all__ = ["WhoseSeconds", "origin_of", "shared_name"]


def shared_name(name: str) -> str:
    """Name a cost model without the folders of whoever ran it; names of presets stay as they are.

    >>> shared_name("/home/me/cost.json"), shared_name("llama-3.1-8b/8xh100")
    ('cost.json', 'llama-3.1-8b/8xh100')
    """
    return PurePath(name).name if name.startswith(("/", "./", "../", "~")) or name.endswith(".json") else name


def origin_of(cost_model: str | None) -> CostOrigin:
    """Tell where the seconds come from: of ``--cost-model``, or computed for the GPU where that is not given.

    Raises:
        ConfigurationError: no such name or file, or it says what it was fitted to in a way that cannot be read.
    """
    return CostOrigin(DATA_SHEET) if cost_model is None else read_cost_origin(cost_model)


@dataclass(frozen=True, slots=True)
class WhoseSeconds:
    """A cost model as figures name it.

    Args:
        name: as typed, or of a preset.
        origin: where its seconds come from.
        is_assumed: whether nothing that was typed says what steps cost.
    """

    name: str
    origin: CostOrigin
    is_assumed: bool = False

    @property
    def in_short(self) -> str:
        """Name it and its origin: "cost.json, calibrated, error 12.7%"; and whether it is assumed."""
        return f"{shared_name(self.name)}, {self._origin_in_short}"

    def as_dict(self) -> Seconds:
        """Lay out for JSON and pages, which are passed on: a file is named without its folders."""
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
        """Say what these seconds rest on, each in a sentence.

        Args:
            remedy: options that say what a run is on.
            model: whose memory it is, if that is known.
        """
        name = shared_name(self.name)
        others = model is not None and "/" in name and name.partition("/")[0].lower() != model.lower()
        if self.is_assumed:
            whose = f", not of {model}" if others else ""
            yield f"the seconds are those of {name}{whose}, for nothing says what this runs on: {remedy} do"
        elif others:
            yield f"the seconds are those of {name}, the memory is that of {model}"
        yield f"the seconds are those of {name}, {self.origin.sentence}"
