"""Benchmarks that also measure older packages import by the paths that stay, those that users import."""

import re
from pathlib import Path
from typing import Final

import pytest

from benchmarks.catalogue import MODULES
from benchmarks.repository import ROOT

ROOMS: Final = "memory|serving|planner|blocks|contract|compilation"
INNER: Final = re.compile(rf"^\s*(?:from|import) pagedkv\.(?:{ROOMS})\b.*", re.MULTILINE)
FILES: Final = (
    *(ROOT / f"{module.replace('.', '/')}.py" for module in MODULES),
    ROOT / "benchmarks" / "trial.py",
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_inner_path_is_imported(file: Path) -> None:
    assert INNER.findall(file.read_text()) == []


def test_an_inner_path_would_be_noticed() -> None:
    assert INNER.findall("import numpy\n    from pagedkv.blocks import BlockPool\n")
    assert not INNER.findall("from pagedkv.device import KVStorage\n")
