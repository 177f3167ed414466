"""BlockSpaceManager: the words of the classic block managers, one sequence or sequence group at a time."""

import numpy as np
import pytest

from pagedkv import (
    AllocStatus,
    BlockSpaceManager,
    CrossAttention,
    FullAttention,
    RecurrentState,
    RequestKeys,
    Sequence,
    SequenceGroup,
    SlidingWindow,
    SpaceConfig,
)
from pagedkv.classic.manager import RowMap
from pagedkv.contract.spec import Row
from pagedkv.errors import ConfigurationError, OutOfBlocksError, PagedKVError, SequenceError, UnknownSequenceError
from tests.classic.managers import new_group, new_manager
from tests.space.spaces import allocate, new_space, run_step, unchanged

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER
MAX_SEQUENCES = 8


def tables(manager: BlockSpaceManager, group: SequenceGroup) -> list[list[int]]:
    return [manager.get_block_table(seq) for seq in group.seqs]


@pytest.mark.interpreted
def test_a_group_of_one_is_allocated_grown_and_freed() -> None:
    manager = new_manager()
    group = new_group(list(range(6)))
    (seq,) = group.seqs
    assert manager.can_allocate(group) is OK
    manager.allocate(group)
    assert manager.get_block_table(seq) == [1, 2]
    assert manager.get_num_free_blocks() == 18
    seq.token_ids += [6, 7, 8]
    assert manager.can_append_slots(group)
    assert manager.append_slots(seq) == []
    assert manager.get_block_table(seq) == [1, 2, 3]
    manager.free(seq)
    assert manager.get_num_free_blocks() == 20
    manager.space.check()


@pytest.mark.interpreted
def test_a_group_of_n_sequences_shares_its_prompt() -> None:
    manager = new_manager()
    group = new_group(list(range(6)), n=3)
    manager.allocate(group)
    assert tables(manager, group) == [[1, 2]] * 3
    assert manager.get_num_free_blocks() == 18
    plan = run_step(manager.space)
    assert plan.compute.ends.tolist() == [6]
    manager.space.check()


def test_can_allocate_says_ok_later_or_never() -> None:
    manager = new_manager()
    assert manager.can_allocate(new_group(list(range(80)))) is OK
    assert manager.can_allocate(new_group(list(range(81)))) is NEVER
    manager.allocate(new_group(list(range(40))))
    assert manager.can_allocate(new_group(list(range(100, 141)), first_id=10)) is LATER
    assert manager.can_allocate(new_group(list(range(100, 140)), first_id=10)) is OK


def test_can_allocate_counts_the_rows_of_all_sequences() -> None:
    manager = new_manager()
    manager.allocate(new_group([1, 2], n=6))
    assert manager.can_allocate(new_group([3, 4], n=2, first_id=10)) is OK
    assert manager.can_allocate(new_group([3, 4], n=3, first_id=10)) is LATER
    assert manager.can_allocate(new_group([3, 4], n=9, first_id=10)) is NEVER


def test_lookahead_slots_are_reserved_with_the_prompt_and_with_each_append() -> None:
    manager = new_manager()
    group = new_group(list(range(6)))
    (seq,) = group.seqs
    assert manager.can_allocate(group, num_lookahead_slots=75) is NEVER
    manager.allocate(group, num_lookahead_slots=3)
    assert len(manager.get_block_table(seq)) == 3
    seq.token_ids.append(6)
    manager.append_slots(seq, num_lookahead_slots=10)
    assert len(manager.get_block_table(seq)) == 5
    assert manager.can_append_slots(group, num_lookahead_slots=73)
    assert not manager.can_append_slots(group, num_lookahead_slots=74)


@pytest.mark.interpreted
def test_append_slots_returns_the_copies_on_write() -> None:
    """Two of three write to the shared block; the third keeps it."""
    manager = new_manager()
    group = new_group(list(range(6)), n=3)
    manager.allocate(group)
    run_step(manager.space)
    copies = []
    for seq in group.seqs:
        seq.token_ids.append(100 + seq.seq_id)
        copies.append(manager.append_slots(seq))
    assert copies == [[(2, 3)], [(2, 4)], []]
    assert tables(manager, group) == [[1, 3], [1, 4], [1, 2]]
    (moves,) = run_step(manager.space).copies
    assert (moves.src_ids.tolist(), moves.dst_ids.tolist()) == ([2, 2], [3, 4])


def test_append_slots_without_new_tokens_changes_nothing() -> None:
    manager = new_manager()
    group = new_group(list(range(6)), n=2)
    manager.allocate(group)
    assert manager.append_slots(group.seqs[0]) == []
    assert tables(manager, group) == [[1, 2], [1, 2]]


def test_append_slots_reports_the_first_groups_copies_and_the_plan_all() -> None:
    manager = new_manager(FullAttention(4), SlidingWindow(8, 4))
    group = new_group(list(range(6)), n=2)
    manager.allocate(group)
    run_step(manager.space)
    group.seqs[1].token_ids.append(6)
    copies = manager.append_slots(group.seqs[1])
    (moves,) = manager.space.plan_step().copies
    planned = list(zip(moves.src_ids.tolist(), moves.dst_ids.tolist(), strict=True))
    assert len(planned) == 2
    assert set(copies) <= set(planned)


@pytest.mark.interpreted
def test_fork_and_free() -> None:
    manager = new_manager()
    group = new_group(list(range(6)))
    (parent,) = group.seqs
    manager.allocate(group)
    run_step(manager.space)
    child = Sequence(7, list(parent.token_ids))
    manager.fork(parent, child)
    assert manager.get_block_table(child) == manager.get_block_table(parent)
    manager.free(parent)
    child.token_ids.append(6)
    assert manager.append_slots(child) == []
    manager.free(child)
    assert manager.get_num_free_blocks() == 20


def test_a_freed_id_may_be_used_again() -> None:
    manager = new_manager()
    group = new_group([1, 2, 3])
    manager.allocate(group)
    manager.free(group.seqs[0])
    manager.allocate(group)
    assert manager.space.num_tokens(manager.row_of(group.seqs[0])) == 3


@pytest.mark.interpreted
def test_swapping_returns_the_moves() -> None:
    """Five different blocks of two sequences, the shared one once; back come those that the device has not cached."""
    manager = new_manager()
    group = new_group(list(range(6)), n=2)
    manager.allocate(group)
    run_step(manager.space)
    for seq in group.seqs:
        seq.token_ids += [50 + seq.seq_id] * 4
        manager.append_slots(seq)
    run_step(manager.space)
    tables_before = tables(manager, group)
    device = sorted({block for table in tables_before for block in table})
    assert manager.can_swap_out(group)
    out = manager.swap_out(group)
    assert sorted(source for source, _ in out) == device
    run_step(manager.space)
    assert manager.can_swap_in(group) is OK
    full = {block for table in tables_before for block in table[:2]}
    back = manager.swap_in(group)
    assert {source for source, _ in back} == {to for block, to in out if block not in full}
    assert {block for table in tables(manager, group) for block in table} == {block for _, block in back} | full
    run_step(manager.space)
    manager.space.check()


def test_swapping_questions() -> None:
    manager = new_manager(num_host_blocks=3)
    group, other = new_group(list(range(8))), new_group(list(range(100, 108)), first_id=1)
    large = new_group(list(range(200, 212)), first_id=2)
    for each in (group, other, large):
        manager.allocate(each)
    run_step(manager.space)
    assert [manager.can_swap_out(each) for each in (group, large)] == [True, False]
    manager.swap_out(group)
    run_step(manager.space)
    assert not manager.can_swap_out(other)
    manager.free(large.seqs[0])
    filler = new_group(list(range(300, 372)), first_id=3)
    manager.allocate(filler)
    assert manager.can_swap_in(group) is LATER
    manager.free(filler.seqs[0])
    assert manager.can_swap_in(group) is OK


@pytest.mark.interpreted
def test_promise_02_a_group_that_shares_what_the_device_caches_is_not_ended() -> None:
    """Its two blocks are alike and there already; with what they write next it takes all three blocks of the device."""
    manager = new_manager(num_blocks=4, num_host_blocks=3)
    group = new_group([0], n=2)
    manager.allocate(group)
    for seq in group.seqs:
        seq.token_ids += [1, 2, 3]
        manager.append_slots(seq)
    plan = manager.space.plan_step()
    manager.swap_out(group)
    manager.space.acknowledge(plan.step_id)
    manager.end_round()
    for seq in group.seqs:
        seq.token_ids.append(4)
    blocker = new_group([5, 6, 7, 8], first_id=2)
    manager.allocate(blocker)
    assert manager.can_swap_in(group) is LATER
    manager.free(blocker.seqs[0])
    assert manager.can_swap_in(group) is OK
    assert manager.can_swap_in(group, 4) is NEVER
    assert manager.swap_in(group) == []
    assert manager.can_append_slots(group)
    manager.space.check()


