"""``pagedkv warm-up``: compiles machine code before the first request, for images, CI and servers."""

from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagedkv.cli import options as opt
from pagedkv.cli.json_file import write_json
from pagedkv.cli.user_errors import InterruptedRunError, reported
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.warming import warm_up as compile_all

__all__ = ["warm_up"]


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

    With --target, on every processor of that kind: an image is built on one machine and runs on others.

    Example, in a Dockerfile: RUN pagedkv warm-up --target x86-64-v3
    """
    with reported({"eviction": "--eviction", "target": "--target"}):
        columns = (TextColumn("compiling loops"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True, disable=json_file is not None) as progress:
            task = progress.add_task("loops", total=None)
            try:
                done = compile_all(
                    tuple(eviction or ("lru",)),
                    target=target,
                    num_processes=jobs,
                    on_progress=lambda done, total: progress.update(task, completed=done, total=total),
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
