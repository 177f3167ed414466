"""Driver: the lock of an engine. One thread drives it at a time, and other threads are refused with nothing changed.

A step reads and changes the scheduler, the block space and the device's tables, none of which is thread-safe. A call
holds the lock until it returns, an engine's thread until it ends.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from pagedkv.errors import EngineError

__all__ = ["Driver"]


@final
class Driver:
    """The lock of one engine; reentrant."""

    def __init__(self) -> None:
        self._wheel = threading.RLock()

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Hold the lock, without waiting for it. Raises EngineError where another thread holds it."""
        if not self._wheel.acquire(blocking=False):
            raise EngineError(
                "another thread drives this engine: an AsyncLLM has it until it is closed, another thread's step until "
                "it is over. Ask through that AsyncLLM, or build another engine over the model"
            )
        try:
            yield
        finally:
            self._wheel.release()
