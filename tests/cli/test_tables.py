"""Tables on terminals of any width: no number is cut."""

import pytest

from pagedkv.cli.tables import print_numbers

HEADINGS = ("setting", "load", "answers/s", "hit ratio", "TPOT p50", "TPOT p99", "preempted")
ROWS = [("* 8xh100, block 16, lru", "1.09x", "13.1", "25.0%", "0.0501", "0.0512", "1,234")] * 2


@pytest.mark.parametrize("num_keys", [1, 2])
def test_no_number_is_cut_at_any_width(
    num_keys: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 46 columns a bound of 0.0512 was shown as 0.05 and dots: the table was taken for one column narrower."""
    for width in range(40, 141):
        monkeypatch.setenv("COLUMNS", str(width))
        print_numbers("Settings", HEADINGS, ROWS, num_keys=num_keys)
        shown = capsys.readouterr().out
        assert "…" not in shown, f"at {width} columns"
        assert all(cell in shown for cell in ROWS[0][1:]), f"at {width} columns"
        assert max(map(len, shown.splitlines())) <= width
