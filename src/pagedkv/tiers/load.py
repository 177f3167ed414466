"""A load under way, as its caller has it, and its answer."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from pagedkv.tiers.actions import LoadEnd
from pagedkv.tiers.frame import OpenFrame
from pagedkv.tiers.identity import Run

__all__ = ["Load", "LoadedRuns"]


@dataclass(frozen=True, slots=True)
class LoadedRuns:
    """The answer to a load: the leading runs, verified.

    Args:
        parts: for each run, the bytes of each group's blocks.
        cause: why the next run was not loaded; NONE if all were.
        nbytes: bytes of their frames.
        wait_s: seconds from the call to the answer.
    """

    parts: tuple[tuple[memoryview, ...], ...]
    cause: LoadEnd
    nbytes: int
    wait_s: float

    @property
    def num_runs(self) -> int:
        """How many leading runs came."""
        return len(self.parts)


@dataclass(slots=True, eq=False)
class Load:
    """A load under way.

    Args:
        runs: the runs to be loaded.
        on_done: called once it has an answer, from any thread; it must not block and not call the store.
        result: the answer; None until there is one.
    """

    runs: tuple[Run, ...]
    on_done: Callable[[], None] | None = None
    result: LoadedRuns | None = None
    ticket: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    frames: dict[bytes, OpenFrame] = field(default_factory=dict)
    run_of: dict[bytes, Run] = field(init=False)

    def __post_init__(self) -> None:
        self.run_of = {run.key: run for run in self.runs}

    def wait(self, timeout_s: float | None = None) -> LoadedRuns:
        """Wait for the answer, which comes by the load's deadline.

        Raises:
            TimeoutError: it did not come within ``timeout_s``.
        """
        if not self.done.wait(timeout_s):
            raise TimeoutError(f"the load of {len(self.runs)} runs has no answer within {timeout_s} s")
        assert self.result is not None
        return self.result
