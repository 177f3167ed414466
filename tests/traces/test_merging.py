"""Several logs as one: the order, whose each request is, which blocks they share, and clocks that are none."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import TraceError
from pagedkv.planner.traces.merging import LogFile, MergedLogs
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import ContentBlocks, with_ids_apart

EPOCH_S = 1_764_000_000.0


def log(name: str, arrivals_s: Sequence[float], ids: Sequence[int] = (1, 2)) -> LogFile:
    return LogFile(name, name, [Request(at, 32, 1, np.array(ids, np.int64), 16) for at in arrivals_s])


@given(st.lists(st.lists(st.integers(0, 9), max_size=6).map(sorted), min_size=1, max_size=4))
def test_requests_come_in_order_of_arrival_then_of_files(files: list[list[int]]) -> None:
    merged = MergedLogs([log(str(number), arrivals) for number, arrivals in enumerate(files)])
    expected = sorted((at, number) for number, arrivals in enumerate(files) for at in arrivals)
    assert [(request.arrival_s, request.tenant) for request in merged] == [(at, str(number)) for at, number in expected]


def test_ids_of_each_file_are_its_own_unless_they_are_of_one_numbering() -> None:
    apart = MergedLogs([log("a", [0, 2]), log("b", [1])])
    ids = [tuple(request.block_ids.tolist()) for request in apart if request.block_ids is not None]
    assert ids[0] == ids[2] == (1, 2)
    assert not set(ids[1]) & {1, 2}
    assert "`has_shared_ids`" in " ".join(apart.notes)
    shared = MergedLogs([log("a", [0, 2]), log("b", [1])], has_shared_ids=True)
    assert [request.block_ids.tolist() for request in shared if request.block_ids is not None] == [[1, 2]] * 3
    assert not shared.notes


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20), st.integers(0, 2**22 - 1))
def test_ids_that_are_moved_stay_different_and_are_ids(ids: list[int], number: int) -> None:
    moved = with_ids_apart(Request(0.0, 16, 0, np.array(ids, np.int64), 16), number).block_ids
    assert moved is not None
    assert len(set(moved.tolist())) == len(set(ids))
    assert moved.min() >= 0
    other = with_ids_apart(Request(0.0, 16, 0, np.array(ids, np.int64), 16), number ^ 1).block_ids
    assert other is not None
    assert not set(moved.tolist()) & set(other.tolist())


def test_tokens_are_compared_across_files_and_by_salt() -> None:
    tokens = np.arange(32, dtype=np.int32)
    plain = [Request(0.0, 32, 0, prompt_token_ids=tokens, salt=salt) for salt in (None, None, "a", "b", "a")]
    first, second, a, b, again = (tuple(each.block_ids.tolist()) for each in ContentBlocks(16).of(plain))  # type: ignore[union-attr] # made of tokens
    assert first == second
    assert a == again
    assert len({*first, *a, *b}) == 6


def test_clocks_of_two_kinds_are_no_clock_unless_all_begin_together() -> None:
    files = [log("dated", [EPOCH_S, EPOCH_S + 5]), log("counted", [3.0, 4.0])]
    with pytest.raises(TraceError, match=r"counted: its times count from its own start.*`starts_together`"):
        list(MergedLogs(files))
    merged = MergedLogs(files, starts_together=True)
    assert [(request.tenant, request.arrival_s) for request in merged] == [
        ("dated", 0.0),
        ("counted", 0.0),
        ("counted", 1.0),
        ("dated", 5.0),
    ]


def test_files_that_never_meet_are_told() -> None:
    merged = MergedLogs([log("b", [100.0, 101.0]), log("a", [0.0, 50.0]), log("c", [20.0])], has_shared_ids=True)
    list(merged)
    assert merged.notes == ["b begins 50 s after a ends, so they never overlap (`starts_together` changes that)"]
