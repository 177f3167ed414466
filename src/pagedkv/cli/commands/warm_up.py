"""``pagedkv warm-up``: compiles machine code before the first request, for images, CI and servers."""

from dataclasses import dataclass
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pagedkv.cli import options as opt
from pagedkv.cli.output_files import write_json
from pagedkv.cli.user_errors import reported
from pagedkv.errors import ConfigurationError, InterruptedRunError
from pagedkv.warming import warm_up as compile_all

NUM_LINES: Final = 10
"""Lines of progress off a terminal."""


@dataclass(slots=True)
class _Shown:
    """Shows progress: as a bar, or off a terminal as a line on stderr at each tenth."""

    progress: Progress
    task: TaskID
    num_tenths: int = -1

    def __call__(self, num_done: int, num_loops: int) -> None:
        self.progress.update(self.task, completed=num_done, total=num_loops)
        num_tenths = NUM_LINES * num_done // max(1, num_loops)
        if not self.progress.console.is_terminal and num_tenths > self.num_tenths:
            self.num_tenths = num_tenths
            typer.echo(f"pagedkv: {num_done:,} of {num_loops:,} loops are compiled", err=True)


def warm_up(
    *,
    eviction: Annotated[
        list[str] | None,
        typer.Option(help="An eviction policy that will be used; more than once for several. Without it: lru."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A kind of processors, such as x86-64-v3, for an image. Without it: this one, the fastest."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at once. Without it: one a core.")] = None,
    json_file: opt.JsonFile = None,
) -> None:
    """Compile all loops ahead of the first request, on all cores, and keep them on disk.

    Every process that sees the folder then starts in a second. NUMBA_CACHE_DIR names another folder.

    Loops are those of the eviction policies that are named. pagedkv curve measures all policies: name each for it.

    With --target, on every processor of that kind: an image is built on one machine and runs on others.

    Example, in a Dockerfile: RUN pagedkv warm-up --target x86-64-v3
    """
    with reported({"eviction": "--eviction", "target": "--target"}):
        columns = (TextColumn("compiling loops"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("loops", total=None)
            try:
                done = compile_all(
                    tuple(eviction or ("lru",)),
                    target=target,
                    num_processes=jobs,
                    on_progress=_Shown(progress, task),
                )
            except KeyboardInterrupt as error:
                [shown] = progress.tasks
                kept = f"{shown.completed:.0f} of {shown.total or 0:.0f} loops are kept"
                raise InterruptedRunError(f"interrupted while loops were compiled; {kept}") from error
        if done.folder is None:
            raise ConfigurationError("no folder to keep machine code in can be written; set NUMBA_CACHE_DIR to one")
        if json_file is not None:
            write_json(json_file, {"num_loops": done.num_loops, "seconds": done.seconds, "folder": done.folder})
        else:
            typer.echo(
                f"{done.num_loops} loops are in {done.folder} ({done.seconds:.0f} s, {done.num_processes} at once)"
            )