def test_without_a_host_pool_nothing_can_be_swapped_out() -> None:
    manager = new_manager(num_host_blocks=0)
    group = new_group([1, 2, 3])
    manager.allocate(group)
    assert not manager.can_swap_out(group)


@pytest.mark.interpreted
def test_mark_blocks_as_computed_takes_nothing_out_of_the_plan() -> None:
    """Said right after scheduling, as classic schedulers do: the device still computes everything."""
    manager = new_manager()
    group = new_group(list(range(10)), n=2)
    manager.allocate(group)
    with unchanged(manager.space):
        manager.mark_blocks_as_computed(group, token_chunk_size=10)
    assert manager.get_common_computed_block_ids(group.seqs) == []
    plan = manager.end_round()
    assert (plan.compute.starts.tolist(), plan.compute.ends.tolist()) == ([0], [10])
    assert manager.get_common_computed_block_ids(group.seqs) == [1, 2]


def test_content_from_elsewhere_is_declared_at_the_other_door() -> None:
    manager = new_manager()
    group = new_group(list(range(10)))
    manager.allocate(group)
    manager.space.mark_computed([manager.row_of(seq) for seq in group.seqs])
    assert manager.get_common_computed_block_ids(group.seqs) == [1, 2]
    assert manager.end_round().compute.rows.tolist() == []


def test_access_all_blocks_in_seq_changes_nothing() -> None:
    manager = new_manager()
    group = new_group(list(range(10)))
    manager.allocate(group)
    with unchanged(manager.space):
        manager.access_all_blocks_in_seq(group.seqs[0], now=3.5)


def test_is_allocated_tells_who_has_blocks() -> None:
    """On the device or on the host, forked or allocated, until freed through either door."""
    manager = new_manager()
    group = new_group(list(range(6)))
    (seq,) = group.seqs
    child = Sequence(1, list(seq.token_ids))
    assert [manager.is_allocated(each) for each in (seq, child)] == [False, False]
    manager.allocate(group)
    manager.fork(seq, child)
    assert [manager.is_allocated(each) for each in (seq, child)] == [True, True]
    manager.end_round()
    manager.swap_out(group)
    assert manager.is_allocated(seq)
    manager.free(seq)
    manager.space.free(manager.row_of(child))
    assert [manager.is_allocated(each) for each in (seq, child)] == [False, False]


def test_a_sequence_that_is_missing_may_be_freed_where_that_is_said() -> None:
    """Aborted before it was scheduled; freed when it finished and once more with its group."""
    manager = new_manager()
    group = new_group(list(range(6)))
    (seq,) = group.seqs
    with unchanged(manager.space):
        manager.free(seq, missing_ok=True)
    manager.allocate(group)
    manager.free(seq, missing_ok=True)
    assert manager.get_num_free_blocks() == 20
    with unchanged(manager.space):
        manager.free(seq, missing_ok=True)


def test_blocks_are_counted_on_device_and_host() -> None:
    """As classic schedulers count them: without the null blocks."""
    manager = new_manager()
    assert (manager.num_total_gpu_blocks, manager.num_total_cpu_blocks) == (20, 10)
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (20, 10)
    group = new_group(list(range(6)))
    manager.allocate(group)
    manager.end_round()
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (18, 10)
    manager.swap_out(group)
    manager.end_round()
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (20, 8)


def test_without_a_host_pool_no_host_blocks_are_counted() -> None:
    manager = new_manager(num_host_blocks=0)
    assert (manager.num_total_cpu_blocks, manager.get_num_free_cpu_blocks()) == (0, 0)


def test_of_several_pools_the_first_groups_is_counted() -> None:
    groups = FullAttention(4, pool="large"), SlidingWindow(4, 4, pool="small")
    config = SpaceConfig(groups, {"small": 5, "large": 30}, {"small": 3, "large": 9}, max_sequences=8, max_tokens=200)
    manager = BlockSpaceManager(config)
    assert (manager.num_total_gpu_blocks, manager.num_total_cpu_blocks) == (29, 8)
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (29, 8)


