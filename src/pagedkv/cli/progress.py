"""Progress of long work on a terminal's stderr: a status while loops compile, bars while a trace runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["prepare", "progress_bars"]


def prepare(compile_loops: Callable[[], None]) -> None:
    """Compile, or load, what a run needs, so that its bar shows the run alone."""
    with Console(stderr=True).status("Preparing the compiled loops, slow on the first run only"):
        compile_loops()


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show bars whose tasks say in their field ``come_to`` how far they are; nothing off a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[come_to]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress
