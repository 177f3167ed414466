"""The command line as tests run it: in this process, or as a process of its own."""

import subprocess
import sys
from typing import IO

from typer.testing import CliRunner, Result

from pagedkv.cli.app import app

__all__ = ["run", "start"]

# A shell may start background jobs with SIGINT ignored, and Python then keeps it so.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from pagedkv.cli import main
main()
"""


def run(*arguments: object) -> Result:
    """Run a command in this process, to its end."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def start(*arguments: object, stderr: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start a command as a process of its own, all its streams being pipes."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