def test_hits_can_be_seen_before_and_after_allocating() -> None:
    """What would hit now, and what has hit then: later hits change nothing in that."""
    manager = new_manager()
    first, second = new_group(list(range(10))), new_group(list(range(13)), n=2, first_id=1)
    assert manager.get_num_cached_tokens(first.seqs[0]) == 0
    manager.allocate(first)
    manager.end_round()
    assert manager.get_num_cached_tokens(first.seqs[0]) == 0
    assert manager.get_num_cached_tokens(second.seqs[0]) == 8
    manager.allocate(second)
    child = Sequence(9, list(range(13)))
    manager.fork(second.seqs[1], child)
    assert [manager.get_num_cached_tokens(seq) for seq in (*second.seqs, child)] == [8, 8, 8]


def test_hits_are_asked_for_with_keys() -> None:
    manager = new_manager()
    ours, again = new_group(list(range(10))), new_group(list(range(10)), first_id=1)
    keys = RequestKeys(salt=b"ours")
    manager.allocate(ours, keys=keys)
    assert manager.get_num_cached_tokens(again.seqs[0]) == 0
    assert manager.get_num_cached_tokens(again.seqs[0], keys=keys) == 8


def test_the_hit_rate_is_that_of_prompt_tokens() -> None:
    manager = new_manager()
    assert manager.get_prefix_cache_hit_rate() == 0.0
    for number in range(2):
        manager.allocate(new_group(list(range(10)), first_id=number))
    assert manager.get_prefix_cache_hit_rate() == 8 / 20
    assert manager.reset_prefix_cache()
    assert manager.get_num_cached_tokens(Sequence(7, list(range(10)))) == 0


def test_without_prefix_caching_the_hit_rate_says_so() -> None:
    config = SpaceConfig((FullAttention(4),), 10, prefix_caching=False, max_sequences=8, max_tokens=200)
    assert BlockSpaceManager(config).get_prefix_cache_hit_rate() == -1.0


@pytest.mark.interpreted
def test_a_prompt_may_be_prefilled_in_chunks() -> None:
    """A sequence is what was scheduled of it so far; the cached prefix comes with the first chunk."""
    manager = new_manager()
    manager.allocate(new_group(list(range(9))))
    manager.end_round()
    prompt = list(range(20))
    seq = Sequence(1, [])
    group = SequenceGroup("long", [seq])
    ranges = []
    whole = SequenceGroup("long", [Sequence(1, prompt)])
    assert manager.can_allocate(whole) is OK
    seq.token_ids += prompt[: manager.get_num_cached_tokens(whole.seqs[0]) + 5]
    manager.allocate(group)
    while True:
        plan = manager.end_round()
        ranges += list(zip(plan.compute.starts.tolist(), plan.compute.ends.tolist(), strict=True))
        if seq.token_ids == prompt:
            break
        seq.token_ids += prompt[len(seq.token_ids) :][:5]
        assert manager.can_append_slots(group)
        assert manager.append_slots(seq) == []
    assert ranges == [(8, 13), (13, 18), (18, 20)]
    assert manager.get_common_computed_block_ids(group.seqs) == manager.get_block_table(seq)


@pytest.mark.interpreted
def test_common_computed_blocks_are_those_that_all_hold() -> None:
    """Two prompts that agree in their first two blocks; acknowledging is what makes them computed."""
    manager = new_manager()
    left = new_group([*range(8), *range(100, 106)])
    right = new_group([*range(8), *range(200, 206)], first_id=1)
    manager.allocate(left)
    manager.allocate(right)
    seqs = [*left.seqs, *right.seqs]
    assert manager.get_common_computed_block_ids(seqs) == []
    run_step(manager.space)
    assert manager.get_common_computed_block_ids(seqs) == [1, 2]
    assert manager.get_common_computed_block_ids(left.seqs) == manager.get_block_table(left.seqs[0])[:3]
    assert manager.get_common_computed_block_ids([]) == []


