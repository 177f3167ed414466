"""Which loops rehearsals reach: found out by a process of its own, in which nothing is compiled."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from os import environ
from typing import cast

from pagedkv.memory.compilation.requests import RECORDED, RECORDING, Request
from pagedkv.memory.warming.rehearsals import Rehearsal

__all__ = ["recorded"]


def recorded(rehearsals: Sequence[Rehearsal]) -> list[Request]:
    """Rehearse in another process, and give what that asked for, in that order.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    program = "from pagedkv.memory.warming.recording import record; record()"
    done = subprocess.run(  # noqa: S603  # this interpreter
        [sys.executable, "-c", program],
        env=environ | {RECORDING: "1", "NUMBA_DISABLE_JIT": "1"},
        input=pickle.dumps(list(rehearsals)),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"pagedkv cannot tell which loops to compile: {done.stderr.decode()[-2000:]}")
    return cast("list[Request]", pickle.loads(done.stdout))  # noqa: S301  # our own process wrote it


def record() -> None:
    """Do the rehearsals that come by stdin, and write what they asked for to stdout."""
    for rehearsal in pickle.load(sys.stdin.buffer):  # noqa: S301  # the process above wrote them
        rehearsal.run()
    sys.stdout.buffer.write(pickle.dumps(list(RECORDED.found)))
