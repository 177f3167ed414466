"""The command as it was typed, for results that say how they were made."""

import shlex
import sys

__all__ = ["command_line"]


def command_line() -> str:
    """Write the command of this process as a shell would take it."""
    return shlex.join(["pagedkv", *sys.argv[1:]])
