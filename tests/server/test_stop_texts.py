"""StopCut: the text before the first stop text, however it is cut, and nothing that would have to be taken back."""

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from pagedkv.server.generation import StopCut

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def streamed(stops: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """Feed pieces; return what was released at each, and at the end."""
    cut = StopCut(stops)
    return [*(cut.feed(piece) for piece in pieces), cut.finish()]


@given(STOPS, st.lists(TEXTS, max_size=8))
def test_the_text_ends_before_the_first_stop_text(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    ends = [end for end in (_first_end(whole, stop) for stop in stops) if end is not None]
    released = "".join(streamed(stops, pieces))
    if not ends:
        assert released == whole
    else:
        first_complete = min(ends)
        begin = min(first_complete - len(stop) for stop in stops if whole[:first_complete].endswith(stop))
        assert whole.startswith(released)
        assert len(released) <= begin
        assert not any(stop in released for stop in stops)


def _first_end(whole: str, stop: str) -> int | None:
    place = whole.find(stop)
    return None if place < 0 else place + len(stop)


def test_what_may_begin_a_stop_text_is_held_back() -> None:
    assert streamed(["</end>"], ["one <", "/e", "nd", "> two"]) == ["one ", "", "", "", ""]
    assert streamed(["</end>"], ["one <", "b>"]) == ["one ", "<b>", ""]


@pytest.mark.parametrize("pieces", [["a"], ["a", "b"], []])
def test_without_stop_texts_nothing_is_held(pieces: list[str]) -> None:
    assert streamed([], pieces) == [*pieces, ""]
