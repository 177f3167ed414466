"""Runs all ranks of an engine, each in a process of its own, and returns what each of them wrote."""

import json
import os
import socket
import subprocess
import sys
from typing import Any, Final

__all__ = ["free_address", "run_ranks"]

PATIENCE_S: Final = 240


def free_address() -> str:
    """Return HOST:PORT of a port that is free now."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{any_port.getsockname()[1]}"


def run_ranks(module: str, size: int, *arguments: object, enough: int | None = None) -> list[dict[str, Any]]:
    """Run all ranks; return the JSON of the last line that each of them wrote, {} of one that died.

    Args:
        module: gets RANK SIZE ADDRESS and the arguments; size: number of ranks.
        arguments: texts, or values that are given as JSON.
        enough: a rank after whose end the others are ended; None: each ends by itself.
    """
    words = [each if isinstance(each, str) else json.dumps(each) for each in arguments]
    address = free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), address, *words],
            stdout=subprocess.PIPE,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(size)
    ]
    try:
        if enough is not None:
            processes[enough].wait(PATIENCE_S)
            for process in processes:
                process.kill()
        outputs = [process.communicate(timeout=PATIENCE_S)[0].decode().splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(lines[-1]) if lines else {} for lines in outputs]
