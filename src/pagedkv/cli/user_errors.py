"""How a command ends when it cannot go on: one clear line on stderr, and an exit code that says whose turn it is.

====================================================  =========
what happened                                         exit code
====================================================  =========
a bad trace, size, option or output file              2
Ctrl-C                                                130
====================================================  =========

Anything else is a fault of this library and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pagedkv.cli.exit_codes import EXIT_INTERRUPTED, EXIT_USER_ERROR, INTERRUPTED_EARLY
from pagedkv.errors import ConfigurationError, TraceError

__all__ = ["InterruptedRunError", "OutputError", "reported"]


class OutputError(Exception):
    """A file that the user asked for cannot be written."""


class InterruptedRunError(Exception):
    """Ctrl-C ended a run; the message says how far it came."""


@contextmanager
def reported() -> Iterator[None]:
    """Turn the errors above into a line on stderr and an exit code."""
    try:
        yield
    except (TraceError, ConfigurationError, OutputError) as error:
        typer.echo(f"pagedkv: {_in_one_line(error)}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except MemoryError as error:
        typer.echo("pagedkv: not enough memory: ask for fewer or smaller blocks, or fewer sequences", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except InterruptedRunError as error:
        typer.echo(f"pagedkv: {error}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except KeyboardInterrupt as error:
        typer.echo(f"pagedkv: {INTERRUPTED_EARLY}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from error


def _in_one_line(error: Exception) -> str:
    """Write a message without line ends and other control characters, which names of files may have."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in str(error))
