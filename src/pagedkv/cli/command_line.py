"""The command as typed, for results that record how they were made."""

import shlex
import sys

__all__ = ["command_line"]


def command_line() -> str:
    """Write the command of this process with the quoting of a shell."""
    return shlex.join(["pagedkv", *sys.argv[1:]])
