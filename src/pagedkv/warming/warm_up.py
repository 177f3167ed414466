"""Compiling all loops that parts call, in parallel, and keeping them on disk."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from pagedkv.blocks.eviction.registry import DEFAULT
from pagedkv.compilation.loop_cache import PACKAGE_FOLDER, find_cache_folder
from pagedkv.compilation.notice import SETTING
from pagedkv.compilation.targets import EXACTLY, Target, own_processor, target_named
from pagedkv.warming.parts import Entry, Part, all_of
from pagedkv.warming.runs import Runs
from pagedkv.warming.stamps import stamp

DONE: Final = b"done\n"


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The result of a warm-up.

    Args:
        num_loops: entries that are on disk now.
        seconds: wall time.
        num_processes: processes that compiled in parallel.
        folder: the folder of the entries; None if none can be written, so that nothing was kept.
    """

    num_loops: int
    seconds: float
    num_processes: int
    folder: str | None


def warm_up(
    evictions: Sequence[str] = (DEFAULT.name,),
    *,
    target: str | None = None,
    num_processes: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> WarmUp:
    """Compile all loops of spaces with these eviction policies, of curves and of engines, unless they are on disk.

    The entries on disk serve every process of this machine, and every machine with the same versions, sources and
    processor that can read the folder; with a target, every machine with a processor of that class.

    Args:
        evictions: names of policies (:class:`~pagedkv.SpaceConfig`); all other settings share machine code.
        target: a class of processors, such as ``"x86-64-v3"``; None: this machine's processor, which is fastest.
        num_processes: processes that compile in parallel; by default one for each core.
        on_progress: called after each loop with the number of compiled loops and of all loops.

    Raises:
        ConfigurationError: an unknown policy or target.
        KeyboardInterrupt: Ctrl-C, after the current loops are compiled; everything compiled so far is kept.
        RuntimeError: a process ended before its loops were compiled; the message has its output.
    """
    chosen = None if target is None else target_named(target)
    parts = list(dict.fromkeys(part for eviction in evictions for part in all_of(eviction)))
    return compile_all(parts, chosen, num_processes=num_processes, on_progress=on_progress)


def compile_all(
    parts: Sequence[Part],
    target: Target | None = None,
    *,
    num_processes: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> WarmUp:
    """Compile all loops that parts call; see :func:`warm_up` for the arguments and errors."""
    began = time.perf_counter()
    entries = list(dict.fromkeys(entry for part in parts for entry in part.entries()))
    # A warm-up compiles for other processes, even if this one runs its loops as plain Python.
    environment = {SETTING: "0", EXACTLY: "1", "NUMBA_DISABLE_JIT": "0"} | (
        {} if target is None else target.environment
    )
    processes = min(num_processes or os.cpu_count() or 1, max(1, len(entries)))
    waiting = Runs(entries, processes)
    on_progress(0, len(entries))
    with ThreadPoolExecutor(processes) as threads:
        workers = [
            threads.submit(
                _drive,
                partial(waiting.take, i),
                environment,
                lambda: on_progress(len(entries) - len(waiting), len(entries)),
            )
            for i in range(processes)
        ]
        try:
            for worker in workers:
                worker.result()
        except BaseException:
            waiting.clear()  # else an interrupted warm-up would wait until all other loops are compiled
            raise
    own = own_processor()
    for part in parts:
        stamp(part, own if target is None else target.processor(own[0]), len(entries))
    folder = find_cache_folder(PACKAGE_FOLDER)
    return WarmUp(len(entries), time.perf_counter() - began, processes, None if folder is None else str(folder.path))


def _drive(take: Callable[[], Entry | None], environment: dict[str, str], done: Callable[[], None]) -> None:
    """Start a process with these environment variables, and let it compile the entries that are taken, one by one."""
    program = "from pagedkv.warming.warm_up import work; work()"
    with subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, "-c", program],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None, "its input is a pipe"
        assert process.stdout is not None, "its output is a pipe"
        assert process.stderr is not None, "its errors go to a pipe"
        while (entry := take()) is not None:
            pickle.dump(entry, process.stdin)
            process.stdin.flush()
            if process.stdout.readline() != DONE:
                raise RuntimeError(f"{entry.loop} is not compiled: {process.stderr.read().decode()[-2000:]}")
            done()
        process.stdin.close()


def work() -> None:
    """Compile the entries that are read from stdin, until its end."""
    while True:
        try:
            entry: Entry = pickle.load(sys.stdin.buffer)  # noqa: S301  # the process above wrote it
        except EOFError:
            return
        entry.compile()
        sys.stdout.buffer.write(DONE)
        sys.stdout.buffer.flush()
