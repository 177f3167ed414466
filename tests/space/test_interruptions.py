"""An exception in the middle of an operation: either nothing has changed, or the space reports that it is broken.

`make test` interrupts at every seventh line, and `make test-long` at each.
"""

import copy
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import pagedkv
from pagedkv import (
    BlockSpace,
    CrossAttention,
    FullAttention,
    MediaSpan,
    RecurrentState,
    RequestKeys,
    SlidingWindow,
    SpaceConfig,
    TenantLimits,
)
from pagedkv.errors import InterruptedSpaceError
from tests.space.spaces import allocate, new_space, prefill, same_numbers, tokens

SOURCES: Final = str(Path(pagedkv.__file__).parent)
MOST_LINES_AFTER_THE_LAST_CHANGE: Final = 3
GROUPS: Final = FullAttention(4), SlidingWindow(6, 2), RecurrentState(8)


class Interruption(BaseException):
    """Comes from outside, as KeyboardInterrupt and MemoryError do."""


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Raise at the n-th line of pagedkv that runs inside."""
    num_lines = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:  # noqa: ANN401 - as sys.settrace has it
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line":
            num_lines[0] += 1
            if num_lines[0] == line:
                raise Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def space_in_use() -> BlockSpace:
    """Rows 0 and 1 share a prompt and are computed, 2 waits for row 3, 4 is swapped out; one step is in flight."""
    space = new_space(*GROUPS[:2], num_host_blocks=40, events=True, receipts=True, explain=True)
    first = prefill(space, tokens(9))
    space.fork(first)
    swapped = prefill(space, tokens(7, first=50))
    space.swap_out(swapped)
    space.acknowledge(space.plan_step().step_id)
    allocate(space, tokens(9, first=100))
    space.plan_step()
    allocate(space, tokens(9, first=200))
    allocate(space, tokens(9, first=200))
    return space


def space_of_two_epochs() -> BlockSpace:
    """Rows of epoch 1 run, wait, and are on the host."""
    space = new_space(*GROUPS[:2], num_host_blocks=40, events=True, weights_epoch=0, max_epoch_lag=1)
    swapped = prefill(space, tokens(7, first=50))
    space.set_weights_epoch(1)
    prefill(space, tokens(9))
    space.swap_out(swapped)
    space.acknowledge(space.plan_step().step_id)
    allocate(space, tokens(9, first=100))
    space.load(tokens(21, first=300), 20)
    return space


def space_of_leases() -> BlockSpace:
    """Content is leased, rows hold some of it, and a row that publishes its prompt alone waits."""
    space = BlockSpace(SpaceConfig(GROUPS[:2], num_blocks=60, max_sequences=8, max_tokens=100, leases=True))
    space.free(prefill(space, tokens(17)), keep_until_s=5)
    prefill(space, tokens(9))
    space.allocate(tokens(9, first=100), publish="prompt")
    return space


LEASE_OPERATIONS: dict[str, Callable[[BlockSpace], object]] = {
    "lease": lambda space: space.lease(tokens(17), 9),
    "leases end": lambda space: space.advance(7),
    "free with a lease": lambda space: space.free([0], keep_until_s=9),
    "forget": lambda space: space.forget(tokens(17)),
    "publish the prompt": lambda space: space.append([1], tokens(9), [9]),
}


@pytest.mark.parametrize("name", LEASE_OPERATIONS)
def test_an_interruption_while_content_is_leased_leaves_all_as_it_was_or_is_told(name: str, stride: int) -> None:
    outcomes = outcomes_of(LEASE_OPERATIONS[name], space_of_leases(), stride)
    assert outcomes["unchanged"] > 0
    assert outcomes["told"] > 0
    assert outcomes["done"] <= MOST_LINES_AFTER_THE_LAST_CHANGE


def space_of_tenants() -> BlockSpace:
    """Tenant a is at its cap, and b has cached blocks; rows of both run, or are on the host; one is to grow."""
    tenants = {"a": TenantLimits(cap=10), "b": TenantLimits(floor=4)}
    space = new_space(num_blocks=40, num_host_blocks=40, events=True, tenants=tenants)
    for first, tenant in ((0, "a"), (100, "b"), (200, "a")):
        space.allocate(tokens(9, first=first), tenant=tenant)
    space.acknowledge(space.plan_step().step_id)
    space.free([0])
    space.fork(2)
    space.swap_out([1])
    space.acknowledge(space.plan_step().step_id)
    return space


TENANT_OPERATIONS: dict[str, Callable[[BlockSpace], object]] = {
    "a hit of another's": lambda space: space.allocate(tokens(11), tenant="b"),
    "a shortage": lambda space: space.allocate(tokens(90, first=500), tenant="a"),
    "append with a copy": lambda space: space.append([0, 2], [5, 6]),
    "swap in": lambda space: space.swap_in([1]),
    "load": lambda space: space.load(tokens(13), 12, tenant="b"),
    "fork at a prefix": lambda space: space.fork(2, at=7),
    "a tenant comes": lambda space: space.set_tenant("c", TenantLimits(cap=9)),
    "a lower cap": lambda space: space.set_tenant("a", TenantLimits(cap=9)),
}


@pytest.mark.parametrize("name", TENANT_OPERATIONS)
def test_an_interruption_while_tenants_share_a_pool_leaves_all_as_it_was_or_is_told(name: str, stride: int) -> None:
    outcomes = outcomes_of(TENANT_OPERATIONS[name], space_of_tenants(), stride)
    assert outcomes["unchanged"] > 0
    assert (outcomes["told"] > 0) == (name != "a shortage")
    assert outcomes["done"] <= MOST_LINES_AFTER_THE_LAST_CHANGE or name == "a shortage"


EPOCH_OPERATIONS: dict[str, Callable[[BlockSpace], object]] = {
    "new weights": lambda space: space.set_weights_epoch(2),
    "weights of long after": lambda space: space.set_weights_epoch(9),
    "plan": lambda space: space.plan_step(),
    "declare": lambda space: space.mark_computed([2]),
    "hit": lambda space: space.allocate(tokens(11)),
    "load": lambda space: space.load(tokens(21), 20),
}


@pytest.mark.parametrize("name", EPOCH_OPERATIONS)
def test_an_interruption_while_epochs_are_counted_leaves_all_as_it_was_or_is_told(name: str, stride: int) -> None:
    outcomes = outcomes_of(EPOCH_OPERATIONS[name], space_of_two_epochs(), stride)
    assert outcomes["unchanged"] > 0
    assert outcomes["told"] > 0
    assert outcomes["done"] <= MOST_LINES_AFTER_THE_LAST_CHANGE


def settled_space() -> BlockSpace:
    """The same with no step in flight."""
    space = space_in_use()
    space.acknowledge(space._ledger.in_flight[0].plan.step_id)
    return space


OPERATIONS: dict[str, Callable[[BlockSpace], object]] = {
    "allocate": lambda space: space.allocate(tokens(11), keys=RequestKeys(salt=b"x")),
    "allocate with a hit": lambda space: space.allocate(tokens(11), num_lookahead=3),
    "allocate again": lambda space: space.allocate(tokens(11), continues=space.receipt(0)),
    "append with a copy": lambda space: space.append([0, 1], [5, 6]),
    "append unknown tokens": lambda space: space.append([0, 1], None),
    "append a chunk": lambda space: space.append([0], tokens(9), [9], num_draft=2, num_lookahead=2),
    "truncate": lambda space: space.truncate([3], [7]),
    "fork": lambda space: space.fork(0, 2),
    "fork at a prefix": lambda space: space.fork(3, 2, at=7),
    "fork while pending": lambda space: space.fork(4, 2),
    "free": lambda space: space.free([0, 3]),
    "free with outputs": lambda space: space.free([0, 3], num_generated=[7, 0]),
    "free at kept ends": lambda space: space.free([0, 3], keeps_end=True),
    "advance": lambda space: space.advance(1.0),
    "free what others wait for": lambda space: space.free([4]),
    "swap out": lambda space: space.swap_out([0, 1]),
    "swap in": lambda space: space.swap_in([2]),
    "plan": lambda space: space.plan_step(),
    "acknowledge": lambda space: space.acknowledge(space._ledger.in_flight[0].plan.step_id),
    "abort": lambda space: space.abort(space._ledger.in_flight[0].plan.step_id),
    "mark computed": lambda space: space.mark_computed([0, 1]),
    "reset": lambda space: space.reset_prefix_cache(),
    "invalidate": lambda space: space.invalidate_memory(),
    "weights": lambda space: space.set_weights_epoch("b"),
    "drain": lambda space: space.drain_events(),
    "touch": lambda space: space.touch(tokens(11)),
    "evict": lambda space: space.evict(2),
    "shrink": lambda space: space.shrink(2),
    "grow": lambda space: space.grow(0),
    "load": lambda space: space.load(tokens(21), 20, keys=RequestKeys(salt=b"x")),
    "finish a load": lambda space: space.finish_load(next(iter(space._state.loads))),
    "bring a beginning": lambda space: space.allocate(tokens(21, first=300), num_external_tokens=9),
    "withdraw": lambda space: space.withdraw(space.block_ids(0)[:1]),
}
QUESTIONS: dict[str, Callable[[BlockSpace], object]] = {
    "match": lambda space: space.match(tokens(11)),
    "match_each": lambda space: space.match_each(tokens(11)),
    "explain": lambda space: space.explain(tokens(30)),
    "can_allocate": lambda space: space.can_allocate(tokens(11)),
    "num_allocatable": lambda space: space.num_allocatable([space.match(tokens(11)), space.match(tokens(30))]),
    "of rows": lambda space: (
        space.explanation(0),
        space.can_append([0]),
        space.can_swap_out([0]),
        space.can_swap_in([2]),
        space.block_ids(0),
        space.statistics(),
        space.receipt(0),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interruption_at_any_line_leaves_all_as_it_was_or_is_told(name: str, stride: int) -> None:
    """Lines of compiled loops do not show: nothing from outside can stop a loop in the middle.

    After its last change an operation counts as done, although its caller does not get the answer.
    """
    start = settled_space() if name == "invalidate" else space_in_use()
    if name == "finish a load":
        start.load(tokens(21), 20, keys=RequestKeys(salt=b"x"))
    outcomes = outcomes_of(OPERATIONS[name], start, stride)
    assert outcomes["unchanged"] > 0
    assert outcomes["done"] <= MOST_LINES_AFTER_THE_LAST_CHANGE
    assert outcomes["told"] > 0 or (stride > 1 and name in {"shrink", "grow"}), "which change all in one line"


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_interruption_of_a_question_leaves_all_as_it_was(name: str, stride: int) -> None:
    outcomes = outcomes_of(QUESTIONS[name], space_in_use(), stride)
    assert set(outcomes) == {"unchanged"}


def space_with_states() -> BlockSpace:
    """Row 0 ends where its state is kept, which leaves three; row 1 is about to."""
    groups, num_blocks = (FullAttention(4), RecurrentState(16)), {"device": 31, "state": 6}
    space = new_space(*groups, num_blocks=num_blocks, max_sequences=3, max_tokens=80, events=True)
    for first in (0, 100):
        space.allocate(tokens(20, first=first), match=space.match(tokens(22, first=first)))
        if first == 0:
            space.acknowledge(space.plan_step().step_id)
    return space


STATE_OPERATIONS: dict[str, Callable[[BlockSpace], object]] = {
    "go on from a kept state": lambda space: space.append([0], [20]),
    "give a kept state up": lambda space: space.append([0], tokens(40), [40]),
    "hit a kept state": lambda space: space.allocate(tokens(22)),
    "keep a state": lambda space: space.plan_step(),
    "keep a state inside a chunk": lambda space: space.keep_states(0, 30),
}


@pytest.mark.parametrize("name", STATE_OPERATIONS)
def test_an_interruption_while_states_are_kept_leaves_all_as_it_was_or_is_told(name: str, stride: int) -> None:
    outcomes = outcomes_of(STATE_OPERATIONS[name], space_with_states(), stride)
    assert outcomes["unchanged"] > 0
    assert outcomes["told"] > 0
    assert outcomes["done"] <= MOST_LINES_AFTER_THE_LAST_CHANGE


def space_with_drafts_of_states() -> BlockSpace:
    """Row 0 has two drafts that are computed, row 1 three unknown tokens behind a step in flight."""
    groups, num_blocks = (FullAttention(4), RecurrentState(8, num_draft_states=5)), {"device": 31, "state": 31}
    space = new_space(*groups, num_blocks=num_blocks, max_sequences=3, max_tokens=80, receipts=True)
    for first in (0, 100):
        prefill(space, tokens(6, first=first))
    space.append([0], tokens(3), [3], num_draft=2)
    space.append([1], None, [1])
    space.acknowledge(space.plan_step().step_id)
    space.append([1], None, [2])
    space.plan_step()
    return space


DRAFT_OPERATIONS: dict[str, Callable[[BlockSpace], object]] = {
    "accept drafts, and append others": lambda space: space.append([0], tokens(4), [4], num_draft=3),
    "accept one of two": lambda space: space.truncate([0], [8]),
    "replace both": lambda space: space.replace_drafts([0], [90, 91], [2]),
    "append more that is unknown": lambda space: space.append([1], None, [1]),
    "fill in": lambda space: space.fill([1], [7], [1]),
    "acknowledge": lambda space: space.acknowledge(space._ledger.in_flight[0].plan.step_id),
    "abort": lambda space: space.abort(space._ledger.in_flight[0].plan.step_id),
    "free": lambda space: space.free([0, 1]),
}


@pytest.mark.parametrize("name", DRAFT_OPERATIONS)
def test_an_interruption_while_states_are_drafted_leaves_all_as_it_was_or_is_told(name: str, stride: int) -> None:
    outcomes = outcomes_of(DRAFT_OPERATIONS[name], space_with_drafts_of_states(), stride)
    assert outcomes["unchanged"] > 0
    assert outcomes["told"] > 0
    assert outcomes["done"] <= MOST_LINES_AFTER_THE_LAST_CHANGE


def space_with_a_beginning() -> BlockSpace:
    """Prompts hit the beginning of row 0's second block, and of an unreferenced one."""
    space = new_space(*GROUPS[:2], num_blocks=19, min_partial_hit=1, receipts=True, events=True)
    prefill(space, tokens(9))
    space.free(prefill(space, tokens(9, first=50)))
    return space


INSIDE_OPERATIONS: dict[str, Callable[[BlockSpace], object]] = {
    "copy a block that is held": lambda space: space.allocate([*range(7), 99]),
    "copy an unreferenced block": lambda space: space.allocate([*range(50, 57), 99]),
    "take a block over": lambda space: space.allocate([*range(50, 57), *range(900, 909)]),
}


@pytest.mark.parametrize("name", INSIDE_OPERATIONS)
def test_an_interruption_while_a_beginning_is_hit_leaves_all_as_it_was_or_is_told(name: str, stride: int) -> None:
    start = space_with_a_beginning()
    outcomes = outcomes_of(INSIDE_OPERATIONS[name], start, stride)
    INSIDE_OPERATIONS[name](start)
    assert start.num_tokens(1) > 7
    assert bool(start.plan_step().copies) == (name != "take a block over")
    assert outcomes["unchanged"] > 0
    assert outcomes["told"] > 0
    assert outcomes["done"] <= MOST_LINES_AFTER_THE_LAST_CHANGE


A_SOUND: Final = RequestKeys(media=(MediaSpan(0, 1, b"a sound"),))


def space_with_encoders() -> BlockSpace:
    """Row 0 and its fork 1 run, 2 is on the host with its encoder, and 3 is to be planned, with its fork 4."""
    space = new_space(FullAttention(4), CrossAttention(20, 4), num_host_blocks=40, receipts=True)
    for first in (0, 100):
        space.allocate(tokens(9, first=first), keys=A_SOUND, num_encoder_tokens=9)
    space.acknowledge(space.plan_step().step_id)
    space.fork(0)
    space.swap_out([1])
    space.acknowledge(space.plan_step().step_id)
    row = space.allocate(tokens(9, first=200), keys=A_SOUND, num_encoder_tokens=5).row
    space.fork(row)
    return space


ENCODER_OPERATIONS: dict[str, Callable[[BlockSpace], object]] = {
    "allocate": lambda space: space.allocate(tokens(9), keys=A_SOUND, num_encoder_tokens=7),
    "fork": lambda space: space.fork(0, 2),
    "fork at a prefix": lambda space: space.fork(0, 2, at=3),
    "free what a fork inherits": lambda space: space.free([3]),
    "swap out": lambda space: space.swap_out([0, 2]),
    "swap in": lambda space: space.swap_in([1]),
    "plan": lambda space: space.plan_step(),
    "declare": lambda space: space.mark_computed([3, 4]),
}


@pytest.mark.parametrize("name", ENCODER_OPERATIONS)
def test_an_interruption_beside_encoders_leaves_all_as_it_was_or_is_told(name: str, stride: int) -> None:
    outcomes = outcomes_of(ENCODER_OPERATIONS[name], space_with_encoders(), stride)
    assert outcomes["unchanged"] > 0
    assert outcomes["told"] > 0
    assert outcomes["done"] <= MOST_LINES_AFTER_THE_LAST_CHANGE


@pytest.fixture(params=[7, pytest.param(1, marks=pytest.mark.long)], ids=["some lines", "all lines"])
def stride(request: pytest.FixtureRequest) -> int:
    """Give the distance of the lines at which an operation is interrupted."""
    return int(request.param)


def outcomes_of(operation: Callable[[BlockSpace], object], start: BlockSpace, stride: int) -> Counter[str]:
    """Interrupt an operation at lines so far apart, from the first on; count how that left the space."""
    done = copy_of(start)
    operation(done)
    done.check()
    outcomes = Counter[str]()
    for line in count(1, stride):
        space = copy_of(start)
        try:
            with interrupted_at(line):
                operation(space)
        except Interruption:
            outcomes[outcome(space, start, done)] += 1
        else:
            return outcomes
    raise AssertionError


@cache
def compiled_loops() -> dict[int, object]:
    """Find the compiled loops of this process: once, since the search looks at all objects."""
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), Dispatcher)}


def copy_of(space: BlockSpace) -> BlockSpace:
    """Copy a space, but not the compiled loops that it refers to."""
    return copy.deepcopy(space, compiled_loops() | {id(space.config): space.config})


def outcome(space: BlockSpace, start: BlockSpace, done: BlockSpace) -> str:
    """Return how an interrupted operation left a space."""
    try:
        space.statistics()
    except InterruptedSpaceError:
        with pytest.raises(InterruptedSpaceError, match="build a new space"):
            space.free([0])
        return "told"
    space.check()
    if same_numbers(space, start):
        return "unchanged"
    assert same_numbers(space, done), "neither as it was, nor done, nor told"
    return "done"


def test_an_interrupted_plan_does_not_lose_copies_silently() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    (child,) = space.fork(row).tolist()
    space.append([child], np.array([7], np.int32))
    with pytest.raises(Interruption), interrupted_at(20):
        space.plan_step()
    with pytest.raises(InterruptedSpaceError):
        space.plan_step()
