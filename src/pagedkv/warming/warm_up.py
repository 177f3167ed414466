"""All loops that a space can reach, compiled side by side and kept on disk."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from pagedkv.compilation.cache_folder import find_cache_folder
from pagedkv.compilation.loop_sources import PACKAGE_FOLDER
from pagedkv.compilation.notice import SETTING
from pagedkv.compilation.requests import Request
from pagedkv.pool.eviction.registry import DEFAULT, policy_named
from pagedkv.warming.recording import recorded

__all__ = ["WarmUp", "warm_up"]

DONE: Final = b"done\n"


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What warming up came to.

    Args:
        num_loops: entries that are on disk now.
        seconds: wall time.
        num_processes: how many compiled at once.
        folder: where they are kept; None if no folder can be written, so that all was for nothing.
    """

    num_loops: int
    seconds: float
    num_processes: int
    folder: str | None


def warm_up(
    evictions: Sequence[str] = (DEFAULT.name,),
    *,
    num_processes: int | None = None,
    told: Callable[[int, int], None] = lambda _done, _all: None,
) -> WarmUp:
    """Compile all loops that spaces with these eviction policies can reach, unless they are on disk.

    What is on disk serves every process of this machine, and every machine with the same processor, versions and
    sources that sees the folder.

    Args:
        evictions: names of policies (:class:`~pagedkv.SpaceConfig`); all other settings share machine code.
        num_processes: how many compile at once; one a core unless given.
        told: called with the number of loops done and of all, after each.

    Raises:
        ConfigurationError: a policy is not known.
        RuntimeError: a process ended before its loops were compiled; with what it wrote.
    """
    began = time.perf_counter()
    for eviction in evictions:
        policy_named(eviction)
    requests = recorded(evictions)
    processes = min(num_processes or os.cpu_count() or 1, max(1, len(requests)))
    waiting: SimpleQueue[Request] = SimpleQueue()
    for request in requests:
        waiting.put(request)
    told(0, len(requests))
    with ThreadPoolExecutor(processes) as threads:
        workers = [
            threads.submit(_drive, waiting, lambda: told(len(requests) - waiting.qsize(), len(requests)))
            for _ in range(processes)
        ]
        for worker in workers:
            worker.result()
    folder = find_cache_folder(PACKAGE_FOLDER)
    return WarmUp(len(requests), time.perf_counter() - began, processes, None if folder is None else str(folder.path))


def _drive(waiting: "SimpleQueue[Request]", done: Callable[[], None]) -> None:
    """Have one process compile what waits, one after the other."""
    program = "from pagedkv.warming.warm_up import work; work()"
    with subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, "-c", program],
        env=os.environ | {SETTING: "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None, "its input is a pipe"
        assert process.stdout is not None, "its output is a pipe"
        assert process.stderr is not None, "its errors go to a pipe"
        while True:
            try:
                request = waiting.get_nowait()
            except Empty:
                break
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            if process.stdout.readline() != DONE:
                raise RuntimeError(f"{request.name} is not compiled: {process.stderr.read().decode()[-2000:]}")
            done()
        process.stdin.close()


def work() -> None:
    """Compile what comes in by stdin, until nothing more does."""
    while True:
        try:
            request: Request = pickle.load(sys.stdin.buffer)  # noqa: S301  # the process above wrote it
        except EOFError:
            return
        request.compile()
        sys.stdout.buffer.write(DONE)
        sys.stdout.buffer.flush()
