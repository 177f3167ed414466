"""The requests of a log that arrived while events were recorded, as a trace.

The log has the requests, their arrivals, lengths, sessions and tokens. The events have the block size, and show which
of the prompts' blocks were stored during the recording. A prompt of unknown tokens stays unknown: events name no
request, and blocks are not attributed to requests by their times.

Log and events need a common clock. Times of events count from 1970. If a log's times have another origin, they cannot
be placed, and all of its requests are taken. Times without a year (vLLM's) get the year that is nearest to the
recording.
"""

from calendar import isleap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Final

import numpy as np

from pagedkv.errors import ConfigurationError
from pagedkv.planner.recording.recorder import Contents
from pagedkv.planner.traces.clocks import FIRST_EPOCH_S
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import TokenBlocks, chain_digests

WITHOUT_YEAR_S: Final = (946_684_800.0, 1_009_843_200.0)
"""2000 and 2001: the years that readers give to times without a year."""
LEAP_DAY: Final = (2, 29)
FURTHEST_ZONE_H: Final = 14
SECONDS_OF_HOUR: Final = 3600
PLACES: Final = 6
"""Decimals of microseconds, the precision of floats of seconds since 1970."""


@dataclass(slots=True)
class JoinCounts:
    """Counts of a log's requests.

    Args:
        num_read: requests in the log.
        num_outside: requests that arrived before or after the recording.
        num_taken: requests that were written.
        num_without_content: written requests of unknown tokens.
        num_blocks: full blocks of the prompts of all other written requests.
        num_stored: those of them whose content was stored by an event.
        num_generated: those of them that an earlier answer had, but no earlier prompt.
        first_s: first arrival of all, on the clock of events.
        last_s: last arrival.
        has_own_clock: whether the log's times could not be placed.
    """

    num_read: int = 0
    num_outside: int = 0
    num_taken: int = 0
    num_without_content: int = 0
    num_blocks: int = 0
    num_stored: int = 0
    num_generated: int = 0
    first_s: float | None = None
    last_s: float | None = None
    has_own_clock: bool = False


class LogClock:
    """Turns a log's times into those of events.

    Args:
        utc_offset_h: hours ahead of UTC of the log's dates, where they have no zone.
        near_s: a time of the recording.

    Raises:
        ConfigurationError: no zone has such an offset.
    """

    def __init__(self, utc_offset_h: float, near_s: float) -> None:
        if not -FURTHEST_ZONE_H <= utc_offset_h <= FURTHEST_ZONE_H:
            raise ConfigurationError(
                f"`utc_offset_h` must be from -{FURTHEST_ZONE_H} to {FURTHEST_ZONE_H} hours, got {utc_offset_h}"
            )
        self._offset_s = utc_offset_h * SECONDS_OF_HOUR
        self._near_s = near_s

    def seconds(self, arrival_s: float) -> float | None:
        """Return the time since 1970, or None for a clock with another origin."""
        if WITHOUT_YEAR_S[0] <= arrival_s < WITHOUT_YEAR_S[1]:
            return self._in_nearest_year(arrival_s) - self._offset_s
        return arrival_s - self._offset_s if arrival_s >= FIRST_EPOCH_S else None

    def _in_nearest_year(self, arrival_s: float) -> float:
        when, year = datetime.fromtimestamp(arrival_s, UTC), datetime.fromtimestamp(self._near_s, UTC).year
        is_leap_day = (when.month, when.day) == LEAP_DAY
        years = [each for each in (year - 1, year, year + 1) if isleap(each) or not is_leap_day]
        if not years:  # no year near the recording has such a day
            when, years = when.replace(month=3, day=1), [year]
        times_s = (when.replace(year=each).timestamp() for each in years)
        return min(times_s, key=lambda time_s: abs(time_s - self._near_s))


def joined(  # noqa: PLR0913 - two sources, and the counts
    requests: Iterable[Request],
    window_s: tuple[float, float],
    contents: Contents,
    clock: LogClock,
    counts: JoinCounts,
    *,
    block_size: int | None,
    keeps_tokens: bool = False,
) -> Iterator[Request]:
    """Yield the requests that arrived during the recording, the first one at 0, with block ids instead of tokens.

    Args:
        requests: requests of the log, in order of arrival.
        window_s: begin and end of the recording.
        contents: contents of the stored blocks.
        clock: converts the log's times.
        counts: filled in.
        block_size: tokens of a block; None if neither events nor the user state it: then tokens stay.
        keeps_tokens: whether tokens stay in any case. Ids exist for prompts alone, so cached blocks of an answer hit
            only if tokens stay.
    """
    blocks = None if block_size is None else TokenBlocks(block_size)
    generated: set[bytes] = set()
    origin_s: float | None = None
    for request in requests:
        counts.num_read += 1
        at_s = clock.seconds(request.arrival_s)
        counts.has_own_clock |= at_s is None
        if at_s is not None:
            counts.first_s = at_s if counts.first_s is None else counts.first_s
            counts.last_s = at_s
            if not window_s[0] <= at_s <= window_s[1]:
                counts.num_outside += 1
                continue
            origin_s = at_s if origin_s is None else origin_s
            request = replace(request, arrival_s=round(at_s - origin_s, PLACES))  # noqa: PLW2901 - on another clock
        counts.num_taken += 1
        if request.prompt_token_ids is None or blocks is None or block_size is None:
            counts.num_without_content += not request.has_content
            yield request
            continue
        for digest in chain_digests(request.prompt_token_ids, block_size):
            counts.num_blocks += 1
            counts.num_stored += contents.was_stored(digest, block_size)
            counts.num_generated += digest in generated and not blocks.has_block(digest)
        generated.update(_generated(request, block_size))
        ids = blocks.block_ids(request.prompt_token_ids)
        if keeps_tokens:
            yield request
            continue
        yield replace(
            request,
            block_ids=ids,
            block_size=block_size,
            prompt_token_ids=None,
            output_token_ids=None,
        )


def _generated(request: Request, block_size: int) -> Iterator[bytes]:
    """Yield digests of the full blocks of an answer, which may begin in the prompt. Its last token is not computed."""
    assert request.prompt_token_ids is not None
    if request.output_token_ids is not None and request.num_samples == 1:
        tokens = np.concatenate([request.prompt_token_ids, request.output_token_ids[:-1]])
        yield from islice(chain_digests(tokens, block_size), len(request.prompt_token_ids) // block_size, None)