def test_keys_keep_tenants_apart() -> None:
    manager = new_manager()
    ours, theirs, again = (new_group(list(range(10)), first_id=index) for index in range(3))
    manager.allocate(ours, keys=RequestKeys(salt=b"ours"))
    manager.allocate(theirs, keys=RequestKeys(salt=b"theirs"))
    manager.allocate(again, keys=RequestKeys(salt=b"ours"))
    assert not set(*tables(manager, ours)) & set(*tables(manager, theirs))
    assert tables(manager, again)[0][:2] == tables(manager, ours)[0][:2]


@pytest.mark.interpreted
def test_both_doors_work_on_the_same_state() -> None:
    """Rows and sequences in turns: allocated here, grown there, and back."""
    manager = new_manager()
    space = manager.space
    group = new_group(list(range(6)), n=2)
    manager.allocate(group)
    rows = [manager.row_of(seq) for seq in group.seqs]
    (row,) = space.fork(rows[0])
    space.append([*rows, row], [6, 7, 8])
    for seq, token in zip(group.seqs, (6, 7), strict=True):
        seq.token_ids.append(token)
        assert manager.append_slots(seq) == []  # known already
        seq.token_ids.append(9)
        manager.append_slots(seq)
    table = manager.block_table(group.seqs[0])
    assert table.physical_block_ids == manager.get_block_table(group.seqs[0]) == space.block_ids(rows[0])
    table.append_token_ids([10])
    assert space.num_tokens(rows[0]) == 9
    space.free([row])
    run_step(space)
    space.check()


def test_a_recurrent_groups_sequences_cannot_share_an_uncomputed_prompt() -> None:
    """Their state would have to be advanced once for both; said before anything changes."""
    manager = BlockSpaceManager(SpaceConfig((RecurrentState(4, pool="device"),), num_blocks=20))
    before = manager.space.statistics()
    with pytest.raises(SequenceError):
        manager.allocate(new_group([1, 2, 3], n=2))
    assert manager.space.statistics() == before


def test_every_classic_word_is_there() -> None:
    """The names that people in the field look for."""
    words = (
        "can_allocate allocate can_append_slots append_slots fork free can_swap_out swap_out can_swap_in swap_in "
        "get_block_table mark_blocks_as_computed get_common_computed_block_ids get_num_free_blocks "
        "get_num_free_gpu_blocks get_num_free_cpu_blocks access_all_blocks_in_seq get_num_cached_tokens "
        "get_prefix_cache_hit_rate reset_prefix_cache"
    )
    assert [word for word in words.split() if not callable(getattr(BlockSpaceManager, word, None))] == []


def test_what_takes_lookahead_slots_takes_them_as_classic_schedulers_give_them() -> None:
    """Second, by position."""
    manager = new_manager()
    group = new_group(list(range(6)))
    (seq,) = group.seqs
    assert manager.can_allocate(group, 3) is OK
    manager.allocate(group, 3)
    assert manager.can_append_slots(group, 3)
    assert manager.append_slots(seq, 3) == []
    manager.end_round()
    manager.swap_out(group)
    manager.end_round()
    assert manager.can_swap_in(group, 3) is OK


def test_errors_of_the_manager_are_ours() -> None:
    """One tree to catch: scarcity and misuse of the classic door alike."""
    manager = new_manager()
    with pytest.raises(PagedKVError):
        manager.allocate(new_group(list(range(150))))


def test_sequences_freed_through_the_other_door_do_not_pile_up() -> None:
    """At most one place a row is remembered, after 10,000 sequences."""
    manager = new_manager()
    for number in range(10_000):
        seq = Sequence(number, [1, 2, 3])
        manager.allocate(SequenceGroup("request", [seq]))
        manager.space.free(manager.row_of(seq))
    assert len(manager._places) <= manager.space.config.max_sequences


@pytest.mark.parametrize("seed", range(5))
def test_places_are_those_of_a_list_of_who_is_alive(seed: int) -> None:
    """Against a plain dict, which is told of every sequence freed, through either door; ids are used again."""
    rng = np.random.default_rng(seed)
    space = new_space(max_sequences=MAX_SEQUENCES)
    places, alive = RowMap(space), dict[int, int]()
    for step in range(1000):
        seq_id = int(rng.integers(12))
        if seq_id in alive:
            space.free(alive.pop(seq_id))
            if rng.random() < 0.5:
                places.leave(seq_id)
        elif len(alive) < MAX_SEQUENCES:
            alive[seq_id] = allocate(space, [1, 2, 3])
            places.enter(seq_id, Row(alive[seq_id]), num_cached_tokens=step)
        found = {known: place.row for known in range(12) if (place := places.find(known)) is not None}
        assert found == alive
        assert len(alive) <= len(places) <= MAX_SEQUENCES


