"""The processes of two packages, which play at the same time while what they write is compared."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO

from benchmarks.repository import ROOT
from benchmarks.side_by_side.comparing import Comparison, compare
from benchmarks.trial import Package

__all__ = ["play_both"]


def play_both(
    now: Package, then: Package, options: list[str], advance: Callable[[int], None] = lambda _: None
) -> Comparison:
    """Let two packages play the same lives, and compare them until they differ.

    Args:
        now, then: the packages; options: arguments of :mod:`benchmarks.side_by_side.process` after the source.
        advance: called now and then with the number of calls that were compared.
    """
    with _playing(now, options) as ours, _playing(then, options) as theirs:
        return compare(ours, theirs, advance)


@contextmanager
def _playing(package: Package, options: list[str]) -> Iterator[IO[str]]:
    """Provide what a package's process writes; where it fails, its last words are printed."""
    command = [sys.executable, "-m", "benchmarks.side_by_side.process", str(package.source), *options]
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=package.environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            is_over = not process.stdout.read(1)
            if not is_over:
                process.kill()
            if process.wait() and is_over:
                errors.seek(0)
                print(f"the process of {package.name} failed:", errors.read(), file=sys.stderr)
