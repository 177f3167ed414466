"""The command line: ``pagedkv`` and its commands, from ``generate``, ``replay`` and ``plan`` to ``demo``.

In the order in which data flows::

    app            the application
    commands       the commands, a file each: options, help, and what drives them
    options        the options that several have; option_groups: those that come together, as one parameter
    sizes          numbers and names as they are typed
    source_options  how to read a file that does not tell everything
    trace_options  which requests of a trace, in which order
    result_warnings  what must be known before figures are believed
    prompts        prompts as they are typed, and files of them
    engine_options  what an engine is told; generating: what serves prompts with one
    interrupting   Ctrl-C and SIGTERM: raised, noticed between steps, or the end at once
    serving        runs a trace on the virtual clock, for all commands that do
    engine_script  a trace as an engine serves it: what its model can be asked, and answers that are the trace's
    engine_replay  runs a trace on the virtual clock and by the engine, step by step the same
    planning       what a plan tries, keeps and concludes
    progress       bars and status while that takes its time; live_view: what an engine is doing
    tables         what a human reads; serving_tables, curve_tables and recording_tables for results
    json_file      what a program reads; atomic_file writes it whole or not at all, compressing traces
    command_line   what was typed, for the record
    user_errors    one line for mistakes; typed_names: options, for what the library names
    exit_codes     1 for wrong answers, 2 for mistakes, 130 for Ctrl-C, 143 when terminated

Only :func:`main` may be imported without the ``cli`` extra (typer, rich, msgspec).
"""

import errno
import signal
import sys

from pagedkv.cli.exit_codes import EXIT_USER_ERROR, INTERRUPTED_EARLY
from pagedkv.cli.interrupting import exit_code_of, terminate
from pagedkv.memory.contract.errors import MissingExtraError
from pagedkv.memory.contract.extras import needing

__all__ = ["main"]


def main() -> None:
    """Run the command line; exits the process."""
    try:
        signal.signal(signal.SIGTERM, terminate)
        with needing("cli", "the command line"):
            import rich  # noqa: F401, PLC0415 - typer looks for it when it is too late for a sentence

            from pagedkv.cli.app import app  # noqa: PLC0415 - so that a missing extra can be named
        app()
    except MissingExtraError as error:
        sys.stderr.write(f"pagedkv: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt as error:
        sys.stderr.write(f"pagedkv: {INTERRUPTED_EARLY}\n")
        sys.exit(exit_code_of(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write(f"pagedkv: -: cannot be written: {error.strerror}\n")
        sys.exit(EXIT_USER_ERROR)