# Encoders


def new_encoding_manager(num_blocks: int = 21) -> BlockSpaceManager:
    groups = FullAttention(4), CrossAttention(20, 4)
    return BlockSpaceManager(
        SpaceConfig(groups, num_blocks, 30, max_sequences=8, max_tokens=200, watermark=0.0, prefix_caching=False)
    )


def with_encoder(group: SequenceGroup, num_tokens: int) -> SequenceGroup:
    group.encoder_seq = Sequence(1_000 + group.seqs[0].seq_id, list(range(num_tokens)))
    return group


@pytest.mark.interpreted
def test_a_group_s_sequences_share_the_blocks_of_its_encoder() -> None:
    """Admitted together, forked, and gone with the last sequence, whatever is said of them before."""
    manager = new_encoding_manager()
    group = with_encoder(new_group(list(range(6)), n=2), 9)
    assert manager.can_allocate(group) is OK
    manager.allocate(group)
    cross = manager.get_cross_block_table(group)
    assert (tables(manager, group), cross) == ([[1, 2], [1, 2]], [3, 4, 5])
    assert manager.get_num_free_gpu_blocks() == 15
    manager.end_round()
    child = Sequence(9, list(group.seqs[0].token_ids))
    manager.fork(group.seqs[0], child)
    manager.free_cross(group)
    for seq in group.seqs:
        assert manager.get_cross_block_table(group) == cross
        manager.free(seq)
    with pytest.raises(UnknownSequenceError, match="no sequence of request"):
        manager.get_cross_block_table(group)
    assert manager.get_cross_block_table(SequenceGroup("other", [child])) == cross
    manager.free(child)
    assert manager.get_num_free_gpu_blocks() == 20
    manager.space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("num_blocks", [4, 5, 6])
def test_an_encoder_and_its_group_are_admitted_together_or_not_at_all(num_blocks: int) -> None:
    """Two blocks and three; the null block counts."""
    manager = new_encoding_manager(num_blocks)
    group = with_encoder(new_group(list(range(6))), 9)
    assert manager.can_allocate(group) is (OK if num_blocks == 6 else NEVER)
    if num_blocks < 6:
        with unchanged(manager.space), pytest.raises(OutOfBlocksError):
            manager.allocate(group)
        assert not manager.is_allocated(group.seqs[0])


@pytest.mark.interpreted
def test_an_encoder_s_blocks_are_swapped_with_the_group() -> None:
    manager = new_encoding_manager()
    group = with_encoder(new_group(list(range(6)), n=2), 9)
    manager.allocate(group)
    manager.end_round()
    out = manager.swap_out(group)
    assert {source for source, _ in out} == {1, 2, 3, 4, 5}
    manager.end_round()
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (20, 24)
    assert set(manager.get_cross_block_table(group)) == {to for source, to in out if source > 2}
    back = manager.swap_in(group)
    assert len(back) == 5
    plan = manager.end_round()
    assert len(plan.compute.rows) == 0
    manager.space.check()


def test_without_groups_of_cross_attention_there_are_no_cross_tables() -> None:
    manager = new_manager()
    group = with_encoder(new_group(list(range(6))), 9)
    with pytest.raises(ConfigurationError, match="no group is a CrossAttention"):
        manager.can_allocate(group)
    group.encoder_seq = None
    manager.allocate(group)
    with pytest.raises(ConfigurationError, match="no cross tables"):
        manager.get_cross_block_table(group)


def test_an_encoder_that_is_no_sequence_is_refused() -> None:
    manager = new_encoding_manager()
    group = new_group(list(range(6)))
    group.encoder_seq = 7  # type: ignore[assignment]
    with unchanged(manager.space), pytest.raises(SequenceError, match="a sequence has a number"):
        manager.allocate(group)
    other = with_encoder(new_group(list(range(6))), 0)
    manager.allocate(other)
    assert manager.get_cross_block_table(other) == []
