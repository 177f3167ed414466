"""A copy of the tree in a temporary folder, in which faults are made and tests run."""

import compileall
import os
import py_compile
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from mutants.callers import Callers
from mutants.mutation import Mutation

__all__ = ["ROOT", "Run", "Sandbox", "sandbox"]

ROOT: Final = Path(__file__).parent.parent
LEFT_OUT: Final = (".*", "__pycache__")
LEFT_OUT_OF_ROOT: Final = ("build", "dist", "out", "traces")  # packages deeper down may have such names
PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "--tb=no", "--assert=plain", "-p", "mutants.plugin")
PASSED: Final = 0
FAILED: Final = (1, 2)  # 2: modules that could not be imported
NOTHING_TO_RUN: Final = (4, 5)  # 4: a test named is not there; 5: no test was chosen


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of pytest came to.

    Args:
        failed: ids of tests that failed, the first first.
        is_over: False if the time was up before all tests had run.
        is_empty: whether pytest found nothing to run.
    """

    failed: tuple[str, ...] = ()
    is_over: bool = True
    is_empty: bool = False


class Sandbox:
    """One copy, with at most one process running in it."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        """Copy the tree ``root`` there."""
        self._tree = folder / "tree"
        self._failed = folder / "failed"
        self._called = folder / "called"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        everywhere, of_root = shutil.ignore_patterns(*LEFT_OUT), shutil.ignore_patterns(*LEFT_OUT_OF_ROOT)

        def left_out(folder: str, names: list[str]) -> set[str]:
            return everywhere(folder, names) | (of_root(folder, names) if Path(folder) == root else set())

        shutil.copytree(root, self._tree, ignore=left_out)
        # found by the source's digest, so a file with a fault in it is compiled anew, and no other
        compileall.compile_dir(
            self._tree, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH, workers=1
        )

    @property
    def is_stopped(self) -> bool:
        """Whether :meth:`stop` was called: what ran then has no result."""
        return self._is_stopped

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Make a fault; mend it on the way out."""
        file = self._tree / mutation.path
        source = file.read_text(encoding="utf-8")
        file.write_text(mutation.apply(source), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(source, encoding="utf-8")

    def run(self, tests: Sequence[str], *, seconds: float, test_seconds: int) -> Run:
        """Run tests of the copy, interpreted, up to the first that fails.

        Args:
            tests: arguments for pytest: files, folders, ids of tests, options that choose among them.
            seconds: for all of them; test_seconds: for each test.
        """
        self._failed.write_text("")
        command = [*PYTEST, "-x", *tests]
        is_over = self._wait(command, test_seconds, seconds)
        failed = tuple(self._failed.read_text(encoding="utf-8").splitlines())
        if not is_over or self._is_stopped:
            return Run(failed, is_over=False)
        assert self._process is not None
        code = self._process.returncode
        if code in NOTHING_TO_RUN and not failed:
            return Run(is_empty=True)
        if code != PASSED and not failed:
            failed = (f"pytest itself: exit code {code}",)
        return Run(failed)

    def callers(self, tests: Sequence[str], *, seconds: float, test_seconds: int) -> Callers:
        """Run tests of the copy, and note which functions they call. Arguments as of :meth:`run`."""
        self._called.mkdir(exist_ok=True)
        self._wait([*PYTEST, "-p", "mutants.callers", *tests], test_seconds, seconds)
        return Callers.read(sorted(self._called.glob("*.json")))

    def _wait(self, command: list[str], test_seconds: int, seconds: float) -> bool:
        """Run a command, in a session of its own so that all of it can be ended; tell whether it came to its end."""
        if self._is_stopped:
            return False
        given = (each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)
        environment = {
            **os.environ,
            "NUMBA_DISABLE_JIT": "1",
            "PYTHONPATH": os.pathsep.join((str(self._tree / "src"), *given)),
            # A mutated file may have the size and the second of the file before it: no cache can tell them apart.
            "PYTHONDONTWRITEBYTECODE": "1",
            "MUTANTS_CALLERS": str(self._called),
            "MUTANTS_FAILED": str(self._failed),
            "MUTANTS_TEST_SECONDS": str(test_seconds),
        }
        self._process = subprocess.Popen(
            command,
            cwd=self._tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            return False
        return True

    def stop(self) -> None:
        """End what runs here, from another thread."""
        self._is_stopped = True
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def sandbox(root: Path = ROOT) -> Iterator[Sandbox]:
    """Provide a copy of the tree; what runs there ends, and the copy is removed, on the way out."""
    with TemporaryDirectory(prefix="pagedkv-mutants-") as name:
        copy = Sandbox(Path(name), root)
        try:
            yield copy
        finally:
            copy.stop()
