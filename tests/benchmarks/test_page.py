"""The table of operations on docs/benchmarks.md is written from figures, with where and when they were measured."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from benchmarks.machine import describe
from benchmarks.markdown import table_of
from benchmarks.measure import Row, Timing

ROW = asdict(Row("step", Timing(10.26, 9.0, 5), "step", bar_us=10, naive_us=1234.5, bar_ratio=0.9))
FIGURES: dict[str, Any] = {
    "machine": describe() | {"processor": "a processor", "commit": "abc1234", "date": "2026-11-25"},
    "bytes_a_block": 156.24,
    "rows": [ROW],
}
BESIDE = FIGURES | {
    "against": "b7c260a" + 33 * "0",
    "rows": [
        {"row": ROW, "best_ratio": 0.5, "ratio": 0.625},
        {"row": ROW | {"operation": "new", "bar_ratio": None}, "best_ratio": None, "ratio": None},
    ],
}


def test_the_page_says_machine_commit_and_date() -> None:
    first, *_ = page.operations_text(FIGURES).splitlines()
    assert first.startswith("Measured on a processor, ")
    assert first.endswith("; commit abc1234, 2026-11-25. Bookkeeping: 156.2 bytes a block (bar 160).")


def test_a_row_has_median_best_bar_and_naive() -> None:
    assert page.operations_text(FIGURES).splitlines()[2:] == [
        "| operation | unit | median | best | bar | naive |",
        "|---|---:|---:|---:|---:|---:|",
        "| step | step | 10.3 | 9 | 10 | 1,234 |",
    ]


def test_beside_another_commit_there_are_ratios_and_dashes_where_it_could_not_run() -> None:
    text = page.operations_text(BESIDE)
    assert "; ratios to b7c260a. " in text
    assert text.splitlines()[-2:] == [
        "| step | step | 10.3 | 9 | 10 | 1,234 | 0.50 | 0.62 | 0.90 |",
        "| new | step | 10.3 | 9 | 10 | 1,234 | - | - |   |",
    ]


def test_figures_of_a_file_take_the_place_of_the_old_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = page.PAGE.read_text(encoding="utf-8")
    copied, file = tmp_path / "page.md", tmp_path / "bench.json"
    copied.write_text(old, encoding="utf-8")
    file.write_text(json.dumps(FIGURES))
    monkeypatch.setattr(page, "PAGE", copied)
    monkeypatch.setattr("sys.argv", ["page", str(file)])
    page.main()
    new = copied.read_text(encoding="utf-8")
    assert table_of(new, "operations") == page.operations_text(FIGURES)
    assert new.replace(table_of(new, "operations"), table_of(old, "operations")) == old
