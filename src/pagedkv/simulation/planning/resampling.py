"""resampled(): other arrivals like those of a trace, by a block bootstrap of its own sessions.

One trace is one draw from what may arrive. Its time is cut into twelve spans; a session belongs to the span in which it
begins. As many spans are drawn with replacement (Künsch 1989: whole spans, since arrivals near one another are alike),
and each is moved, with all turns of its sessions, to where it is drawn. Turns after the end of the trace are left out.

A span that is drawn twice would hit its own copy. So each copy has a salt of its own: copies share among themselves
what their sessions share in the trace, and nothing with the first.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from pagedkv.planner.traces.request import Request
from pagedkv.simulation.closed_loop import held

NUM_SPANS: Final = 12


def _sessions(requests: Iterable[Request]) -> list[list[Request]]:
    """Group requests by session, in order of their beginnings; a request without a session is one by itself.

    A subagent's requests are of the session for which its first one waits.
    """
    sessions: defaultdict[object, list[Request]] = defaultdict(list)
    sessions_by_agent: dict[str, object] = {}
    for number, request in enumerate(requests):
        session: object = number
        if request.session is not None:
            parent = request.waits_for[0] if request.waits_for else request.session
            session = sessions_by_agent.setdefault(request.session, sessions_by_agent.get(parent, request.session))
        sessions[session].append(request)
    return list(sessions.values())


def resampled(requests: Iterable[Request], seed: int) -> list[Request]:
    """Draw other arrivals, in their order. O(requests log requests); all requests are in memory.

    Raises:
        ConfigurationError: the requests do not fit in half a GiB.
    """
    sessions = _sessions(held(requests, "`resamples`", "leave it out"))
    if not sessions:
        return []
    start_s = sessions[0][0].arrival_s
    end_s = max(session[-1].arrival_s for session in sessions)
    span_s = max((end_s - start_s) / NUM_SPANS, np.finfo(float).tiny)
    by_span: defaultdict[int, list[list[Request]]] = defaultdict(list)
    for session in sessions:
        by_span[min(NUM_SPANS - 1, int((session[0].arrival_s - start_s) / span_s))].append(session)
    drawn: list[Request] = []
    num_copies = Counter[int]()
    for place, span in enumerate(np.random.default_rng(seed).integers(0, NUM_SPANS, NUM_SPANS).tolist()):
        later_s = (place - span) * span_s
        drawn += [
            _copied(request, request.arrival_s + later_s, num_copies[span])
            for session in by_span[span]
            for request in session
            if request.arrival_s + later_s <= end_s
        ]
        num_copies[span] += 1
    return sorted(drawn, key=lambda request: request.arrival_s)


def _copied(request: Request, arrival_s: float, copy: int) -> Request:
    """Return a request at another time; copies after the first have a session and a salt of their own."""
    if not copy:
        return replace(request, arrival_s=arrival_s)
    session = None if request.session is None else f"{request.session} copy {copy}"
    waits_for = tuple(f"{each} copy {copy}" for each in request.waits_for)
    salt = f"{request.salt or ''} copy {copy}"
    return replace(request, arrival_s=arrival_s, session=session, waits_for=waits_for, salt=salt)
