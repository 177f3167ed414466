"""A server in a process of its own, and what it takes and leaves."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

__all__ = ["PORT", "loop_s", "processor_s", "serving", "state_of"]

PORT: Final = 8931
PATIENCE_S: Final = 600
TICKS: Final = os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(*options: str) -> Iterator[int]:
    """Run ``pagedkv serve`` with the model of the demonstration; yield the number of its process."""
    command = [sys.executable, "-m", "pagedkv", "serve", "--port", str(PORT), *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{PORT}/health").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < until, "the server did not begin"
                time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        assert process.wait(60) == 0, "the server did not end by itself"


def processor_s(process: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def loop_s(process: int) -> float:
    """Return the processor time of its first thread, which runs the event loop; the engine has a thread of its own."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9


def state_of(process: int) -> tuple[int, int]:
    """Return open descriptors, and bytes of resident memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return len(list(Path(f"/proc/{process}/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")
