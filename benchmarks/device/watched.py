"""Tests under compute-sanitizer, dealt out to processes that each have a sanitizer of their own.

    python -m benchmarks.device.watched [--tool memcheck] [--processes 8] [--seconds 500] TESTS... [-k WORDS]

pytest's own workers are children of a process, and a sanitizer that watches children watches every call of a compiler
as well; such workers had not collected their tests after two minutes. Here tests are collected once, without a
sanitizer.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Final

PYTEST: Final = [sys.executable, "-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider", "-q", "-n0"]
ERRORS: Final = 9
"""What the sanitizer ends with if it has found an error."""


def collect(tests: list[str], words: str) -> list[str]:
    """List the tests that are chosen, by name. Raises CalledProcessError."""
    command = [*PYTEST, "--collect-only", *tests, *(["-k", words] if words else [])]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line for line in said.splitlines() if "::" in line]


def watch(names: list[str], tool: str, log: Path) -> "subprocess.Popen[bytes]":
    """Begin to run some tests under the sanitizer."""
    sanitizer = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
    with log.open("wb") as out:
        command = [*sanitizer, "--error-exitcode", str(ERRORS), *PYTEST, "--durations=3", *names]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def main() -> int:
    """Run tests, and print how each process has ended; 0 if all tests passed and no error was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="+", help="files of tests")
    parser.add_argument("-k", dest="words", default="", help="as pytest takes it")
    parser.add_argument("--tool", default="memcheck")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="after which what still runs is ended, as a failure"
    )
    given = parser.parse_args()
    names = collect(given.tests, given.words)
    begun, failed = monotonic(), False
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{place}.log") for place in range(min(given.processes, len(names)))]
        running = [watch(names[place :: len(logs)], given.tool, log) for place, log in enumerate(logs)]
        for place, (process, log) in enumerate(zip(running, logs, strict=True)):
            try:
                code = process.wait(max(1.0, begun + given.seconds - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            said = log.read_text(errors="replace").splitlines()
            failed |= code != 0
            for line in said[-40:] if code else said[-8:]:
                print(f"  {place} | {line}")
            print(f"  {place} ended with {code} after {monotonic() - begun:.0f} s", flush=True)
    print(f"{len(names)} tests under {given.tool}: {'not all is well' if failed else 'no error'}")
    return int(failed or not names)


if __name__ == "__main__":
    raise SystemExit(main())
