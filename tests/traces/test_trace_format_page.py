"""docs/trace-format.md shows traces: those are read, or refused with the words that the page gives."""

import re
from pathlib import Path
from typing import Final

import pytest

from pagedkv.errors import TraceError
from pagedkv.planner.traces.formats import parsing
from pagedkv.planner.traces.formats.id_traces import MAX_NUM_SAMPLES
from pagedkv.planner.traces.formats.parsing import TraceRow
from pagedkv.planner.traces.reader import TraceReader

PAGE: Final = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text(encoding="utf-8")
EXAMPLE: Final = re.compile(r"(?:^> line (\d+: [^\n]*)\n\n)?^```(?:jsonl|csv)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES: Final = EXAMPLE.findall(PAGE)


def test_the_page_shows_every_kind_of_example() -> None:
    accepted = "".join(text for refusal, text in EXAMPLES if not refusal)
    assert sum(bool(refusal) for refusal, _ in EXAMPLES) == 4
    for word in ("block_runs", "block_ids", "token_ids", "hash_ids", "hash_runs", "requests", "arrived_s", "x_"):
        assert word in accepted


@pytest.mark.parametrize(("refusal", "text"), EXAMPLES)
def test_what_the_page_shows_is_true(tmp_path: Path, refusal: str, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with TraceReader(path) as trace:
        if refusal:
            with pytest.raises(TraceError, match=re.escape(f":{refusal}. ")):
                list(trace)
        else:
            has_header = "format" in text or "arrived_s" in text
            assert len(list(trace)) == len(text.splitlines()) - has_header


def test_the_page_names_every_key_in_the_order_in_which_they_are_written() -> None:
    described = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(TraceRow.__struct_fields__) <= set(described)
    canonical = PAGE.partition("keys in the order")[2].partition(";")[0]
    written = [name for name in TraceRow.__struct_fields__ if name != "block_ids"]
    assert re.findall(r"`(\w+)`", canonical) == written


def test_the_page_names_the_limits() -> None:
    assert f"1 to {parsing.MAX_LENGTH:,}" in PAGE
    assert f"1 to {MAX_NUM_SAMPLES:,}" in PAGE
    assert parsing.MAX_ARRIVAL_S == 10**11
    assert f"{parsing.MAX_SESSION_CHARACTERS:,} characters" in PAGE
