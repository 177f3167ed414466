"""Messages about compilation: one line after two seconds of it, its progress, and a clean end.

Machine code is kept on disk, so this is shown once for each machine and version; without it a first call would be
silent for half a minute. The line goes to stderr and is no warning. A process is silent if the process that started it
has written the line, and so is a worker of a pool: :data:`SAID` is passed to child processes in the environment.

Signals are deferred until a piece is compiled, which takes a fraction of a second. LLVM calls back into Python, and an
exception raised there would be printed and lost.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import parent_process
from typing import Any, Final, TextIO, cast

PATIENCE_S: Final = 2.0
SETTING: Final = "PAGEDKV_COMPILE_NOTICE"
"""The environment variable that silences the line: ``0``."""
SAID: Final = "PAGEDKV_COMPILE_NOTICE_SAID"
"""The environment variable by which a process marks, for its children, that the line was written."""
NUM_LINES: Final = 10
"""Lines of progress off a terminal."""
CLEAR: Final = "\x1b[K"
"""Clears a terminal's line behind the text."""
INTERRUPTED: Final = "interrupted while pagedkv compiled its loops; what is compiled so far is kept"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class _Signals:
    """Signals with handlers in Python: deferred, and handled later."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[int] = []

    @property
    def are_pending(self) -> bool:
        """Whether a signal was deferred."""
        return bool(self._pending)

    def hold(self) -> None:
        """Defer signals from now on; only in the main thread, which alone handles them."""
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, lambda number, _: self._pending.append(number))

    def let_go(self) -> None:
        """Handle the deferred signals."""
        if threading.current_thread() is threading.main_thread():
            handlers, pending = self._handlers, self._pending
            self._handlers, self._pending = {}, []
            for number, handler in handlers.items():
                signal.signal(number, cast("Any", handler))
            for number in pending:
                signal.raise_signal(number)


@dataclass(slots=True)
class Notice:
    """The messages of one process about its compilation.

    Args:
        stream: returns the stream to write to.
        environment: has the mark of parent processes, and receives that for child processes.
        clock: seconds, from any moment on.
        is_worker: the process works for another one, which writes the messages.
        num_to_load: loops that are on disk for this process, at most; 0 where that is unknown.
    """

    stream: Callable[[], TextIO]
    environment: MutableMapping[str, str]
    clock: Callable[[], float] = time.monotonic
    is_worker: bool = False
    num_to_load: int = 0
    _seconds: float = 0.0
    _num_compiled: int = 0
    _depth: int = 0
    _loading_s: float = 0.0
    _num_loaded: int = 0
    _num_tenths: int = -1
    _was_due: bool = False
    _is_open: bool = False
    _signals: _Signals = field(default_factory=_Signals)

    @contextmanager
    def compiling(self, folder: Callable[[], str | None]) -> Iterator[None]:
        """Surround the compilation of a loop or of a piece of one.

        Args:
            folder: returns the folder of machine code, or None.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; its message is one sentence, without the frames of Numba's compiler.
        """
        began = self.clock()
        if self._depth == 0:
            self._signals.hold()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._seconds += self.clock() - began
                self._num_compiled += 1
            self._show(self._seconds + (self.clock() - began if self._depth else 0), folder)
            if self._depth == 0 or self._signals.are_pending:
                self._let_signals_go()

    @property
    def num_compiled(self) -> int:
        """Loops that this process has compiled; those loaded from disk do not count."""
        return self._num_compiled

    def say_now(self, folder: str) -> None:
        """Write the line at once, before a long compilation in other processes."""
        self._seconds += PATIENCE_S
        self._show(self._seconds, lambda: folder)

    def progress(self, num_done: int, num_loops: int, what: str = "compiled") -> None:
        """Show how far a long compilation is: on a terminal in one place, else as a line at each tenth."""
        if not self._is_open:
            return
        if self.stream().isatty():
            self._write(f"\r  {num_done:,} of {num_loops:,} loops are {what}{CLEAR}\r")
            return
        num_tenths = NUM_LINES * num_done // max(1, num_loops)
        if num_tenths > self._num_tenths:
            self._num_tenths = num_tenths
            self._write(f"pagedkv: {num_done:,} of {num_loops:,} loops are {what}\n")

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surround the loading of a loop from disk; on a busy machine many of them take seconds, which is shown."""
        began = self.clock()
        yield
        self._num_loaded += 1
        if self._depth:
            return  # within a compilation, which is shown itself
        self._loading_s += self.clock() - began
        if self._loading_s < PATIENCE_S or self.is_worker or self.environment.get(SETTING) == "0":
            return
        if not self._was_due:
            self._was_due = self._is_open = True
            self._write("pagedkv: loading its compiled loops, which takes long on this machine now\n")
        self.progress(self._num_loaded, max(self.num_to_load, self._num_loaded), "loaded")

    def _show(self, seconds: float, folder: Callable[[], str | None]) -> None:
        if seconds < PATIENCE_S or self.is_worker or self.environment.get(SETTING) == "0":
            return
        if not self._was_due:
            self._was_due = True
            self._is_open = not self.environment.get(SAID)
            self.environment[SAID] = "1"
            if self._is_open:
                self._write(_line(folder()))
        if self._is_open and self._depth == 0 and self.stream().isatty():
            self._write(f"\r  {self._num_compiled} compiled{CLEAR}\r")

    def _let_signals_go(self) -> None:
        try:
            self._signals.let_go()
        except KeyboardInterrupt as interruption:
            raise type(interruption)(INTERRUPTED) from None

    def _write(self, text: str) -> None:
        stream = self.stream()
        stream.write(text)
        stream.flush()


def _line(folder: str | None) -> str:
    kept = f"kept in {folder}" if folder else "kept nowhere, since no folder can be written"
    return (
        f"pagedkv: compiling its loops, which takes seconds to minutes, once: they are {kept}. "
        f"Ahead of time: pagedkv.warming.warm_up(), or pagedkv warm-up. Without this line: {SETTING}=0\n"
    )


NOTICE: Final = Notice(lambda: sys.stderr, os.environ, is_worker=parent_process() is not None)
"""The notice of this process."""
