"""Progress on a terminal's stderr: a status while loops compile, bars while a trace runs, the state of an engine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeAlias, final

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from pagedkv.cli.interrupting import leaving_at_once
from pagedkv.models import ModelMemory
from pagedkv.planner.models import asks_class, read_model

SECONDS_BETWEEN_LINES: Final = 10.0


def prepare(compile_loops: Callable[[], None]) -> None:
    """Compile or load the loops of a run before it begins, so that its bar shows only the run.

    What takes long is told by the compiler's own notice, with the numbers of loops.
    """
    with leaving_at_once():
        compile_loops()


def working(what: str) -> AbstractContextManager[object]:
    """Show a status for work of unknown duration."""
    return Console(stderr=True).status(what)


@final
class Stages:
    """Tells the stages of a start, each with its seconds: by a line that runs on a terminal, else by plain lines.

    Args:
        console: where they are printed. Default: stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._begin = monotonic()

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return monotonic() - self._begin

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Tell that a stage begins, that it goes on, and how long it took; nothing more once it has failed."""
        begin = monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as progress:
                progress.add_task(what, total=None)
                yield
        else:
            self._tell(f"{what} ...")
            over = Event()
            telling = Thread(target=self._go_on, args=(what, over, begin), daemon=True)
            telling.start()
            try:
                yield
            finally:
                over.set()
                telling.join()
        self._tell(f"{what} took {monotonic() - begin:.1f} s")

    def _go_on(self, what: str, over: Event, begin: float) -> None:
        while not over.wait(SECONDS_BETWEEN_LINES):
            self._tell(f"{what}, {monotonic() - begin:.0f} s so far")

    def _tell(self, line: str) -> None:
        self._console.print(f"pagedkv: {line}", markup=False, highlight=False, soft_wrap=True)


def named_model(name_or_path: str, kv_dtype: str | None = None) -> ModelMemory:
    """Read the memory of a model. Raises ConfigurationError as :func:`pagedkv.planner.models.read_model`."""
    status = working(f"Asking the model's class what its layers keep: {name_or_path}")
    with status if asks_class(name_or_path) else nullcontext():
        return read_model(name_or_path, kv_dtype)


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


if TYPE_CHECKING:
    from pagedkv.engine.outputs import StepRecord
Watch: TypeAlias = Callable[["StepRecord", int], None]
SECONDS_BETWEEN: Final = 0.1
NUM_LINES: Final = 10
BAR_WIDTH: Final = 30


@contextmanager
def live_view(num_requests: int) -> Iterator[Watch]:
    """Yield a function to call after each step, with its record and the number of finished requests."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(num_requests).watch
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield _Picture(num_requests, live).watch


@final
class _Lines:
    """Prints progress after each tenth of the requests."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._num_printed = 0

    def watch(self, record: "StepRecord", num_done: int) -> None:
        """Process the record of a step."""
        num_tenths = NUM_LINES * num_done // self._num_requests
        if num_tenths > self._num_printed:
            self._num_printed = num_tenths
            typer.echo(
                f"{num_done:,} of {self._num_requests:,} answered; {_requests(record)}; {_blocks(record)}", err=True
            )


@final
class _Picture:
    """Draws requests and memory, at most ten times a second."""

    def __init__(self, num_requests: int, live: Live) -> None:
        self._num_requests = num_requests
        self._live = live
        self._begin = self._shown = monotonic()
        self._num_tokens = 0

    def watch(self, record: "StepRecord", num_done: int) -> None:
        """Process the record of a step."""
        self._num_tokens += record.num_tokens + record.num_hit_tokens
        now = monotonic()
        if now - self._shown > SECONDS_BETWEEN:
            self._shown = now
            self._live.update(self._drawn(record, num_done, now), refresh=True)

    def _drawn(self, record: "StepRecord", num_done: int, now: float) -> Group:
        table = Table.grid(padding=(0, 2))
        answered = ProgressBar(self._num_requests, num_done, width=BAR_WIDTH)
        table.add_row("answered", answered, f"{num_done:,} of {self._num_requests:,}")
        used = ProgressBar(record.num_blocks, record.num_used_blocks, width=BAR_WIDTH)
        table.add_row("memory", used, _blocks(record))
        rate = self._num_tokens / (now - self._begin)
        return Group(table, f"{_requests(record)}; {rate:,.0f} tokens a second")


def _requests(record: "StepRecord") -> str:
    return f"{record.num_running} running, {record.num_waiting} waiting, {record.num_swapped} swapped out"


def _blocks(record: "StepRecord") -> str:
    return f"{record.num_used_blocks:,} of {record.num_blocks:,} blocks in use"
