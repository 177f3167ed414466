"""StepMeters: what a virtual clock notifies of each event; MeterPair: two of them as one."""

from typing import Protocol, final

from pagedkv.scheduling import Batch, Progress, Request
from pagedkv.simulation.running_rows import RunningRows
from pagedkv.simulation.step_work import StepWork

__all__ = ["MeterPair", "StepMeters"]


class StepMeters(Protocol):
    """The methods that a clock calls. Requests come in the order of their numbers, steps in that of time."""

    @property
    def uses_rows(self) -> bool:
        """Whether the running rows are used; gathering them takes a tenth of the time."""

    @property
    def num_requests(self) -> int:
        """Number of requests that have arrived."""

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Record a request, whether its content is known, and its tenant."""

    def rejected(self, request: Request) -> None:
        """Record that a request cannot be served."""

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Record admitted, preempted and rejected requests."""

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        """Record the work of a step."""

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:
        """Record that the present state lasts for this duration."""

    def stepped(self, step_s: float) -> None:
        """Record the seconds of the last planned step."""

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record requests that got their first token, or all tokens."""


@final
class MeterPair:
    """Notifies two meters of each event.

    Args:
        first: also numbers the requests; second: notified after it.
    """

    def __init__(self, first: StepMeters, second: StepMeters) -> None:
        self._first = first
        self._second = second

    @property
    def uses_rows(self) -> bool:
        """Whether either of them uses the running rows."""
        return self._first.uses_rows or self._second.uses_rows

    @property
    def num_requests(self) -> int:
        """Number of requests that have arrived."""
        return self._first.num_requests

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Record a request."""
        self._first.arrived(request, arrival_s, has_content=has_content, tenant=tenant)
        self._second.arrived(request, arrival_s, has_content=has_content, tenant=tenant)

    def rejected(self, request: Request) -> None:
        """Record that a request cannot be served."""
        self._first.rejected(request)
        self._second.rejected(request)

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Record admitted, preempted and rejected requests."""
        self._first.scheduled(batch, now_s)
        self._second.scheduled(batch, now_s)

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        """Record the work of a step."""
        self._first.planned(batch, running, work)
        self._second.planned(batch, running, work)

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:
        """Record that the present state lasts for this duration."""
        self._first.hold(duration_s, running, num_waiting, num_swapped)
        self._second.hold(duration_s, running, num_waiting, num_swapped)

    def stepped(self, step_s: float) -> None:
        """Record the seconds of the last planned step."""
        self._first.stepped(step_s)
        self._second.stepped(step_s)

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record requests that got their first token, or all tokens."""
        self._first.progressed(progress, end_s)
        self._second.progressed(progress, end_s)
