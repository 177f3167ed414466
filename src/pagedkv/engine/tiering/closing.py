"""DroppedStores: the stores of an engine that was garbage-collected without having been closed.

The garbage collector runs a finalizer in whatever thread it happens to run in, also in a thread of such a store, amid a
change of that store. So the finalizer only puts a word into a queue, and a thread of its own closes the stores.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, final

__all__ = ["DroppedStores"]

LONGEST_WAIT_S: Final = 10.0
"""Longest wait of the main thread that drops an engine, for its stores to be closed."""


@final
class DroppedStores:
    """Closes stores when asked to, in a thread of its own. Any thread may ask, also in a finalizer.

    Args:
        close: closes the stores; called at most once. It must not refer to what the finalizer is of.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # a put may run amid another put of it
        self._closed: SimpleQueue[None] = SimpleQueue()
        arguments = (self._asked, self._closed)
        threading.Thread(target=_close_when_asked, args=arguments, name="tiers-dropped", daemon=True).start()

    def close(self) -> None:
        """Close the stores. The main thread waits for it, since the process may end next; other threads do not."""
        self._asked.put(self._close)
        if threading.get_ident() == threading.main_thread().ident:
            try:
                self._closed.get(timeout=LONGEST_WAIT_S)
            except Empty:
                return

    def forget(self) -> None:
        """End the thread without closing: the stores are being closed otherwise."""
        self._asked.put(None)


def _close_when_asked(asked: "SimpleQueue[Callable[[], None] | None]", closed: "SimpleQueue[None]") -> None:
    close = asked.get()
    if close is not None:
        close()
        closed.put(None)
