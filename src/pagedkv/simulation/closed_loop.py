"""serve_closed(): turns that wait for the answers before them, by the clock of the simulation.

A session begins as recorded, on the clock of the load. Each further turn comes a pause after the answers that it waits
for have ended: that before it in its session, or those that a trace of agents names (a subagent's first call follows
its parent's, a call follows the subagents whose results it has). Pauses, of users who think and of tools that run, do
not depend on the load, since more users do not think faster. A pause is the recorded one. A trace that has no ends of
answers has only the gaps between arrivals; then the pause is the gap less the answer's duration at a stated number of
tokens a second, or 0 if the answer takes longer. Requests without a session wait for nothing.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request
from pagedkv.simulation.virtual_clock import VirtualClock

MOST_HELD_NBYTES: Final = 512 * 2**20
REQUEST_NBYTES: Final = 400
"""Bytes of a request in memory, without its ids."""


def nbytes_of(request: Request) -> int:
    """Return the bytes of a request in memory."""
    contents = (request.block_ids, request.prompt_token_ids, request.output_token_ids)
    return REQUEST_NBYTES + sum(each.nbytes for each in contents if each is not None)


def held(requests: Iterable[Request], why: str, remedy: str) -> list[Request]:
    """Read all requests into memory. Raises ConfigurationError, with reason and remedy: they take above half a GiB."""
    read: list[Request] = []
    nbytes = 0
    for request in requests:
        nbytes += nbytes_of(request)
        if nbytes > MOST_HELD_NBYTES:
            raise ConfigurationError(
                f"{why} keeps all requests in memory, and the first {len(read):,} take {MOST_HELD_NBYTES >> 20} MiB: "
                f"take fewer (`limit`), or {remedy}"
            )
        read.append(request)
    return read


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Turns wait for the answers before them.

    Args:
        answer_tokens_per_s: tokens a second of answers when the trace was recorded, where it does not have their ends.

    Raises:
        ConfigurationError: the speed is not positive.
    """

    answer_tokens_per_s: float = 50.0

    def __post_init__(self) -> None:
        """Check the speed."""
        if not 0 < self.answer_tokens_per_s < float("inf"):
            raise ConfigurationError(f"`answer_tokens_per_s` must be positive, got {self.answer_tokens_per_s}")

    def pause_s(self, before: Sequence[Request], later: Request) -> float:
        """Return the seconds from the end of the last of the answers before to a turn, as recorded."""
        if later.pause_s is not None:
            return later.pause_s
        end_s = max(each.arrival_s + each.output_length / self.answer_tokens_per_s for each in before)
        return max(0.0, later.arrival_s - end_s)


def serve_closed(  # noqa: PLR0913 - the server, the requests, and the rules of arrival
    clock: VirtualClock,
    take_ended: Callable[[], Sequence[int]],
    requests: Iterable[Request],
    *,
    loop: ClosedLoop,
    load: float,
    show: Callable[[], None] = lambda: None,
) -> None:
    """Serve requests, each after those that it waits for.

    Args:
        clock: a clock with the given load, without a queue file.
        take_ended: returns the numbers of the requests that have ended since it was called.
        requests: all requests, in order of their recorded arrivals; they are kept in memory.
        loop: determines pauses that are not recorded.
        load: factor by which sessions begin faster.
        show: called after each arrival.

    Raises:
        ConfigurationError: the requests do not fit in half a GiB.
    """
    all_requests = held(requests, "`closed_loop`", "recorded times (`open_loop`)")
    before = _before(all_requests)
    followers: list[list[int]] = [[] for _ in all_requests]
    for place, earlier in enumerate(before):
        for each in earlier:
            followers[each].append(place)
    num_before = list(map(len, before))
    arrivals = [(each.arrival_s / load, place) for place, each in enumerate(all_requests) if not before[place]]
    heapq.heapify(arrivals)
    place_of: dict[int, int] = {}
    while arrivals or place_of:
        next_s = arrivals[0][0] if arrivals else math.inf
        if not clock.run_step(next_s):
            arrival_s, place = heapq.heappop(arrivals)
            place_of[clock.num_requests] = place
            clock.offer(replace(all_requests[place], arrival_s=arrival_s * load))
            show()
        for number in take_ended():
            for place in followers[place_of.pop(number)]:
                num_before[place] -= 1
                if not num_before[place]:
                    pause_s = loop.pause_s([all_requests[each] for each in before[place]], all_requests[place])
                    heapq.heappush(arrivals, (clock.now_s + pause_s, place))


def _before(requests: Sequence[Request]) -> list[set[int]]:
    """Return the places of the requests for which each one waits; none for the first of a session."""
    last: dict[str, int] = {}
    before = []
    for place, request in enumerate(requests):
        own = () if request.session is None else (request.session,)
        before.append({last[name] for name in request.waits_for or own if name in last})
        for name in own:
            last[name] = place
    return before
