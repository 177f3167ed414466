"""The command line: ``pagedkv`` and its commands, from ``generate``, ``replay`` and ``plan`` to ``demo``.

In the order in which data flows::

    app            the application
    commands       the commands, one file each: options, help, and the call
    options        the options of several commands, groups of them as one parameter; sizes in the user's notation
    trace_options  how a trace is read: one trace, or several as one
    engine_options  options of an engine, prompts; generating: serves prompts with one
    interrupting   Ctrl-C and SIGTERM: raised, handled between steps, or ending at once; all exit codes
    serving        runs a trace on the virtual clock, for several commands
    engine_replay  runs a trace on the virtual clock and by the engine, in the same steps
    replay_page    the inspector's page over a replay
    plan_axes      the settings of a plan; plan_runs: points that are run, in processes or (plan_ray) on Ray
    progress       bars and status during long work
    tables         results for humans
    output_files   files written whole or not at all, results for programs, compressed traces
    user_errors    one line for mistakes, with options in place of the library's names

Only :func:`main` may be imported without the ``cli`` extra (typer, rich, msgspec).
"""

import errno
import signal
import sys

from pagedkv.cli.interrupting import EXIT_USER_ERROR, INTERRUPTED_EARLY, exit_code_of, terminate
from pagedkv.contract.extras import needing
from pagedkv.errors import MissingExtraError

__all__ = ["main"]


def main() -> None:
    """Run the command line; exits the process."""
    try:
        signal.signal(signal.SIGTERM, terminate)
        with needing("cli", "the command line"):
            import rich  # noqa: F401, PLC0415 - typer looks for it later, when its absence could not be reported

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
