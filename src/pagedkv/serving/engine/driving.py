"""Driver: which thread drives an engine. One at a time; who comes meanwhile is refused, and nothing has happened.

A step reads and changes the scheduler, the block space and the device's tables, which know no threads. What takes one
call holds the wheel for that call, an engine's thread for as long as it lives.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from pagedkv.memory.contract.errors import EngineError

__all__ = ["Driver"]


@final
class Driver:
    """The wheel of one engine; a thread that has it may take it again."""

    def __init__(self) -> None:
        self._wheel = threading.RLock()

    @contextmanager
    def at_the_wheel(self) -> Iterator[None]:
        """Drive for a while. Raises EngineError where another thread does."""
        if not self._wheel.acquire(blocking=False):
            raise EngineError(
                "another thread drives this engine: an AsyncLLM has it until it is closed, another thread's step until "
                "it is over. Ask through that AsyncLLM, or build another engine over the model"
            )
        try:
            yield
        finally:
            self._wheel.release()
