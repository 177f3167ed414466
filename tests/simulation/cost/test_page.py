"""docs/models-and-costs.md shows what the code does: its snippets, its table of presets, its example of a file."""

import re
from pathlib import Path

import pytest

from pagedkv.models import model_names, read_model
from pagedkv.simulation.cost import read_cost_model
from tests.test_docs import Document

PAGE = Path(__file__).parents[3] / "docs/models-and-costs.md"
TEXT = PAGE.read_text(encoding="utf-8")
PRESET_ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([0-9,]+) \| ([0-9,]+) \|$", re.MULTILINE)
JSON_BLOCK = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_print_says_what_it_prints() -> None:
    document = Document(TEXT, PAGE.name)
    document.run()
    assert document.mistakes() == []
    assert len(document.comments) >= 10


def test_the_table_lists_every_preset_as_it_is() -> None:
    rows = {
        name: (groups, int(token.replace(",", "")), int(state.replace(",", "")))
        for name, groups, token, state in PRESET_ROW.findall(TEXT)
    }
    models = {name: read_model(name) for name in model_names()}
    assert rows == {
        name: (", ".join(group.name for group in model.groups), model.token_nbytes, model.state_nbytes)
        for name, model in models.items()
    }


def test_the_example_of_a_file_is_read_and_resembles_what_it_was_rounded_from(tmp_path: Path) -> None:
    (example,) = JSON_BLOCK.findall(TEXT)
    path = tmp_path / "cost.json"
    path.write_text(example, encoding="utf-8")
    cost = read_cost_model(str(path))
    assert cost.step_s(64, 65_536, 65_536, 64) == pytest.approx(
        read_cost_model("llama-3.1-8b/h100").step_s(64, 65_536, 65_536, 64), rel=0.01
    )


def test_the_formulas_name_every_field() -> None:
    assert [name for name in read_cost_model("instant").as_dict() if name not in TEXT] == []
