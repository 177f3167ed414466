"""How a command ends when it cannot go on: one clear line on stderr, and an exit code that says whose turn it is.

====================================================  =========
what happened                                         exit code
====================================================  =========
an answer of an engine is not what it must be         1
a bad trace, size, option, engine or output file      2
a model that cannot be run, a prompt that is refused  2
an extra of pagedkv is not installed                  2
Ctrl-C                                                130
SIGTERM                                               143
====================================================  =========

Anything else is a fault of this library and keeps its traceback.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import typer

from pagedkv.cli.exit_codes import EXIT_USER_ERROR, INTERRUPTED_EARLY
from pagedkv.cli.interrupting import exit_code_of
from pagedkv.cli.typed_names import as_typed
from pagedkv.memory.contract.errors import (
    ConfigurationError,
    DeviceUnavailableError,
    MissingExtraError,
    RecordingError,
    RequestError,
    TraceError,
    UnsupportedModelError,
)

__all__ = ["InterruptedRunError", "OutputError", "reported"]


NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})


class OutputError(Exception):
    """A file that the user asked for cannot be written."""


class InterruptedRunError(Exception):
    """Ctrl-C or SIGTERM, of which this was made, ended a run; the message says how far it came."""


USERS_TO_MEND: Final = (
    TraceError,
    ConfigurationError,
    OutputError,
    RecordingError,
    RequestError,
    UnsupportedModelError,
    DeviceUnavailableError,
    MissingExtraError,
)


@contextmanager
def reported(options: Mapping[str, str] = NO_OPTIONS) -> Iterator[None]:
    """Turn the errors above into a line on stderr and an exit code.

    Args:
        options: the options of the command as they are typed, by the names of their parameters.
    """
    try:
        yield
    except USERS_TO_MEND as error:
        message = as_typed(_in_one_line(error))  # what is in no backquotes in that of a trace may be fields of the file
        told = _by_option(message, options) if isinstance(error, ConfigurationError) else message
        typer.echo(f"pagedkv: {told}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except MemoryError as error:
        typer.echo("pagedkv: not enough memory: ask for fewer or smaller blocks, or fewer sequences", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except InterruptedRunError as error:
        typer.echo(f"pagedkv: {error}", err=True)
        raise typer.Exit(exit_code_of(error.__cause__)) from error
    except KeyboardInterrupt as error:
        typer.echo(f"pagedkv: {INTERRUPTED_EARLY}", err=True)
        raise typer.Exit(exit_code_of(error)) from error


def _by_option(message: str, options: Mapping[str, str]) -> str:
    """Name options as they are typed: the library's messages name settings as Python does."""
    for name, typed in options.items():
        if typed not in message:
            # A name of one word may be any word, but for the one that a message begins with.
            pattern = rf"(?<![\w'-]){name}(?![\w'])" if "_" in name else rf"^{name}(?= must )"
            message = re.sub(pattern, typed, message)
    return message


def _in_one_line(error: Exception) -> str:
    """Write a message without line ends and other control characters, which names of files may have."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in str(error))
