"""Exit codes of commands, and the messages of commands that are interrupted before they begin. Needs no extra."""

from typing import Final

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_TERMINATED",
    "EXIT_USER_ERROR",
    "EXIT_WRONG_ANSWERS",
    "INTERRUPTED_BEFORE_SERVING",
    "INTERRUPTED_EARLY",
]

EXIT_WRONG_ANSWERS: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143
INTERRUPTED_EARLY: Final = "interrupted before there was a result; nothing was written"
INTERRUPTED_BEFORE_SERVING: Final = "interrupted before it served"
