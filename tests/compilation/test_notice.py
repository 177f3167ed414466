"""What is written while loops are compiled, and when."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from io import StringIO

import pytest

from pagedkv.compilation.notice import SAID, SETTING, Notice


@dataclass
class Clock:
    """Seconds that pass when told."""

    now: float = 0.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@dataclass
class Compiler:
    """Compiles loops that take as long as is said."""

    stream: StringIO = field(default_factory=StringIO)
    environment: dict[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    is_worker: bool = False

    def __post_init__(self) -> None:
        self.notice = Notice(lambda: self.stream, self.environment, self.clock, self.is_worker)

    def compile(self, seconds: float, num_pieces: int = 0) -> str:
        """Compile a loop of so many pieces; give what is written by then."""
        with self.notice.compiling(lambda: "/a/folder"):
            for _ in range(num_pieces):
                with self.notice.compiling(lambda: "/a/folder"):
                    self.clock.now += seconds / num_pieces
            if not num_pieces:
                self.clock.now += seconds
        return self.stream.getvalue()


def test_nothing_is_written_before_two_seconds_and_then_one_line() -> None:
    compiler = Compiler()
    assert compiler.compile(1.0) == compiler.compile(0.9) == ""
    written = compiler.compile(0.1)
    assert written.count("\n") == 1
    assert all(word in written for word in ("compiling", "once", "/a/folder", "pagedkv warm-up", f"{SETTING}=0"))
    assert compiler.compile(30.0) == written
    assert compiler.notice.num_compiled == 4


def test_how_many_of_all_loops_are_compiled_is_shown_at_each_tenth_or_in_one_place() -> None:
    compiler = Compiler()
    compiler.notice.progress(5, 20)
    assert compiler.stream.getvalue() == ""
    compiler.notice.say_now("/a/folder")
    for num_done in range(21):
        compiler.notice.progress(num_done, 20)
    lines = compiler.stream.getvalue().splitlines()[1:]
    assert lines == [f"pagedkv: {num_done} of 20 loops are compiled" for num_done in range(0, 21, 2)]
    terminal = Compiler(Terminal())
    terminal.notice.say_now("/a/folder")
    terminal.notice.progress(7, 20)
    assert terminal.stream.getvalue().endswith("\r  7 of 20 loops are compiled\x1b[K\r")


def test_loading_for_more_than_two_seconds_is_shown_with_the_number_of_loops() -> None:
    def load(compiler: Compiler, seconds: float) -> str:
        with compiler.notice.loading():
            compiler.clock.now += seconds
        return compiler.stream.getvalue()

    compiler = Compiler()
    compiler.notice.num_to_load = 40
    assert load(compiler, 1.5) == ""
    first, second = load(compiler, 0.5).splitlines()
    assert first.startswith("pagedkv: loading its compiled loops")
    assert second == "pagedkv: 2 of 40 loops are loaded"
    for silent in (Compiler(is_worker=True), Compiler(environment={SETTING: "0"})):
        assert load(silent, 9.0) == ""


def test_a_loop_that_takes_long_is_told_of_before_it_is_over() -> None:
    compiler = Compiler()
    with compiler.notice.compiling(lambda: None):
        assert compiler.compile(2.5) != ""
    assert compiler.notice.num_compiled == 1


def test_what_is_kept_nowhere_is_told() -> None:
    compiler = Compiler()
    with compiler.notice.compiling(lambda: None):
        compiler.clock.now += 3.0
    assert "kept nowhere" in compiler.stream.getvalue()


def test_time_between_loops_does_not_count() -> None:
    compiler = Compiler()
    compiler.compile(1.5)
    compiler.clock.now += 100
    assert compiler.compile(0.4) == ""


@pytest.mark.parametrize("case", ["set to 0", "a worker", "said by the parent"])
def test_it_is_silent_where_it_is_not_wanted(case: str) -> None:
    environment = {"set to 0": {SETTING: "0"}, "said by the parent": {SAID: "1"}}.get(case, {})
    compiler = Compiler(environment=environment, is_worker=case == "a worker")
    assert compiler.compile(50.0) == ""


def test_children_know_that_it_was_said() -> None:
    compiler = Compiler()
    compiler.compile(3.0)
    assert compiler.environment[SAID] == "1"


def test_a_terminal_sees_how_many_are_done() -> None:
    compiler = Compiler(stream=Terminal())
    for _ in range(3):
        compiler.compile(2.0, num_pieces=4)
    assert "1 compiled" in compiler.stream.getvalue()
    assert "3 compiled" in compiler.stream.getvalue()


def test_ctrl_c_waits_for_the_piece_and_ends_with_one_sentence() -> None:
    compiler = Compiler()
    reached = []

    def compile_two_pieces() -> None:
        with compiler.notice.compiling(lambda: None):
            with compiler.notice.compiling(lambda: None):
                signal.raise_signal(signal.SIGINT)
                reached.append("the end of the piece")
            reached.append("the next piece")

    with pytest.raises(KeyboardInterrupt, match="interrupted while pagedkv compiled its loops") as caught:
        compile_two_pieces()
    assert reached == ["the end of the piece"]
    assert caught.value.__suppress_context__
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


PROGRAM = """
import signal, sys
from pagedkv.compilation import notice
from pagedkv.compilation.compiled import compiled


@compiled
def loop(x):
    return x + 1

import pagedkv.compilation.loop as loops
original = loops.entry_of
def entry_of(*args, **kws):
    signal.raise_signal(signal.{signal})  # in the middle of compiling
    return original(*args, **kws)
loops.entry_of = entry_of
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
loop(1)
print("not reached")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_signal_in_the_middle_of_compiling_ends_the_process_without_a_word_of_the_compiler(
    name: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{signal}", name)],
        env=os.environ | {"NUMBA_DISABLE_JIT": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert "not reached" not in done.stdout
    assert "numba/core/typ" not in done.stderr
    assert "llvmlite" not in done.stderr
