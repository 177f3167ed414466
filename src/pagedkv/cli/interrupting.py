"""Ctrl-C that is noticed between steps, so that what was done so far is whole."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["noticing_interrupts"]


@contextmanager
def noticing_interrupts() -> Iterator[Callable[[], bool]]:
    """Give a function that tells whether Ctrl-C was pressed; pressed again, it stops at once (KeyboardInterrupt).

    Where Ctrl-C is ignored or somebody else's, it stays so, and the function answers no.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield lambda: False
        return
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)
