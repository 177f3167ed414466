"""A server in a process of its own, and what it takes and leaves."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import httpx

__all__ = ["PORT", "family", "loop_s", "processor_s", "processor_s_each", "serving", "state_of"]

PORT: Final = 8931
PATIENCE_S: Final = 600
TICKS: Final = os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(*options: str, port: int = PORT) -> Iterator[int]:
    """Run ``pagedkv serve`` with the model of the demonstration; yield the number of its process."""
    command = [sys.executable, "-m", "pagedkv", "serve", "--port", str(port), *options]
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this process
    process = subprocess.Popen(command, stderr=errors)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, f"the server has ended: {_end_of(errors)}"
                assert time.monotonic() < until, "the server did not begin"
                time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0, f"the server failed: {_end_of(errors)}"


def _end_of(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read()[-2000:].decode(errors="replace")


def family(process: int) -> list[int]:
    """Return a process and its children: the engine of a server has a process of its own."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *map(int, children)]


def processor_s_each(processes: Sequence[int]) -> list[float]:
    """Return the processor time that each process has taken, user and system."""
    fields = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in processes]
    return [(int(each[11]) + int(each[12])) / TICKS for each in fields]


def processor_s(process: int) -> float:
    """Return the processor time that a server has taken, its engine included."""
    return sum(processor_s_each(family(process)))


def loop_s(process: int) -> float:
    """Return the processor time of its first thread, which runs the event loop."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9


def state_of(process: int) -> tuple[int, int]:
    """Return open descriptors, and bytes of resident memory, of a server and its engine."""
    all_of = family(process)
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in all_of)
    num_open = sum(len(list(Path(f"/proc/{each}/fd").iterdir())) for each in all_of)
    return num_open, pages * os.sysconf("SC_PAGE_SIZE")
