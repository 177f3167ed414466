"""Ctrl-C and SIGTERM in this process: raised, noticed, or the end at once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagedkv.cli.interrupting import (
    INTERRUPTED_BEFORE_SERVING,
    INTERRUPTED_EARLY,
    Terminated,
    exit_code_of,
    leaving_at_once,
    noticing_interrupts,
    terminate,
)


@pytest.fixture(autouse=True)
def _raising() -> Iterator[None]:
    """Both signals raise, as in the command line, and afterwards do what they did."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGINT, KeyboardInterrupt, 130), (signal.SIGTERM, Terminated, 143)]
)
def test_a_signal_is_noticed_once_and_raised_when_it_comes_again(
    number: signal.Signals, kind: type[KeyboardInterrupt], code: int
) -> None:
    with noticing_interrupts() as interruption:
        assert interruption() is None
        signal.raise_signal(number)
        noticed = interruption()
        assert type(noticed) is kind
        assert exit_code_of(noticed) == code
        with pytest.raises(kind):
            signal.raise_signal(number)
    with pytest.raises(kind):
        signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with noticing_interrupts() as interruption, leaving_at_once():
        signal.raise_signal(number)
        assert interruption() is None
    assert signal.getsignal(number) is signal.SIG_IGN


LEAVING = """
import signal, sys
from pagedkv.cli.interrupting import leaving_at_once, terminate
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, terminate)
try:
    with leaving_at_once(*sys.argv[2:]):
        signal.raise_signal(int(sys.argv[1]))
except BaseException:
    print("raised")
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("given", "message"), [((), INTERRUPTED_EARLY), ((INTERRUPTED_BEFORE_SERVING,), INTERRUPTED_BEFORE_SERVING)]
)
def test_who_leaves_at_once_raises_nothing(
    number: signal.Signals, code: int, given: tuple[str, ...], message: str
) -> None:
    words = [sys.executable, "-c", LEAVING, str(int(number)), *given]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", f"pagedkv: {message}\n")
