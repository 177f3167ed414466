"""docs/words.md names every column of rows and blocks, and nothing that is not there."""

import re
from pathlib import Path
from typing import Final

import pytest

from pagedkv.blocks import record
from pagedkv.blocks.eviction.hazard import layout
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.space import publishing, rows
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
SIZES: Final = {"NUM_COMMON", "NUM_PER_GROUP", "NUM_FIELDS"}


def columns(source: str, first: str, last: str) -> set[str]:
    """Names of the constants that a module defines from one to another."""
    names = re.findall(r"^([A-Z_]+): Final = ", source, re.MULTILINE)
    return set(names[names.index(first) : names.index(last)]) - SIZES


def text_of(path: str) -> str:
    return (ROOT / "src" / "pagedkv" / path).read_text(encoding="utf-8")


ROW_COLUMNS: Final = columns(text_of("space/rows.py"), "STATUS", "NUM_PER_GROUP")
BLOCK_COLUMNS: Final = columns(text_of("blocks/record.py"), "BUCKET_NEXT", "NUM_FIELDS")


def kept_in(page: str) -> set[str]:
    """Columns that the page names in the third cell of a row, where it says where a word is kept."""
    cells = [line.split("|")[3] for line in page.splitlines() if line.startswith("| ")]
    return set(re.findall(r"`([A-Z_]+)`", " ".join(cells)))


def test_all_columns_are_looked_at() -> None:
    shared = {"PLANNED_HERE", "NUM_ENCODER_TOKENS"}  # stand where a group that needs no tail would have it
    assert len(ROW_COLUMNS - shared) == rows.NUM_COMMON + rows.NUM_PER_GROUP
    shared = {"KEPT", "RELEASED"}  # stand where groups that are walked, and blocks that steps hold, have another
    assert len(BLOCK_COLUMNS - shared) == record.NUM_FIELDS


@pytest.mark.parametrize("column", sorted(ROW_COLUMNS | BLOCK_COLUMNS))
def test_the_page_says_what_a_column_means(column: str) -> None:
    assert column in kept_in(PAGE)


def test_the_page_names_no_column_that_is_gone() -> None:
    named = set(re.findall(r"`([A-Z_]+)`", PAGE))
    modules = (rows, record, publishing, layout)
    assert {name for name in named if not any(hasattr(module, name) for module in modules)} == set()


def test_the_page_names_no_attribute_that_is_gone() -> None:
    config = SpaceConfig((FullAttention(),), 2, receipts=True)
    state = SpaceState(config)
    owners = {
        "SpaceState": state,
        "Group": state.groups[0],
        "StepLedger": StepLedger(1),
        "PoolArrays": record.PoolArrays,
        "ReceiptBook": state.receipts,
    }
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE)
    assert named
    for owner, attribute in named:
        assert hasattr(owners[owner], attribute), f"{owner}.{attribute}"


def test_the_owners_are_modules() -> None:
    for path in set(re.findall(r"`([a-z]+/[a-z_/.]+)`", PAGE)):
        place = ROOT / "src" / "pagedkv" / path  # it begins with a room
        assert place.exists() or place.with_suffix(".py").exists(), path


def test_no_word_stands_there_twice() -> None:
    listed = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ") and "| word" not in line]
    assert len(listed) == len(set(listed))


def test_a_column_without_a_word_is_noticed() -> None:
    assert kept_in(PAGE) - kept_in(PAGE.replace("`FROZEN`", "")) == {"FROZEN"}
