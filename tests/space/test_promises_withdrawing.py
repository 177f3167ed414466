"""Promise 25: bad content is withdrawn although it is shared, and the answer lists the rows that depend on it."""

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from pagedkv import Allocation, BlockSpace, ChunkedLocal, FullAttention, GroupSpec, Load, RecurrentState, SlidingWindow
from pagedkv.errors import BlockError, LostSequenceError
from tests.space.spaces import acknowledge, allocate, cache, hit, new_space, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

Prompt = npt.NDArray[np.int32]

FULL = (FullAttention(4),)
HYBRID = (FullAttention(4), SlidingWindow(8, 4))
MIXED: list[tuple[GroupSpec, ...]] = [
    FULL,
    HYBRID,
    (FullAttention(4), RecurrentState(8, pool="device")),
    (FullAttention(4), ChunkedLocal(8, 4), FullAttention(8)),
    (SlidingWindow(8, 4),),
    (FullAttention(4), SlidingWindow(8, 4, prefix_caching=False)),
]
PROMPT = tokens(33)


def branch(at: int, first: int) -> Prompt:
    """Make a prompt that leaves the one under test at a position."""
    return np.concatenate([PROMPT[:at], tokens(33 - at, first=first)])


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=str)
def test_who_shares_a_bad_block_is_named_and_what_continues_it_is_found_by_nobody(
    groups: tuple[GroupSpec, ...],
) -> None:
    space = new_space(*groups)
    first = prefill(space, PROMPT)
    shares, leaves = allocate(space, branch(20, 500)), allocate(space, branch(8, 600))
    run_step(space)
    cache(space, branch(24, 700))
    answer = space.withdraw([space.block_ids(first)[3]])
    assert answer.lost_rows == (first, shares)
    assert answer.first_positions == (12, 12)
    assert [hit(space, prompt) for prompt in (PROMPT, branch(20, 500), branch(24, 700))] == [12] * 3
    assert hit(space, branch(8, 600)) == 32
    space.check()
    with pytest.raises(LostSequenceError):
        space.append([first], [1])
    space.free([first, shares, leaves])
    assert hit(space, branch(8, 600)) == 32
    assert prefill(space, PROMPT) >= 0
    assert hit(space, PROMPT) == 32, "computed anew"
    space.check()


def test_a_window_is_kept_where_its_content_is_shown_to_be_sound_and_no_more() -> None:
    """Both groups have the first two blocks, and what continues them is bad."""
    space = new_space(*HYBRID, num_blocks=40)
    cache(space, PROMPT)
    other = tokens(33, first=500)
    cache(space, other)
    bad = space.match(PROMPT).block_ids[0][2]
    space.withdraw([int(bad)])
    assert (hit(space, PROMPT), hit(space, other)) == (8, 32)
    row = allocate(space, PROMPT[:9])
    run_step(space)
    assert hit(space, PROMPT) == 8
    space.free(row)
    space.check()


def test_steps_in_flight_go_on_for_rows_that_are_lost() -> None:
    space = new_space()
    row = prefill(space, PROMPT)
    space.append(row, [1, 2, 3, 4])
    plan = space.plan_step()
    answer = space.withdraw(space.block_ids(row)[:1])
    assert (answer.lost_rows, answer.first_positions) == ((row,), (0,))
    space.free(row)
    acknowledge(space, plan)
    assert hit(space, PROMPT) == 0
    assert space.statistics().pools[0].num_in_use == 0
    space.check()


def test_what_a_lost_row_was_to_compute_for_others_falls_to_them() -> None:
    """The block that is bad was brought; the others share only what is before it, which the open step computes."""
    space = new_space()
    other = allocate(space, PROMPT[:9])
    row = space.fork(other)[0]
    space.append([row], tokens(8, first=500), [8])
    answer = space.withdraw([space.block_ids(int(row))[3]])
    assert answer.lost_rows == (row,)
    plan = space.plan_step()
    assert plan.compute.rows.tolist() == [other]
    acknowledge(space, plan)
    assert hit(space, PROMPT[:9]) == 8
    space.check()


def test_who_is_swapped_out_is_lost_there() -> None:
    space = new_space(num_host_blocks=40)
    row, other = prefill(space, PROMPT), prefill(space, branch(20, 500))
    bad = space.block_ids(row)[1]
    space.swap_out([other])
    run_step(space)
    answer = space.withdraw([bad])
    assert answer.lost_rows == (row, other)
    assert answer.first_positions == (4, 4)
    with pytest.raises(LostSequenceError):
        space.swap_in([other])
    space.free([row, other])
    space.check()


def test_tickets_and_loads_that_hold_bad_content_are_named() -> None:
    space = new_space()
    row = prefill(space, PROMPT[:21])
    good, bad = space.hold(space.block_ids(row)[:2]), space.hold(space.block_ids(row)[2:4])
    load = space.load(PROMPT, 32)
    assert isinstance(load, Load)
    answer = space.withdraw([space.block_ids(row)[3]])
    assert (answer.undefined_tickets, answer.failed_loads) == ((bad,), (load,))
    space.finish_load(load)
    assert hit(space, PROMPT) == 12
    space.release(good)
    space.release(bad)
    space.free(row)
    space.check()


def test_what_was_brought_and_turns_out_wrong_is_withdrawn() -> None:
    space = new_space()
    admitted = space.allocate(PROMPT, num_external_tokens=20)
    assert isinstance(admitted, Allocation)
    answer = space.withdraw(space.block_ids(admitted.row)[2:5])
    assert (answer.lost_rows, answer.first_positions) == ((admitted.row,), (8,))
    assert hit(space, PROMPT) == 8
    space.check()


