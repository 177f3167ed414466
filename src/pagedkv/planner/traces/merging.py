"""Merges several logs into one trace: their requests on one clock, each with the tenant of its log.

Files share a clock if all count from 1970, or if none does; then each clock begins with its file. A mixture of the two
is refused, unless all files are to begin together. Equal arrivals come in the order of the files.

Block ids of different files are made distinct, unless the files share one numbering. Tokens and texts are compared
across files.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from pagedkv.errors import TraceError
from pagedkv.planner.traces.clocks import FIRST_EPOCH_S
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import with_ids_apart

__all__ = ["LogFile", "MergedLogs"]

ARRIVAL: Final = attrgetter("arrival_s")
PLACES: Final = 9
TOGETHER: Final = "Let all files begin together (`starts_together`)"


@dataclass(frozen=True, slots=True)
class LogFile:
    """One of several logs.

    Args:
        path: the file's path, for messages.
        tenant: tenant of the requests without one; None: no tenant.
        requests: requests in order of arrival, on the file's clock.
    """

    path: str
    tenant: str | None
    requests: Iterable[Request]


class MergedLogs:
    """Merges logs. Iterate once; notes are complete when all requests have been read.

    Args:
        files: the logs, at least one.
        has_shared_ids: whether all files share one numbering of blocks.
        starts_together: whether each file's first request arrives at 0.
    """

    def __init__(
        self, files: Sequence[LogFile], *, has_shared_ids: bool = False, starts_together: bool = False
    ) -> None:
        self._files = files
        self._has_shared_ids = has_shared_ids
        self._starts_together = starts_together
        self._spans_s: list[tuple[float, float] | None] = [None] * len(files)
        self._has_ids: set[int] = set()
        self._epoch_file: str | None = None
        self._other_file: str | None = None

    @property
    def notes(self) -> list[str]:
        """List warnings about several files together, one sentence each."""
        return [*self._clock_notes(), *self._id_notes()] if len(self._files) > 1 else []

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests of all files in order of arrival.

        Raises:
            TraceError: a file cannot be read; the files have no common clock.
        """
        return heapq.merge(*(self._of_file(number, file) for number, file in enumerate(self._files)), key=ARRIVAL)

    def _of_file(self, number: int, file: LogFile) -> Iterator[Request]:
        origin_s = last_s = None
        for request in file.requests:
            if origin_s is None:
                self._require_one_clock(file.path, request.arrival_s)
                origin_s = request.arrival_s if self._starts_together else 0.0
            arrival_s = round(request.arrival_s - origin_s, PLACES) if origin_s else request.arrival_s
            last_s = arrival_s
            first_s, _ = self._spans_s[number] or (arrival_s, arrival_s)
            self._spans_s[number] = first_s, last_s
            separate = request if len(self._files) == 1 or self._has_shared_ids else with_ids_apart(request, number)
            if request.block_ids is not None:
                self._has_ids.add(number)
            tenant = file.tenant if request.tenant is None else request.tenant
            yield (
                replace(separate, arrival_s=arrival_s, tenant=tenant)
                if origin_s or tenant != separate.tenant
                else separate
            )

    def _require_one_clock(self, path: str, first_s: float) -> None:
        if self._starts_together:
            return
        if first_s >= FIRST_EPOCH_S:
            self._epoch_file = self._epoch_file or path
        else:
            self._other_file = self._other_file or path
        if self._epoch_file is not None and self._other_file is not None:
            reason = f"its times count from its own start, those of {self._epoch_file} from 1970"
            raise TraceError(self._other_file, None, reason, TOGETHER)

    def _clock_notes(self) -> Iterator[str]:
        spans = [(span, file.path) for file, span in zip(self._files, self._spans_s, strict=True) if span is not None]
        latest_s, latest = math.inf, ""
        for (begin_s, end_s), path in sorted(spans):
            if begin_s > latest_s:
                gap = f"{begin_s - latest_s:,.0f} s"
                yield f"{path} begins {gap} after {latest} ends, so they never overlap (`starts_together` changes that)"
            if latest_s == math.inf or end_s > latest_s:
                latest_s, latest = end_s, path

    def _id_notes(self) -> Iterator[str]:
        if len(self._has_ids) > 1 and not self._has_shared_ids:
            yield (
                "each file numbers its blocks on its own, so files share no block: set `has_shared_ids` if all ids are "
                "of one numbering, as those of `anonymized` with one `salt`"
            )
