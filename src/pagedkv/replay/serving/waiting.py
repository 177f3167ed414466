"""Who waits, in the order in which they are to be admitted: by priority, then by arrival.

A preempted request comes back under its old key, and so ahead of all that arrived after it.
"""

import heapq

from pagedkv.replay.serving.job import Job, JobKey

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Jobs in order of their keys. O(log n) to push or pop."""

    def __init__(self) -> None:
        self._heap: list[tuple[JobKey, Job]] = []

    def __len__(self) -> int:
        """Count the jobs."""
        return len(self._heap)

    def push(self, job: Job) -> None:
        """Let a job wait. No two have the same key."""
        heapq.heappush(self._heap, (job.key, job))

    def first(self) -> Job:
        """Look at the job that comes next; there must be one."""
        return self._heap[0][1]

    def pop(self) -> Job:
        """Take the job that comes next."""
        return heapq.heappop(self._heap)[1]
