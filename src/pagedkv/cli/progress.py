"""Progress of long work on a terminal's stderr: a status while loops compile, bars while a trace runs."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pagedkv.cli.exit_codes import EXIT_INTERRUPTED, INTERRUPTED_EARLY

__all__ = ["leaving_at_once", "prepare", "progress_bars", "working"]


def prepare(compile_loops: Callable[[], None]) -> None:
    """Compile, or load, what a run needs, so that its bar shows the run alone."""
    with working("Preparing the compiled loops, slow on the first run only"), leaving_at_once():
        compile_loops()


def working(what: str) -> AbstractContextManager[object]:
    """Show what is being done, for work whose end cannot be foretold."""
    return Console(stderr=True).status(what)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process on the spot: the compiler swallows it, and no file is open yet."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: _leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _leave() -> None:
    os.write(2, f"pagedkv: {INTERRUPTED_EARLY}\n".encode())
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show bars whose tasks say in their field ``come_to`` how far they are; nothing off a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[come_to]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress
