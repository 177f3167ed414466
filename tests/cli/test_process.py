"""The command line as a process: Ctrl-C and SIGTERM, the terminal, missing packages."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv
from pagedkv.cli.interrupting import INTERRUPTED_EARLY
from pagedkv.contract.extras import to_install
from tests.cli.command import start
from tests.traces.trace_files import HASH_IDS

PATIENCE_S = 300  # the first run in a fresh checkout compiles


SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
HEADER, ROW = b"arrived_s,input_length,output_length,padding\n", b"0,20,5," + b"x" * 1000 + b"\n"


def interrupted(process: subprocess.Popen[bytes], trace: bytes, number: signal.Signals) -> tuple[bytes, bytes]:
    """Send a trace of hundreds of kB, then a signal; return what the command said.

    A pipe holds 64 kB: when all is written, most has been read. Its end, which follows the signal, wakes the
    command should it be about to block in a read: Python looks for signals between instructions only.
    """
    assert process.stdin is not None
    process.stdin.write(trace)
    process.stdin.flush()
    process.send_signal(number)
    return process.communicate(timeout=PATIENCE_S)


@SIGNALS
def test_a_signal_tells_how_far_it_came_and_leaves_no_file(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start("replay", "/dev/stdin", "--json", tmp_path / "result.json")
    stdout, stderr = interrupted(process, HEADER + 400 * ROW, number)
    assert (process.returncode, stdout) == (code, b"")
    (message,) = stderr.decode().splitlines()
    told = re.fullmatch(r"pagedkv: interrupted after (\d+) requests, at [\d.]+ s; nothing was written", message)
    assert told is not None
    assert 250 < int(told[1]) <= 400
    assert list(tmp_path.iterdir()) == []


@SIGNALS
def test_a_signal_before_the_first_request_is_told_too(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start("replay", "/dev/stdin", "--json", tmp_path / "result.json")
    stdout, stderr = interrupted(process, b"\n" * 400_000, number)
    assert (process.returncode, stdout) == (code, b"")
    assert stderr.decode() == f"pagedkv: {INTERRUPTED_EARLY}\n"
    assert list(tmp_path.iterdir()) == []


@SIGNALS
def test_a_conversion_ends_in_a_sentence_and_leaves_no_file(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start("convert", "/dev/stdin", "-o", tmp_path / "out")
    stdout, stderr = interrupted(process, HEADER + 400 * ROW, number)
    assert (process.returncode, stdout) == (code, b"")
    (message,) = stderr.decode().splitlines()
    assert re.fullmatch(r"pagedkv: interrupted .*; nothing was written", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)]
)
def test_a_demonstration_ends_in_a_sentence(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """It is under way once it says how many are answered; the sentence follows what it said by then."""
    pytest.importorskip("transformers")
    process = start("demo", "--questions", 40, "--json", tmp_path / "result.json")
    assert process.stderr is not None
    line = process.stderr.readline()
    while b" of 40 answered" not in line:
        assert line, process.poll()
        line = process.stderr.readline()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (code, b"")
    *before, last = stderr.decode().splitlines()
    assert last == f"pagedkv: {INTERRUPTED_EARLY}"
    assert all(" of 40 answered; " in line for line in before)
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_a_progress_bar_on_stderr(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(HASH_IDS)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb") as terminal:
        process = start("replay", trace, "--json", "-", stderr=terminal)
    shown = b""
    while chunk := read_terminal(ours):
        shown += chunk
    os.close(ours)
    stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert stdout.startswith(b"{")
    assert b"3 requests" in shown


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except OSError:  # how Linux says that the other end was closed
        return b""


def test_the_module_is_the_command_line() -> None:
    process = subprocess.run([sys.executable, "-m", "pagedkv", "--version"], capture_output=True, text=True, check=True)
    assert process.stdout == f"pagedkv {pagedkv.__version__}\n"


def test_the_module_without_the_extra_says_what_is_missing() -> None:
    program = "import runpy, sys; sys.modules['typer'] = None; runpy.run_module('pagedkv', run_name='__main__')"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"pagedkv: the command line needs typer: {to_install('cli')}\n"


def test_without_msgspec_the_floors_below_are_still_there() -> None:
    program = """
import sys
sys.modules["msgspec"] = None
import pagedkv.simulation, pagedkv.planner.traces
try:
    import pagedkv.planner.traces.reader
except ModuleNotFoundError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout == f"reading traces needs msgspec: {to_install('cli')}\n"
