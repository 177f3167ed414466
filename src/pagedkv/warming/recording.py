"""Which loops spaces of some eviction policies can reach: as a process of its own, in which nothing is compiled."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from os import environ
from typing import cast

from pagedkv.compilation.requests import RECORDED, RECORDING, Request

__all__ = ["recorded"]


def recorded(evictions: Sequence[str]) -> list[Request]:
    """Rehearse in another process, and give what it asked for, in that order.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    program = "import sys; from pagedkv.warming.recording import record; record(sys.argv[1:])"
    done = subprocess.run(  # noqa: S603  # this interpreter, and names of policies
        [sys.executable, "-c", program, *evictions],
        env=environ | {RECORDING: "1", "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"pagedkv cannot tell which loops to compile: {done.stderr.decode()[-2000:]}")
    return cast("list[Request]", pickle.loads(done.stdout))  # noqa: S301  # our own process wrote it


def record(evictions: Sequence[str]) -> None:
    """Rehearse with each of these policies, and write what that asked for to stdout."""
    from pagedkv.warming.rehearsal import rehearse  # noqa: PLC0415  # not before the environment says what loops are

    for eviction in evictions:
        rehearse(eviction)
    sys.stdout.buffer.write(pickle.dumps(list(RECORDED.found)))
