"""docs/defaults.md has every field of the configurations with its default, and options have the defaults of fields."""

import ast
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Final

import pytest

from pagedkv.cli.engine_options import DEFAULT_MEMORY, EngineOptions
from pagedkv.cli.options import parse_gib
from pagedkv.cli.serving import ServingOptions
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.engine import EngineConfig
from pagedkv.models.memory import GIB
from pagedkv.scheduling import SchedulingConfig
from pagedkv.simulation import ServingConfig

PAGE: Final = (Path(__file__).parents[1] / "docs" / "defaults.md").read_text(encoding="utf-8")
CONFIGURATIONS: Final[tuple[Any, ...]] = (SpaceConfig, SchedulingConfig, ServingConfig, EngineConfig)
REQUIRED: Final = "*required*"


def rows() -> dict[str, list[str]]:
    """The cells of the table behind the first, by the field that the first names."""
    split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
    return {first.strip("`"): rest for first, *rest in split if first != "field"}


def shown(cell: str) -> object:
    return cell if cell == REQUIRED else ast.literal_eval(cell.strip("`"))


def default(field: "Field[Any]") -> object:
    if field.default is not MISSING:
        return field.default
    return REQUIRED if field.default_factory is MISSING else field.default_factory()


@pytest.mark.parametrize("place", range(len(CONFIGURATIONS)), ids=lambda place: CONFIGURATIONS[place].__name__)
def test_the_table_has_the_defaults_of_a_configuration(place: int) -> None:
    told = {name: shown(cells[place]) for name, cells in rows().items() if cells[place] != "-"}
    meant = {field.name: default(field) for field in fields(CONFIGURATIONS[place])}
    assert told == meant
    assert {name: type(value) for name, value in told.items()} == {name: type(value) for name, value in meant.items()}


@pytest.mark.parametrize(("options", "configuration"), [(ServingOptions, ServingConfig), (EngineOptions, EngineConfig)])
def test_options_have_the_defaults_of_the_fields_that_they_set(options: Any, configuration: Any) -> None:  # noqa: ANN401 - classes
    others = {"model", "num_blocks", "watermark"}  # a name that is read, and texts that are parsed
    meant = {field.name: default(field) for field in fields(configuration)}
    typed = {field.name: field.default for field in fields(options) if field.name in meant.keys() - others}
    assert len(typed) >= 4
    assert typed == {name: meant[name] for name in typed}


def test_an_engine_has_as_much_memory_from_either_door() -> None:
    assert EngineOptions().memory is None
    assert parse_gib(DEFAULT_MEMORY) * GIB == EngineConfig().kv_nbytes == EngineOptions().config().kv_nbytes


def test_a_replay_leaves_as_much_of_a_pool_free_as_its_configuration() -> None:
    assert ServingOptions().configuration()[0].watermark == ServingConfig(num_blocks=2).watermark
