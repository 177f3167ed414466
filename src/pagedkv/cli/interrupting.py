"""Ctrl-C and SIGTERM: both end a command with one sentence, and only the exit code differs.

By default, both raise: Ctrl-C as always, SIGTERM a :class:`Terminated`, which every handler of Ctrl-C handles too. Some
work handles them between steps instead, so that its results so far are whole. Some work ends at once.

The exit codes of all commands are here, and the messages of commands that are interrupted before they begin. The module
needs no extra.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, Final, NoReturn

EXIT_WRONG_ANSWERS: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_ENGINE_ENDED: Final = 3
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143
INTERRUPTED_EARLY: Final = "interrupted before there was a result; nothing was written"
INTERRUPTED_BEFORE_SERVING: Final = "interrupted before it served"


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM as Ctrl-C is handled. Raises Terminated."""
    raise Terminated


def exit_code_of(interruption: BaseException | None) -> int:
    """Return the exit code of a command that this interruption ended."""
    return EXIT_TERMINATED if isinstance(interruption, Terminated) else EXIT_INTERRUPTED


RAISING: Final[Mapping[int, Callable[..., Any]]] = MappingProxyType(
    {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
)
"""The default handler of each signal. A signal that is ignored, or handled by other code, is left alone."""


@contextmanager
def noticing_interrupts() -> Iterator[Callable[[], KeyboardInterrupt | None]]:
    """Yield a function that returns the exception of a received signal; a second signal raises at once."""
    noticed: list[KeyboardInterrupt] = []

    def note(number: int) -> None:
        interruption = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if noticed:
            raise interruption
        noticed.append(interruption)

    with _handled_by(note):
        yield lambda: noticed[0] if noticed else None


@contextmanager
def leaving_at_once(message: str = INTERRUPTED_EARLY) -> Iterator[None]:
    """End the process at once at a signal, with a message on stderr.

    The compiler would swallow exceptions, and no file is open yet.
    """
    with _handled_by(partial(_leave, message)):
        yield


def _leave(message: str, number: int) -> NoReturn:
    os.write(2, f"pagedkv: {message}\n".encode())
    os._exit(EXIT_TERMINATED if number == signal.SIGTERM else EXIT_INTERRUPTED)


@contextmanager
def _handled_by(handle: Callable[[int], None]) -> Iterator[None]:
    """Call a function with the number of each signal, instead of raising."""
    raising = {number: handler for number, handler in RAISING.items() if signal.getsignal(number) is handler}
    for number in raising:
        signal.signal(number, lambda number, _frame: handle(number))
    try:
        yield
    finally:
        for number, handler in raising.items():
            signal.signal(number, handler)
