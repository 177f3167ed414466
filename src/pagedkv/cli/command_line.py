"""The command as typed, recorded in results."""

import shlex
import sys

__all__ = ["command_line"]


def command_line() -> str:
    """Return the command of this process, quoted for a shell."""
    return shlex.join(["pagedkv", *sys.argv[1:]])
