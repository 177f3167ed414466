"""Judging mutations: the tests in stages, quickest first, until one fails; then the same test without the fault.

A test that fails with the fault in place kills the mutation only if it passes without: each killer is run once more in
the mended copy, and one that fails there too ends the run, since nothing can be judged by it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from mutants.callers import Callers
from mutants.mutation import Mutation
from mutants.sandbox import ROOT, Run, Sandbox, sandbox

__all__ = ["DEVICE_STAGES", "STAGES", "Stage", "TestsFailError", "Verdict", "judge", "judge_all", "require_passing"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests that are run together.

    Args:
        name: for messages; tests: arguments for pytest; test_seconds: the longest that one of them may take.
    """

    name: str
    tests: tuple[str, ...]
    test_seconds: int


# The quickest that notice most: direct examples of what is promised.
PROMISES: Final = (
    *sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("tests/space/test_promises_*.py")),
    "tests/space/test_handing_over.py",
    "tests/space/test_stepping.py",
    "tests/space/test_new_blocks.py",
    "tests/space/test_faults.py",
)
FOLDERS: Final = (
    "tests/blocks",
    "tests/space",
    "tests/scheduling",
    "tests/classic",
    "tests/test_keys.py",
    "tests/test_spec.py",
)
MACHINES: Final = ("tests/space/test_state_machine.py", "tests/blocks/test_eviction_machine.py")
# Long, and about other things than bookkeeping: interruptions at every line, counted objects, SHA-256 bit by bit.
SLOW: Final = (
    "tests/space/test_interruptions.py",
    "tests/space/test_faults.py::test_fault_14_there_is_no_python_object_a_block",
    "tests/blocks/test_sha256.py",
)
# Machines on a space that is broken already: they fail all the more with a fault, so the tests pass.
NEGATIVE_CONTROLS: Final = ("tests/space/test_negative_controls.py", "tests/space/test_tangled_controls.py")


def _without(*tests: str) -> tuple[str, ...]:
    return tuple(f"--deselect={test}" for test in tests)


# Left out as well: the tests of documents, which show what compiled loops return, plain int where NumPy has its own;
# and those of compilation, which start processes of their own and know no bookkeeping.
STAGES: Final = (
    Stage("promises", (*PROMISES, *_without(*SLOW)), test_seconds=60),
    Stage(
        "tests of parts, and attacks",
        (*FOLDERS, *_without(*PROMISES, *MACHINES, *SLOW, *NEGATIVE_CONTROLS)),
        test_seconds=120,
    ),
    Stage("state machines, few runs", (*MACHINES, "-m", "interpreted and not long"), test_seconds=300),
    Stage("slow tests", SLOW, test_seconds=300),
    Stage("state machines, all runs", (*MACHINES, "-m", "not interpreted and not long"), test_seconds=1200),
)

# Faults of the body are judged by its own tests.
DEVICE: Final = "src/pagedkv/device/"
DEVICE_STAGES: Final = (
    Stage(
        "tests of the body",
        tuple(
            f"tests/device/test_{name}.py" for name in ("block_tables", "executor", "bad_input", "transfers", "storage")
        ),
        test_seconds=120,
    ),
    Stage("machines of core and body", ("tests/device/test_machines.py", "-m", "not long"), test_seconds=600),
    Stage("kernels, interpreted", ("tests/device/test_interpreted.py",), test_seconds=600),
)


ENGINE: Final = "src/pagedkv/engine/"
ENGINE_STAGES: Final = (Stage("tests of steps", ("tests/engine/test_overlap.py",), test_seconds=300),)

# Run once, without a fault, to find which of them call which function.
ASKED: Final = (*FOLDERS, *_without(*MACHINES, *SLOW, *NEGATIVE_CONTROLS), *DEVICE_STAGES[0].tests)
ASKED_TEST_SECONDS: Final = 600


