"""Progress of long work on a terminal's stderr: a status while loops compile, bars while a trace runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pagedkv.cli.interrupting import leaving_at_once

__all__ = ["prepare", "progress_bars", "working"]


def prepare(compile_loops: Callable[[], None]) -> None:
    """Compile or load the loops of a run before it begins, so that its bar shows only the run.

    What takes long is told by the compiler's own notice, with the numbers of loops.
    """
    with leaving_at_once():
        compile_loops()


def working(what: str) -> AbstractContextManager[object]:
    """Show a status for work of unknown duration."""
    return Console(stderr=True).status(what)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield bars whose tasks describe their progress in the field ``so_far``; nothing is shown off a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[so_far]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress
