"""The loops that rehearsals reach: recorded in a separate process, in which nothing is compiled."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from os import environ
from typing import cast

from pagedkv.compilation.requests import RECORDED, RECORDING, Request
from pagedkv.warming.rehearsals import Rehearsal


def recorded(rehearsals: Sequence[Rehearsal]) -> list[Request]:
    """Run the rehearsals in another process; return the loop calls that they recorded, in order.

    Raises:
        RuntimeError: the process failed; the message has its output.
    """
    program = "from pagedkv.warming.recording import record; record()"
    done = subprocess.run(  # noqa: S603  # this interpreter
        [sys.executable, "-c", program],
        env=environ | {RECORDING: "1", "NUMBA_DISABLE_JIT": "1"},
        input=pickle.dumps(list(rehearsals)),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that lists the loops to compile has failed: {done.stderr.decode()[-2000:]}")
    return cast("list[Request]", pickle.loads(done.stdout))  # noqa: S301  # our own process wrote it


def record() -> None:
    """Run the rehearsals that are read from stdin, and write the recorded requests to stdout."""
    for rehearsal in pickle.load(sys.stdin.buffer):  # noqa: S301  # the process above wrote them
        rehearsal.run()
    sys.stdout.buffer.write(pickle.dumps(list(RECORDED.found)))