def test_a_block_that_holds_nothing_costs_nothing() -> None:
    space = new_space()
    cache(space, PROMPT)
    answer = space.withdraw([99])
    assert (answer.lost_rows, answer.num_names) == ((), 0)
    assert hit(space, PROMPT) == 32


def test_where_windows_stand_alone_all_rows_are_lost() -> None:
    """There is no record of the rows that have read a block that left the window."""
    space = new_space(SlidingWindow(8, 4))
    row, other = prefill(space, PROMPT), prefill(space, tokens(33, first=500))
    answer = space.withdraw([space.block_ids(row)[-2]])
    assert answer.lost_rows == (row, other)
    assert hit(space, tokens(33, first=500)) == 0
    space.check()


def test_only_blocks_of_the_pool_can_be_withdrawn() -> None:
    space = new_space()
    prefill(space, PROMPT)
    for wrong in ([0], [500], [-1], [1.5]):
        with unchanged(space), pytest.raises(BlockError):
            space.withdraw(wrong)


class Provenance:
    """Simulated memory with a record of what each block's content was computed from.

    Attributes:
        sources: for each block that holds something, itself and every block that was read for it, each with the number
            of the content that it had then.
    """

    def __init__(self, space: BlockSpace) -> None:
        self.space = space
        self.sources: dict[int, set[tuple[int, int]]] = {}
        self.contents: Counter[int] = Counter()

    def run_step(self) -> None:
        """Carry a plan out: computing a position reads all that its row holds up to there."""
        plan = self.space.plan_step()
        for new in plan.new_blocks:
            for block in new.block_ids.tolist():
                self._begin(block)
        for copy in plan.copies:
            for source, destination in zip(copy.src_ids.tolist(), copy.dst_ids.tolist(), strict=True):
                self._begin(destination)
                self.sources[destination] |= self.sources[source]
        ranges = plan.compute
        for row, start, end in zip(ranges.rows.tolist(), ranges.starts.tolist(), ranges.ends.tolist(), strict=True):
            for position in range(start, end):
                read = set().union(*(self.sources[block] for block in self.held(row, position)))
                for block in self._written(row, position):
                    self.sources[block] |= read
        self.space.acknowledge(plan.step_id)

    def held(self, row: int, last: int = 999) -> set[int]:
        """Return the blocks that a row holds, in all groups, for positions up to one."""
        tables = (
            self.space.block_ids(row, group)[: last // spec.block_size + 1]
            for group, spec in enumerate(self.space.config.groups)
        )
        return set().union(*tables) - {0}

    def _written(self, row: int, position: int) -> set[int]:
        """Return the blocks that have a slot for a position."""
        groups = enumerate(self.space.config.groups)
        return {self.space.block_ids(row, group)[position // spec.block_size] for group, spec in groups} - {0}

    def tainted_by(self, block: int) -> set[int]:
        """Return the blocks with content computed from the present content of a block, that block among them."""
        return {other for other, sources in self.sources.items() if (block, self.contents[block]) in sources}

    def _begin(self, block: int) -> None:
        self.contents[block] += 1
        self.sources[block] = {(block, self.contents[block])}


@pytest.mark.parametrize("groups", MIXED, ids=str)
@given(data=st.data())
def test_nobody_hits_what_is_bad_and_nobody_relies_on_it_unnamed(
    groups: tuple[GroupSpec, ...], data: st.DataObject
) -> None:
    space = new_space(*groups, num_blocks=60, in_order=data.draw(st.booleans()))
    memory, rows = Provenance(space), list[int]()
    for _ in range(data.draw(st.integers(2, 25))):
        match data.draw(st.sampled_from(("allocate", "append", "free", "step", "fork", "break"))):
            case "allocate" if len(rows) < 12:
                prompt = branch(data.draw(st.integers(0, 32)), data.draw(st.sampled_from((0, 500))))
                admitted = space.allocate(prompt[: data.draw(st.integers(1, 33))])
                rows += [admitted.row] if isinstance(admitted, Allocation) else []
            case "append" if rows:
                row = data.draw(st.sampled_from(rows))
                space.append([row], tokens(5, first=data.draw(st.sampled_from((33, 900)))), [5])
            case "fork" if 0 < len(rows) < 12:
                memory.run_step()
                rows += space.fork(data.draw(st.sampled_from(rows))).tolist()
            case "free" if rows:
                space.free(rows.pop(data.draw(st.integers(0, len(rows) - 1))))
            case "break" if rows:
                memory.run_step()
                bad = data.draw(st.sampled_from(sorted(memory.held(data.draw(st.sampled_from(rows))))))
                tainted = memory.tainted_by(bad)
                answer = space.withdraw([bad])
                named = set(space.stored_blocks().block_ids.tolist())
                assert not tainted & named, "it can still be hit"
                lost = set(answer.lost_rows)
                assert lost >= {row for row in rows if memory.held(row) & tainted}, "a row relies on it"
                space.free(list(lost))
                rows = [row for row in rows if row not in lost]
            case "step":
                memory.run_step()
        space.check()
    space.free(rows)
    space.check()


def test_promise_25_what_a_lost_row_was_to_compute_before_the_bad_block_is_found_by_nobody() -> None:
    space = new_space(FullAttention(2))
    row = allocate(space, [1, 2, 3, 4, 5, 6, 7])
    withdrawal = space.withdraw(space.block_ids(row)[2:3])
    assert withdrawal.lost_rows == (row,)
    assert hit(space, [1, 2, 3, 4, 9]) == 0
    run_step(space)
    assert hit(space, [1, 2, 3, 4, 9]) == 0
    space.check()
