"""Ends a command after an error: with one line on stderr, and an exit code by the kind of error.

====================================================  =========
cause                                                 exit code
====================================================  =========
an answer of an engine is wrong                       1
a bad trace, size, option, engine or output file      2
a model or a prompt that is refused                   2
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

from pagedkv.cli.interrupting import EXIT_USER_ERROR, INTERRUPTED_EARLY, exit_code_of
from pagedkv.cli.typed_names import as_typed
from pagedkv.errors import (
    ConfigurationError,
    DeviceUnavailableError,
    InterruptedRunError,
    MissingExtraError,
    OutputError,
    RecordingError,
    RequestError,
    TraceError,
    UnsupportedModelError,
)

__all__ = ["reported"]


NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})


USER_ERRORS: Final = (
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
        options: the options of the command as typed, by the names of their parameters.
    """
    try:
        yield
    except USER_ERRORS as error:
        message = as_typed(_in_one_line(error))  # without backquotes, a trace's words may be fields of the file
        text = _by_option(message, options) if isinstance(error, ConfigurationError) else message
        typer.echo(f"pagedkv: {text}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except MemoryError as error:
        typer.echo("pagedkv: not enough memory: use fewer or smaller blocks, or fewer sequences", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except InterruptedRunError as error:
        typer.echo(f"pagedkv: {error}", err=True)
        raise typer.Exit(exit_code_of(error.__cause__)) from error
    except KeyboardInterrupt as error:
        typer.echo(f"pagedkv: {INTERRUPTED_EARLY}", err=True)
        raise typer.Exit(exit_code_of(error)) from error


def _by_option(message: str, options: Mapping[str, str]) -> str:
    """Replace Python's names, which the library's messages use, by options as typed."""
    for name, typed in options.items():
        if typed not in message:
            # A name of one word may be an ordinary word, except as the first word of a message.
            pattern = rf"(?<![\w'-]){name}(?![\w'])" if "_" in name else rf"^{name}(?= must )"
            message = re.sub(pattern, typed, message)
    return message


def _in_one_line(error: Exception) -> str:
    """Return a message without line ends and other control characters, which names of files may have."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in str(error))
