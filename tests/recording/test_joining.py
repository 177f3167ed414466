"""Requests of a log and what events tell: which are taken, and what is known of them."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.planner.recording.joining import JoinCounts, LogClock, joined
from pagedkv.planner.recording.recorder import Contents
from pagedkv.planner.traces.request import Request
from pagedkv.wire import BlocksStored

NOW_S = 1_760_000_000.0


def request(arrival_s: float, tokens: Sequence[int] | None = None) -> Request:
    if tokens is None:
        return Request(arrival_s, 5, 1)
    return Request(arrival_s, len(tokens), 1, prompt_token_ids=np.array(tokens, np.int32))


def contents(*blocks: BlocksStored) -> Contents:
    known = Contents()
    for each in blocks:
        known.store(each)
    return known


def block(name: int, tokens: Sequence[int], parent: int | None = None) -> BlocksStored:
    return BlocksStored((name,), parent, np.array(tokens, np.int32), len(tokens))


def test_requests_of_that_time_get_blocks_of_the_engines_size() -> None:
    known = contents(block(70, [1, 2]), block(71, [3, 4], 70), block(72, [9, 9], 99))
    counts = JoinCounts()
    rows = [
        request(NOW_S - 11, [1, 2]),
        request(NOW_S - 10, [1, 2, 3, 4, 5]),
        request(NOW_S, [1, 2, 9, 9]),
        request(NOW_S + 10),
        request(NOW_S + 11, [1, 2]),
    ]
    clock = LogClock(0.0, NOW_S)
    taken = list(joined(rows, (NOW_S - 10, NOW_S + 10), known, clock, counts, block_size=known.block_size))
    assert [None if each.block_ids is None else each.block_ids.tolist() for each in taken] == [[0, 1], [0, 2], None]
    assert [each.block_size for each in taken] == [2, 2, 0]
    assert (counts.num_read, counts.num_outside, counts.num_taken, counts.num_without_content) == (5, 2, 3, 1)
    assert (counts.num_blocks, counts.num_stored) == (4, 3)  # 9, 9 was stored behind something else
    assert known.num_unknown == 1


def test_a_block_counts_with_all_that_is_before_it() -> None:
    known = contents(block(1, [5, 6]), block(2, [7, 8], 1))
    counts = JoinCounts()
    list(joined([request(NOW_S, [7, 8])], (0, 2 * NOW_S), known, LogClock(0, NOW_S), counts, block_size=2))
    assert (counts.num_blocks, counts.num_stored) == (1, 0)


def test_blocks_of_earlier_answers_are_counted_and_stay_where_tokens_do() -> None:
    first, second = request(NOW_S, [1, 2, 3]), request(NOW_S + 1, [1, 2, 3, 4, 5, 6])
    first = replace(first, output_length=3, output_token_ids=np.array([4, 5, 6], np.int32))
    for keeps_tokens in (False, True):
        counts = JoinCounts()
        clock = LogClock(0, NOW_S)
        rows = [first, second, second]
        taken = list(joined(rows, (0, 2 * NOW_S), contents(), clock, counts, block_size=2, keeps_tokens=keeps_tokens))
        # [3, 4] is of the first answer; [5, 6] is not, for the last token of an answer is never computed.
        assert (counts.num_blocks, counts.num_generated) == (7, 1)
        assert all((each.prompt_token_ids is not None) == keeps_tokens for each in taken)
        assert (taken[0].output_token_ids is not None) == keeps_tokens


def test_without_a_block_size_tokens_stay() -> None:
    counts = JoinCounts()
    (taken,) = joined([request(NOW_S, [1])], (0, 2 * NOW_S), Contents(), LogClock(0, NOW_S), counts, block_size=None)
    assert taken.prompt_token_ids is not None


def test_times_that_count_from_elsewhere_cannot_be_placed() -> None:
    counts = JoinCounts()
    taken = list(joined([request(0.5)], (NOW_S, NOW_S + 1), Contents(), LogClock(0, NOW_S), counts, block_size=2))
    assert (len(taken), taken[0].arrival_s, counts.has_own_clock) == (1, 0.5, True)


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("told", "near", "meant"),
    [
        ("2000-05-01T10:00:00", "2026-05-01T10:00:30", "2026-05-01T10:00:00"),
        ("2000-12-31T23:59:59", "2027-01-01T00:00:30", "2026-12-31T23:59:59"),
        ("2001-01-01T00:00:01", "2026-12-31T23:59:59", "2027-01-01T00:00:01"),
        ("2000-02-29T12:00:00", "2028-02-29T12:00:00", "2028-02-29T12:00:00"),
        ("2000-02-29T12:00:00", "2026-02-28T12:00:00", "2026-03-01T12:00:00"),
    ],
)
def test_times_without_a_year_are_of_the_nearest(told: str, near: str, meant: str) -> None:
    assert LogClock(0.0, seconds(near)).seconds(seconds(told)) == seconds(meant)


def test_a_zone_is_taken_off() -> None:
    assert LogClock(2.0, NOW_S).seconds(NOW_S + 7200) == NOW_S
    with pytest.raises(ConfigurationError, match="`utc_offset_h` must be from -14 to 14 hours"):
        LogClock(15.0, NOW_S)
    with pytest.raises(ConfigurationError, match="`utc_offset_h`"):
        LogClock(float("nan"), NOW_S)


def test_hashes_of_a_new_process_mean_something_else() -> None:
    known = contents(block(1, [5, 6]))
    known.forget_hashes()
    known.store(block(2, [7, 8], 1))
    assert known.num_unknown == 1


def test_the_size_of_most_blocks_is_the_engines() -> None:
    assert Contents().block_size is None
    assert contents(block(1, [1] * 4), block(2, [1] * 2), block(3, [2] * 2)).block_size == 2


def test_blocks_of_no_size_say_nothing_of_the_engines() -> None:
    offloaded = BlocksStored((1, 2, 3), None, None, 0, "CPU")
    known = contents(offloaded, block(1, [1] * 2), BlocksStored((), None, None, 4))
    assert (known.block_size, known.num_unknown, dict(known.num_by_block_size)) == (2, 3, {2: 1})
