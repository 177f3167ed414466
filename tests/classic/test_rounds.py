"""Rounds: plan, run and acknowledge in one call, also in the middle of scheduling."""

import pytest

from pagedkv import AllocStatus, BlockSpaceManager, FullAttention, Sequence, SequenceGroup, SpaceConfig, StepPlan
from pagedkv.errors import StepError
from tests.choosing import long_but
from tests.classic.managers import new_group, new_manager
from tests.classic.synchronous_scheduler import Classic, FreedAtOnce, Overlapped, served_through
from tests.space.spaces import unchanged

OK, NEVER = AllocStatus.OK, AllocStatus.NEVER


@pytest.mark.interpreted
def test_a_round_is_planned_run_and_acknowledged() -> None:
    manager = new_manager()
    group = new_group(list(range(6)))
    manager.allocate(group)
    seen: list[StepPlan] = []
    plan = manager.end_round(seen.append)
    assert seen == [plan]
    assert plan.compute.ends.tolist() == [6]
    assert manager.get_common_computed_block_ids(group.seqs) == [1]
    assert manager.space.statistics().num_steps_in_flight == 0


def test_a_round_that_fails_is_aborted_and_the_next_one_computes_it() -> None:
    manager = new_manager()
    group = new_group(list(range(6)))
    manager.allocate(group)

    def fail(_: StepPlan) -> None:
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="the device is gone"):
        manager.end_round(fail)
    assert manager.space.statistics().num_steps_in_flight == 0
    assert manager.get_common_computed_block_ids(group.seqs) == []
    assert manager.end_round().compute.ends.tolist() == [6]
    manager.space.check()


def test_a_round_cannot_end_before_those_in_flight() -> None:
    manager = new_manager()
    manager.allocate(new_group(list(range(6))))
    plan = manager.space.plan_step()
    with unchanged(manager.space), pytest.raises(StepError, match="1 steps are in flight"):
        manager.end_round()
    manager.space.acknowledge(plan.step_id)
    manager.end_round()


def test_swapped_out_blocks_are_free_when_the_round_has_ended() -> None:
    manager = new_manager(num_blocks=5)
    groups = [new_group(list(range(start, start + 8)), first_id=start) for start in (0, 8)]
    for group in groups:
        manager.allocate(group)
    manager.end_round()
    groups[0].seqs[0].token_ids.append(8)
    manager.swap_out(groups[1])
    assert not manager.can_append_slots(groups[0])
    manager.end_round()
    assert manager.can_append_slots(groups[0])


# What comes back


def swapped_out_pair(num_blocks: int) -> tuple[BlockSpaceManager, SequenceGroup]:
    """A sequence of 5 tokens and its fork, in blocks of 4, both in the host pool."""
    config = SpaceConfig((FullAttention(4),), num_blocks, 3, max_sequences=4, max_tokens=64, watermark=0)
    manager = BlockSpaceManager(config)
    first, second = Sequence(0, [1, 2, 3, 4, 5]), Sequence(1, [1, 2, 3, 4, 5])
    manager.allocate(SequenceGroup("request", [first]))
    manager.fork(first, second)
    manager.end_round()
    group = SequenceGroup("request", [first, second])
    manager.swap_out(group)
    manager.end_round()
    return manager, group


@pytest.mark.interpreted
def test_can_swap_in_counts_lookahead_slots_and_the_copies_that_they_cause() -> None:
    """Two blocks come back, and one of the two copies the partly filled one to reserve a slot in it."""
    manager, group = swapped_out_pair(num_blocks=3)
    assert manager.can_swap_in(group) is OK
    assert manager.can_swap_in(group, 1) is NEVER
    manager, group = swapped_out_pair(num_blocks=4)
    assert [manager.can_swap_in(group, slots) for slots in (1, 3, 4)] == [OK, OK, NEVER]


def test_can_swap_in_counts_unseen_tokens() -> None:
    """Of one sequence as of both: the second writer is left alone with the block."""
    manager, group = swapped_out_pair(num_blocks=3)
    group.seqs[0].token_ids.append(6)
    assert manager.can_swap_in(group) is NEVER
    manager, group = swapped_out_pair(num_blocks=4)
    for seq in group.seqs:
        seq.token_ids.append(6)
        assert manager.can_swap_in(group) is OK
    group.seqs[0].token_ids += [7, 8, 9]
    assert manager.can_swap_in(group) is NEVER
    manager.swap_in(group)


def test_what_can_be_swapped_in_can_go_on() -> None:
    manager, group = swapped_out_pair(num_blocks=4)
    for seq in group.seqs:
        seq.token_ids += [6, 7]
    assert manager.can_swap_in(group, 1) is OK
    manager.swap_in(group)
    for seq in group.seqs:
        manager.append_slots(seq, 1)
    manager.end_round()
    manager.space.check()


# Several victims a round


@pytest.mark.parametrize("seed", long_but([0], range(3)))
def test_closing_the_round_for_each_victim_preempts_no_more_than_frees_at_once(seed: int) -> None:
    """As many preemptions and rounds as with blocks that are free at once; with closing at the end only, more."""
    at_once = served_through(FreedAtOnce(), seed)
    closing, deferring = (served_through(Classic(closes_for_victims=closes), seed) for closes in (True, False))
    assert at_once.num_preemptions > 40
    assert (closing.num_preemptions, closing.num_rounds) == (at_once.num_preemptions, at_once.num_rounds)
    assert deferring.num_preemptions > at_once.num_preemptions


@pytest.mark.parametrize("seed", long_but([0], range(2)))
@pytest.mark.parametrize("num_blocks", [18, 24, 40])
def test_with_a_round_in_flight_no_more_are_preempted_than_with_frees_at_once_if_rounds_run_in_order(
    num_blocks: int, seed: int
) -> None:
    """Every victim is in the round in flight. Where its blocks wait for that, preempting one row drags others along."""
    at_once = served_through(FreedAtOnce(num_blocks), seed)
    in_order, waiting = (
        served_through(Overlapped(num_blocks=num_blocks, in_order=in_order), seed) for in_order in (True, False)
    )
    assert at_once.num_preemptions > 20
    assert (in_order.num_preemptions, in_order.num_rounds) == (at_once.num_preemptions, at_once.num_rounds)
    assert waiting.num_preemptions > at_once.num_preemptions