class TestsFailError(RuntimeError):
    """The tests fail, or are not there, without any fault: nothing can be judged by them."""

    __test__ = False  # for pytest: no test, in spite of its name


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutation.

    Args:
        mutation: it; killer: the test that failed; None if all passed, or the time was up.
        is_over: whether all tests were run, or one failed; seconds: how long it took.
    """

    mutation: Mutation
    killer: str | None
    is_over: bool
    seconds: float

    @property
    def result(self) -> str:
        """Say it in a word or two."""
        if self.mutation.equivalent:
            return "equivalent" if self.killer is None else "KILLED, SO NOT EQUIVALENT"
        if self.killer is not None:
            return "killed"
        return "SURVIVED" if self.is_over else "NOT KILLED IN TIME"

    @property
    def is_as_it_should(self) -> bool:
        """Whether it was killed, or is argued to be equivalent and was not."""
        return (self.killer is None) == bool(self.mutation.equivalent)


def judge(
    copy: Sandbox,
    mutation: Mutation,
    seconds: float,
    *,
    first: Sequence[Sequence[str]] = (),
    stages: tuple[Stage, ...] = STAGES,
) -> Verdict:
    """Run the stages on one mutation until a test fails or the time is up.

    Args:
        copy: where; mutation: what; seconds: how long at most.
        first: tests to begin with, such as the one that killed it last; of several lists one after another; a list is
            passed over if one of its tests is no more.
        stages: the tests, in order; for faults of the body and of the engine as many of their own.

    Raises:
        TestsFailError: a stage has no tests.
    """
    begin = time.monotonic()
    likely = tuple(Stage("likely killers", tuple(tests), stages[-1].test_seconds) for tests in first if tests)
    own = stages
    for folder, its_stages in ((DEVICE, DEVICE_STAGES), (ENGINE, ENGINE_STAGES)):
        if mutation.path.startswith(folder):
            own = its_stages[: len(stages)]
    with copy.mutated(mutation):
        for stage in (*likely, *own):
            left = seconds - (time.monotonic() - begin)
            run = copy.run(stage.tests, seconds=max(left, 1), test_seconds=stage.test_seconds)
            if run.is_empty and stage not in likely:
                raise TestsFailError(f"{stage.name}: there are none: {' '.join(stage.tests)}")
            if run.failed or not run.is_over:
                killer = run.failed[0] if run.failed else None
                return Verdict(mutation, killer, run.is_over, time.monotonic() - begin)
    return Verdict(mutation, None, is_over=True, seconds=time.monotonic() - begin)


def require_passing(copy: Sandbox, killer: str, seconds: float) -> None:
    """Run a test that failed in the copy as it is now, without a fault. Raises TestsFailError unless it passes."""
    run = copy.run((killer,), seconds=seconds, test_seconds=STAGES[-1].test_seconds)
    if run.failed or run.is_empty or not run.is_over:
        raise TestsFailError(f"{killer} failed with a fault in the code, but does not pass without one either")


def _known_to_pass(copy: Sandbox, tests: Iterable[str], seconds: float) -> set[str]:
    """Run tests without any fault, all at once: all of them if all pass, else none, to be asked one by one."""
    known = tuple(sorted(set(tests)))
    run = copy.run(known, seconds=seconds, test_seconds=STAGES[-1].test_seconds) if known else Run(is_empty=True)
    return set() if run.failed or run.is_empty or not run.is_over else set(known)


def find_callers(num_processes: int, seconds: float) -> Callers:
    """Run the tests of parts once, without a fault, and note which functions they call."""
    with sandbox() as copy:
        tests = ("-n", str(num_processes), *ASKED)
        return copy.callers(tests, seconds=seconds, test_seconds=ASKED_TEST_SECONDS)


def judge_all(  # noqa: PLR0913 - what judge takes, for many, and who is told
    mutations: Iterable[Mutation],
    *,
    num_processes: int,
    seconds: float,
    killers: Mapping[str, str],
    callers: Callers,
    tell: Callable[[Verdict], None],
    stages: tuple[Stage, ...] = STAGES,
) -> list[Verdict]:
    """Judge mutations, so many at a time, each process in a copy of its own; ``tell`` is told of each verdict.

    ``killers`` names, by mutation, the test to begin with; the quickest of ``callers`` follow, and then ``stages``.
    Interrupted, it ends what runs and removes the copies.

    Raises:
        TestsFailError: a stage has no tests, or a test that killed fails without a fault as well.
    """
    chosen = list(mutations)
    copies: SimpleQueue[Sandbox] = SimpleQueue()
    passing: set[str] = set()

    def judge_one(mutation: Mutation) -> Verdict:
        copy = copies.get()
        try:
            known = (killers[mutation.name],) if mutation.name in killers else ()
            first = (known, callers.quickest(mutation))
            verdict = judge(copy, mutation, seconds, first=first, stages=stages)
            if verdict.killer is not None and verdict.killer not in passing:
                require_passing(copy, verdict.killer, seconds)
                passing.add(verdict.killer)
        finally:
            copies.put(copy)
        if not copy.is_stopped:
            tell(verdict)
        return verdict

    with ThreadPoolExecutor(num_processes) as executor, ExitStack() as stack:
        for _ in range(num_processes):
            copies.put(stack.enter_context(sandbox()))
        copy = copies.get()
        passing |= _known_to_pass(copy, (killers[each.name] for each in chosen if each.name in killers), seconds)
        copies.put(copy)
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)  # before the copies go
        return list(executor.map(judge_one, chosen))
