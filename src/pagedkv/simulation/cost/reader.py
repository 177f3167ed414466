"""Reads a CostModel from a name or a JSON file.

A file has one JSON object with exactly the fields of :class:`~pagedkv.simulation.cost.CostModel`, and its
calibration if there is one. A missing or misspelt field is an error, since it would silently cost nothing. Every fault
is a ConfigurationError with the file, the key and a remedy.
"""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.models.json_file import read_json_object
from pagedkv.simulation.cost.cost_model import CostModel
from pagedkv.simulation.cost.origin import CALIBRATION_KEY, DATA_SHEET, STATED, CostOrigin, origin_in_file
from pagedkv.simulation.cost.presets import cost_model_named, cost_model_names

__all__ = ["read_cost_model", "read_cost_origin"]

NUM_SUGGESTIONS: Final = 3
LEAST_LIKENESS: Final = 0.4
EXAMPLE: Final = "pagedkv.simulation.cost.CostModel().as_dict() shows all keys"


def read_cost_model(name_or_path: str) -> CostModel:
    """Read a cost model.

    Args:
        name_or_path: "instant", "per-token", a pair such as "llama-3.1-8b/h100" or "llama-3.1-70b/8xh100" (any
            preset of a model with any GPU of the table), or the path of a JSON file. A name takes precedence;
            ``./name`` is always a path.

    Raises:
        ConfigurationError: there is no such name or file, or the file has other keys or values than a cost model.

    >>> read_cost_model("per-token").step_s(100, 5050, 100, 1)
    0.1
    """
    named = cost_model_named(name_or_path)
    return _from_file(_found(name_or_path)) if named is None else named


def read_cost_origin(name_or_path: str) -> CostOrigin:
    """Read the origin of a cost model's seconds, by name or file as in :func:`read_cost_model`.

    Raises:
        ConfigurationError: there is no such name or file, or its calibration cannot be read.

    >>> read_cost_origin("llama-3.1-8b/h100").in_short, read_cost_origin("instant").in_short
    ('data sheet', 'stated, error unknown')
    """
    if cost_model_named(name_or_path) is not None:
        return CostOrigin(DATA_SHEET if "/" in name_or_path else STATED)
    path = _found(name_or_path)
    return origin_in_file(str(path), read_json_object(path))


def _found(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if not _is_there(path):
        raise ConfigurationError(
            f"{name_or_path[:100]!r} is neither a cost model's name nor a file. Nearest names: "
            f"{', '.join(_nearest(name_or_path))}; `pagedkv presets` lists the usual ones"
        )
    return path


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # the name is too long for a path


def _nearest(name: str) -> list[str]:
    return get_close_matches(name[-100:].lower(), cost_model_names(), NUM_SUGGESTIONS, LEAST_LIKENESS) or ["instant"]


def _from_file(path: Path) -> CostModel:
    content = read_json_object(path)
    origin_in_file(str(path), content)
    values: Mapping[str, object] = {key: value for key, value in content.items() if key != CALIBRATION_KEY}
    names = [field.name for field in fields(CostModel)]
    unknown = sorted(set(values) - set(names))
    missing = [name for name in names if name not in values]
    if unknown:
        near = get_close_matches(unknown[0], missing or names, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigurationError(f"{path}: unknown key {unknown[0][:60]!r}. {hint}{EXAMPLE}")
    if missing:
        raise ConfigurationError(f"{path}: missing key {missing[0]!r}. Write 0 for what costs nothing; {EXAMPLE}")
    try:
        return CostModel(**values)  # type: ignore[arg-type] # CostModel checks each value itself
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}. Correct the value; times are in seconds") from error
