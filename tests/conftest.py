"""The profiles of Hypothesis, and how long the state machines of the block space run.

No deadline: the first call of a loop compiles it, which takes seconds, once.

`make test` draws the same examples everywhere and every time, and of most properties 20 (`quick`). Therefore no
constants of our own modules are drawn: which of them Hypothesis finds depends on the tests that ran before.

`make test PROFILE=pagedkv` draws 100, `make test-long` new ones. To see a failure at once, as it was drawn: `pytest
--hypothesis-profile unshrunk`.
"""

import os
import signal
from itertools import groupby
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

assert hasattr(providers, "is_local_module_file"), "Hypothesis chooses modules elsewhere now"
vars(providers)["is_local_module_file"] = lambda _file: False

settings.register_profile(
    "pagedkv",
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],  # compiling; long runs of a machine
)
settings.register_profile("quick", settings.get_profile("pagedkv"), max_examples=20)
settings.register_profile("long", settings.get_profile("pagedkv"), derandomize=False)
settings.register_profile("unshrunk", settings.get_profile("pagedkv"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("pagedkv")


def pytest_configure() -> None:
    """Hear Ctrl-C, also as a shell's job in the background, which begins deaf to it: tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option of our own."""
    parser.addoption(
        "--operations",
        type=int,
        default=6_000,
        metavar="N",
        help="checked operations of tests/space/test_state_machine.py in all, at least (default 6000)",
    )
    parser.addoption(
        "--one-case-in",
        type=int,
        default=1,
        metavar="N",
        help="of each test that runs compiled too, run about one in N cases, always the same ones, at least one "
        "(default 1: all)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs plain loops where they are compiled, and the cases that ``--one-case-in`` leaves out.

    None is left out of a test that runs with plain loops alone.
    """
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        _keep(config, items, [item for item in items if not is_plain_only(item)])
    one_in = config.getoption("--one-case-in")
    if one_in == 1:
        return
    chosen: list[pytest.Item] = []
    for _, of_one in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = sorted(of_one, key=lambda item: crc32(item.nodeid.encode()))
        chosen += cases if is_plain_only(cases[0]) else cases[: -(-len(cases) // one_in)]
    of_cases = set(chosen)
    _keep(config, items, [item for item in items if item in of_cases])


def is_plain_only(item: pytest.Item) -> bool:
    """Whether a test runs with plain loops alone; a long one runs with compiled ones too, as all long tests do."""
    return item.get_closest_marker("plain_only") is not None and item.get_closest_marker("long") is None


def _keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen
