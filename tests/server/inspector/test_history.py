"""History: bounded rings that keep the last of what happened, and sums over time that lose nothing."""

from dataclasses import dataclass, replace
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
from hypothesis import given, settings, strategies as st

from pagedkv.contract.answers import Explanation, Miss, MissCause, number_of
from pagedkv.contract.space_config import SpaceConfig, TenantLimits
from pagedkv.contract.spec import FullAttention
from pagedkv.engine import StepRecord
from pagedkv.server.inspector.history import (
    ADMISSION_FIELDS,
    MOST_BUCKETS,
    REQUEST_FIELDS,
    STEP_FIELDS,
    History,
    Ring,
    RingSizes,
    as_buckets,
    width_for,
)
from pagedkv.server.inspector.snapshot import as_ended, as_tree
from pagedkv.space import BlockSpace, CachedPrefixes, SpaceInspection

MIB = 2**20


class IdleCore:
    """An engine without requests."""

    requests: ClassVar[dict[int, object]] = {}


@dataclass(frozen=True, eq=False)
class Arrived:
    """What a history notes of a request that has come."""

    number: int
    scheduled: SimpleNamespace
    num_cached_tokens: int | None = None
    explanation: Explanation | None = None
    finish_reason: str | None = None


def scheduled(tenant: str | None = None, num_prompt_tokens: int = 3) -> SimpleNamespace:
    """The scheduler's record of a request."""
    intent = SimpleNamespace(tenant=tenant)
    return SimpleNamespace(intent=intent, priority=0, num_prompt_tokens=num_prompt_tokens)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return its time."""
        return self.now_s


def record(step_id: int, **more: int) -> StepRecord:
    counts: dict[str, Any] = dict.fromkeys(
        (name for name in StepRecord.__slots__ if name.startswith("num_") or name.endswith("seconds")), 0
    )
    return StepRecord(step_id=step_id, **{**counts, **more})


def new_history(num_pools: int = 1, sizes: RingSizes | None = None, unit_s: float = 1) -> tuple[History, Clock]:
    groups = tuple(FullAttention(pool=f"pool {number}") for number in range(num_pools))
    space = BlockSpace(SpaceConfig(groups, {f"pool {number}": 10 for number in range(num_pools)}))
    inspection, clock = SpaceInspection(), Clock()
    space.observe(inspection)
    core: Any = IdleCore()
    return History(core, inspection, clock, RingSizes() if sizes is None else sizes, unit_s), clock


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 2), max_size=20), st.integers(0, 20), st.integers(0, 20))
def test_a_ring_keeps_the_last_rows(num_rows: int, gaps: list[int], first: int, length: int) -> None:
    ring, rows = Ring(num_rows, 2), np.stack([np.cumsum(gaps), np.arange(len(gaps))], axis=1).astype(float)
    for row in rows:
        ring.append(row)
    kept = rows[-num_rows:]
    inside = kept[(kept[:, 0] >= first) & (kept[:, 0] < first + length)]
    assert np.array_equal(ring.between(first, first + length), inside)
    assert np.array_equal(ring.last(3), kept[-3:])
    for number in range(len(rows)):
        view = ring.row(number)
        assert (view is None) == (number < len(rows) - num_rows)
        assert view is None or np.array_equal(view, rows[number])


def test_a_history_takes_at_most_64_mib_and_never_grows() -> None:
    history, clock = new_history(num_pools=20)
    assert history.nbytes <= 64 * MIB
    small, clock = new_history(sizes=RingSizes(4, 4, 4, 4))
    before = small.nbytes
    for step in range(100):
        clock.now_s += 0.3
        small.note_step(record(step, num_decoded=step))
    assert small.nbytes == before
    assert small.steps(0, 1e9)[:, STEP_FIELDS.index("decoded")].tolist() == [96, 97, 98, 99]
    samples = small.samples(0, 1e9)
    assert len(samples) == 4
    assert samples[-1, 1] == 9, "free blocks"


def test_a_request_keeps_its_tenant_when_the_space_gives_the_number_to_another() -> None:
    space = BlockSpace(SpaceConfig((FullAttention(),), 10, tenants={"early": TenantLimits()}))
    inspection, core = SpaceInspection(), cast("Any", IdleCore())
    space.observe(inspection)
    history = History(core, inspection, Clock())

    def arrive(number: int, tenant: str | None) -> None:
        history.note_arrived(cast("Any", Arrived(number, scheduled(tenant))))

    arrive(1, "early")
    space.remove_tenant("early")
    space.set_tenant("late", TenantLimits())
    assert inspection.tenant_names == (None, "late")
    arrive(2, "late")
    arrive(3, "early")
    arrive(4, None)
    shown = as_ended(history.requests(0, inf, 10), history.tenant_names, history.tier_notes())
    assert [(each["number"], each["tenant"]) for each in shown] == [(4, None), (3, None), (2, "late"), (1, "early")]


def test_a_prompt_is_counted_by_each_cause_of_its_misses() -> None:
    history, clock = new_history()
    evicted, short = Miss(4, 9, MissCause.EVICTED), Miss(9, 10, MissCause.NOT_FULL)
    one = Explanation(10, 4, MissCause.EVICTED, 4)
    for number, explanation in enumerate((replace(one, misses=(evicted, short)), one, None)):
        request = Arrived(number, scheduled(num_prompt_tokens=10), 4, explanation)
        history.note_arrived(cast("Any", request))
    clock.now_s += 2.0
    history.note_requests()
    causes = number_of(MissCause.EVICTED), number_of(MissCause.NOT_FULL)
    expected = [(2, causes[0], 4, 5), (2, causes[1], 0, 1), (2, causes[0], 4, 6), (2, -1, 4, 6)]
    assert [tuple(row) for row in history.admissions(0, inf).tolist()] == expected


def test_a_request_that_came_before_now_has_its_own_time() -> None:
    history, clock = new_history()
    clock.now_s += 5.0
    history.note_arrived(cast("Any", Arrived(0, scheduled())), 4.5)
    history.note_arrived(cast("Any", Arrived(1, scheduled())))
    assert history.requests(0, inf, 9)[:, REQUEST_FIELDS.index("arrived_s")].tolist() == [4.5, 5.0]


def test_samples_are_taken_twice_a_unit_of_time() -> None:
    for unit_s, num_samples in ((1, 9), (4, 3), (0.25, 9)):
        history, clock = new_history(unit_s=unit_s)
        for step in range(9):
            history.note_step(record(step))
            clock.now_s += 0.5
        assert len(history.samples(0, inf)) == num_samples


def test_every_number_of_a_step_is_noted() -> None:
    history, _ = new_history()
    names = [name for name in StepRecord.__slots__ if name not in {"num_blocks", "failure"}]
    history.note_step(
        record(7, **{name: place for place, name in enumerate(StepRecord.__slots__) if place and name != "failure"})
    )
    (row,) = history.steps(0, 1)
    places = {StepRecord.__slots__.index(name) for name in names} - {0}
    assert sorted(row[1:].tolist()) == sorted([7, *places])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(0, 5)), max_size=20),
    st.lists(st.tuples(st.floats(0, 9), st.integers(-1, 3), st.integers(0, 5)), max_size=20),
    st.sampled_from([1, 2, 3, 4, 0.5]),
)
def test_buckets_lose_nothing(
    steps: list[tuple[float, int]], admissions: list[tuple[float, int, int]], width_s: float
) -> None:
    steps.sort()
    rows = np.zeros((len(steps), len(STEP_FIELDS)))
    for row, (time_s, number) in zip(rows, steps, strict=True):
        row[0] = time_s
        row[[STEP_FIELDS.index("decoded"), STEP_FIELDS.index("running")]] = number
    admitted = np.array([(time_s, cause, 1, missed) for time_s, cause, missed in sorted(admissions)], float)
    told = as_buckets(rows, admitted.reshape(-1, len(ADMISSION_FIELDS)), width_s)
    for start_s, decoded, running in zip(told["start_s"], told["decoded"], told["running"], strict=True):
        inside = [number for time_s, number in steps if start_s <= time_s < start_s + width_s]
        assert (decoded, running) == (sum(inside), inside[-1])
    assert sum(told["steps"]) == len(steps)
    assert sum(tokens for *_, tokens in told["misses"]) == sum(missed for *_, missed in admissions)


def test_a_time_has_at_most_so_many_buckets() -> None:
    assert [width_for(seconds) for seconds in (0.0, 1.0, 600.0, 600.5, 6000.0)] == [1, 1, 1, 2, 10]
    assert 7777 / width_for(7777) <= MOST_BUCKETS
    assert [width_for(seconds, 0.1) for seconds in (0.0, 60.0, 60.5)] == [0.1, 0.1, 0.2]
    assert [width_for(seconds, 60.0) for seconds in (0.0, 36_000.0, 36_001.0)] == [60, 60, 120]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 3)), max_size=30), st.randoms())
def test_a_tree_has_all_blocks_once_and_true_sums(blocks: list[tuple[int, int]], random: Random) -> None:
    order = list(range(len(blocks)))
    random.shuffle(order)  # a parent may have a larger id than its child
    parents, hits = np.full(len(blocks), -1, np.int32), np.zeros(len(blocks), np.int32)
    for place, (parent, num_hits) in enumerate(blocks):
        parents[order[place]] = order[parent] if parent < place and parent >= 0 else -1
        hits[order[place]] = num_hits
    ones = np.zeros(len(blocks), np.int32)
    prefixes = CachedPrefixes("p", (16,), np.arange(len(blocks), dtype=np.int32), ones, parents, hits, ones, ones > 0)
    tree = as_tree(prefixes, most_nodes=1000, most_depth=1000)
    found: list[int] = []

    def walk(node: dict[str, Any]) -> tuple[int, int]:
        run = [node["block"]]
        while run[-1] != node["last_block"]:
            (child,) = np.flatnonzero(parents == run[-1]).tolist()
            run.append(child)
        assert node["blocks"] == len(run)
        assert node["more"] == 0
        found.extend(run)
        behind = [walk(child) for child in node["children"]]
        sums = len(run) + sum(size for size, _ in behind), int(hits[run].sum()) + sum(each for _, each in behind)
        assert sums == (node["all_blocks"], node["all_hits"])
        return sums

    for root in tree["roots"]:
        walk(root)
    assert sorted(found) == list(range(len(blocks)))
    few = as_tree(prefixes, most_nodes=2, most_depth=1)
    assert len(few["roots"]) + few["more"] == len(tree["roots"])
