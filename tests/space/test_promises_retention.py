"""Promise 22: a window group keeps cached what a later prompt can hit, and sheds everything else at once."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from pagedkv import (
    Allocation,
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
)
from pagedkv.blocks.record import FREE, KEPT, NAME, QUEUE, SPARE
from pagedkv.errors import ConfigurationError
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    found,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
)

pytestmark = pytest.mark.interpreted

BLOCK_SIZE = 4
FULL = FullAttention(BLOCK_SIZE)
WINDOW = SlidingWindow(window=8, block_size=BLOCK_SIZE)
"""A hit needs the last two blocks before its end."""

Prompt = npt.NDArray[np.int32]


def hybrid(*groups: GroupSpec, num_blocks: int = 200, shed_windows: bool = True) -> BlockSpace:
    """Build a space of a full group and a window, unless others are given."""
    return new_space(*(groups or (FULL, WINDOW)), num_blocks=num_blocks, num_host_blocks=60, shed_windows=shed_windows)


def joined(*parts: Prompt) -> Prompt:
    return np.concatenate(parts)


def test_what_a_window_passed_is_shed_but_for_the_end_of_the_prompt_and_then_of_the_sequence() -> None:
    space = hybrid()
    sequence = tokens(60)
    row = prefill(space, sequence[:41])
    space.append(row, sequence[41:])
    run_step(space)
    assert found(space, sequence) == [8, 9, 13, 14], "the prompt's end, and what the next token reads"
    space.free(row)
    assert found(space, sequence) == [13, 14], "the sequence's end, which stands for the prompt's"
    assert hit(space, joined(sequence, tokens(1, first=500))) == 60
    assert hit(space, sequence[:41]) == 40
    branch = joined(sequence[:50], tokens(10, first=500))
    assert hit(space, branch) == 48, "spare blocks are hit as long as they are there"
    use_up_spare(space)
    assert hit(space, branch) == 0, "no prompt has branched there yet"
    space.check()


def use_up_spare(space: BlockSpace) -> None:
    """Take all blocks that are empty or spare, and give them back empty."""
    pool = only_pool(space)
    records = pool.arrays.records
    is_cached = (records[:, QUEUE] == FREE) & (records[:, NAME] > 0) & (records[:, KEPT] != SPARE)
    taken = pool.acquire(pool.num_free - int(is_cached.sum()))
    assert taken is not None
    pool.release(taken)


def test_spare_blocks_are_handed_out_before_cached_ones() -> None:
    """Twenty of thirty usable blocks are spare or empty: a prompt that takes as many evicts nothing."""
    space = hybrid(num_blocks=31)
    first = tokens(41)
    cache(space, first)
    assert (len(found(space, first, 0)), found(space, first)) == (10, [8, 9])
    cache(space, tokens(32, first=500))
    assert (len(found(space, first, 0)), found(space, first)) == (10, [8, 9])
    assert hit(space, joined(first, tokens(1))) == 40
    space.check()


def test_where_prompts_branch_a_window_is_kept_from_the_second_one_on() -> None:
    space = hybrid()
    shared = tokens(48)
    prompts = [joined(shared, tokens(20, first=1000 * number)) for number in range(1, 5)]
    hits = []
    for prompt in prompts:
        use_up_spare(space)
        answer = space.match(prompt)
        hits.append((answer.num_tokens, answer.junction))
        cache(space, prompt)
    assert hits == [(0, 0), (0, 48), (48, 48), (48, 48)]
    assert found(space, shared) == [10, 11]
    space.check()


def test_a_place_is_no_junction_where_nothing_goes_on_otherwise() -> None:
    space = hybrid()
    turn = tokens(48)
    cache(space, turn)
    assert space.match(joined(turn, tokens(9, first=500))).junction == 0, "the prompt continues where the other ended"
    assert space.match(turn[:30]).junction == 0, "the prompt ends within what is known"
    assert space.match(joined(turn[:30], tokens(9, first=500))).junction == 28


def test_the_end_of_a_turn_moves_on_with_the_next_turn() -> None:
    space = hybrid()
    sequence = tokens(200)
    for end in (60, 120, 180):
        row = allocate(space, sequence[: end - 20])
        run_step(space)
        space.append(row, sequence[end - 20 : end])
        run_step(space)
        space.free(row)
        assert found(space, sequence) == list(blocks_before(end))
    assert hit(space, sequence) == 180
    space.check()


def blocks_before(length: int) -> range:
    """Two blocks before the boundary."""
    last = length // BLOCK_SIZE
    return range(last - 2, last)


@pytest.mark.parametrize("length", range(57, 66))
def test_a_sequence_ends_at_the_last_boundary_wherever_it_stops(length: int) -> None:
    """Token by token: what the next token does not read any more may still lie before the boundary."""
    space = hybrid()
    sequence = tokens(length)
    row = prefill(space, sequence[:50])
    for token in sequence[50:]:
        space.append(row, [int(token)])
        run_step(space)
    space.free(row)
    assert found(space, sequence) == list(blocks_before(length))
    assert hit(space, joined(sequence, tokens(1, first=500))) == length // BLOCK_SIZE * BLOCK_SIZE
    space.check()


def test_an_end_that_is_a_junction_too_stays_when_a_turn_goes_on_there() -> None:
    space = hybrid()
    sequence = tokens(100)
    cache(space, sequence[:40])
    cache(space, sequence[:80])
    cache(space, joined(sequence[:40], tokens(20, first=500)))  # not hit there any more: but known, and noted
    assert hit(space, joined(sequence[:40], tokens(20, first=900))) == 40
    cache(space, joined(sequence[:40], tokens(20, first=900)))
    cache(space, sequence)
    assert hit(space, joined(sequence[:40], tokens(20, first=1300))) == 40
    space.check()


def test_nothing_is_shed_while_another_row_holds_it() -> None:
    space = hybrid()
    prompt = tokens(40)
    row = allocate(space, prompt)
    other = allocate(space, joined(prompt, tokens(3, first=500)))
    run_step(space)
    assert hit(space, joined(prompt, tokens(9, first=900))) == 40
    space.append(row, tokens(30, first=600))
    run_step(space)
    assert set(blocks_before(40)) <= set(found(space, prompt))
    space.free(other)
    space.free(row)
    assert hit(space, joined(prompt, tokens(9, first=900))) == 40
    space.check()


def test_nothing_is_shed_while_a_ticket_holds_it() -> None:
    space = hybrid()
    sequence = tokens(60)
    row = prefill(space, sequence[:20])
    (pool,) = {group.pool.name for group in space._state.groups}
    block = int(space.block_ids(row, 1)[4])
    ticket = space.hold([block], pool=pool)
    space.append(row, sequence[20:])
    run_step(space)
    assert 4 in found(space, sequence)
    space.release(ticket)
    space.free(row)
    assert found(space, sequence) == [13, 14]
    space.check()


def test_a_duplicate_leaves_its_reason_to_the_block_that_carries_the_name() -> None:
    """The second prompt computes what the first has published in the same step, and ends where the first continues."""
    space = hybrid(FULL, WINDOW)
    prompt = tokens(64)
    first = allocate(space, prompt[:20])
    second = allocate(space, joined(tokens(1, first=900), prompt))
    run_step(space)
    space.free([first, second])
    row = allocate(space, prompt[:41])
    plan = space.plan_step()
    twin = allocate(space, joined(prompt[:41]))
    later = space.plan_step()
    space.append(row, prompt[41:])
    last = space.plan_step()
    space.free(twin)
    acknowledge(space, plan, later, last)
    assert set(blocks_before(40)) <= set(found(space, prompt))
    space.free(row)
    assert hit(space, prompt[:41]) == 40
    space.check()


def first_chunk(space: BlockSpace, prompt: Prompt, length: int) -> int:
    """Compute the first tokens of a prompt; return its row."""
    allocation = space.allocate(prompt[:length], match=space.match(prompt))
    assert isinstance(allocation, Allocation)
    run_step(space)
    return allocation.row


def test_a_sequence_that_is_preempted_finds_its_window_again() -> None:
    space = hybrid()
    prompt = tokens(80)
    row = first_chunk(space, prompt, 32)
    space.append(row, prompt[32:64])
    space.free(row)  # what was to be computed next never was
    assert found(space, prompt) == list(blocks_before(32))
    assert hit(space, prompt) == 32
    space.check()


def test_the_end_of_a_prompt_that_comes_in_chunks_is_that_of_the_prompt_that_was_matched() -> None:
    space = hybrid()
    prompt = tokens(61)
    row = first_chunk(space, prompt, 20)
    for start in (20, 40):
        space.append(row, prompt[start : start + 20])
        run_step(space)
    space.append(row, tokens(41, first=500))
    run_step(space)
    assert found(space, prompt) == list(blocks_before(60))
    space.check()


def test_a_swapped_out_sequence_leaves_the_window_before_its_end_alone() -> None:
    space = hybrid()
    prompt = tokens(42)
    row = allocate(space, prompt)
    space.plan_step()
    space.swap_out([row])
    assert found(space, prompt) == list(blocks_before(40))
    space.check()


def test_chunks_keep_what_a_hit_in_the_middle_of_one_reads() -> None:
    space = hybrid(FULL, ChunkedLocal(chunk_size=16, block_size=BLOCK_SIZE))
    prompt = tokens(61)
    cache(space, prompt)
    assert found(space, prompt) == [12, 13, 14]
    assert hit(space, joined(prompt[:60], tokens(1, first=500))) == 60
    assert hit(space, joined(prompt[:54], tokens(9, first=500))) == 52, "of a chunk, all before is there"
    space.check()


def test_sinks_are_kept_with_any_window() -> None:
    space = hybrid(FULL, SlidingWindow(window=8, block_size=BLOCK_SIZE, num_sink_tokens=5))
    prompt = tokens(61)
    cache(space, prompt)
    assert found(space, prompt) == [0, 1, 13, 14]
    assert hit(space, joined(prompt[:60], tokens(1, first=500))) == 60
    space.check()


@pytest.mark.parametrize(
    "groups", [(FULL, WINDOW), (WINDOW,)], ids=["switched off", "branches of prompts are not seen"]
)
def test_windows_keep_everything_where_nothing_is_shed(groups: tuple[GroupSpec, ...]) -> None:
    space = hybrid(*groups, shed_windows=len(groups) == 1)
    prompt = tokens(60)
    cache(space, prompt)
    assert found(space, prompt, len(groups) - 1) == list(range(15))
    assert hit(space, joined(prompt[:41], tokens(8, first=500))) == 40
    space.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 30), st.booleans()), max_size=12))
def test_what_is_cached_of_a_window_is_what_ends_and_junctions_need(
    turns: list[tuple[int, int, int, bool]],
) -> None:
    """Compare with a model that has all prompts served, in a pool that never evicts.

    A prompt hits at most what it has in common with an earlier one; it can be sent again; and where it branched off,
    the next one that branches there hits.
    """
    space = hybrid(num_blocks=2000)
    served: list[Prompt] = []
    for origin, cut, more, answers in turns:
        base = served[origin % len(served)][:cut] if served else tokens(0)
        prompt = joined(base, tokens(more + 1, first=1000 * (len(served) + 1)))
        known = max((common(prompt[:-1], other) for other in served), default=0) // BLOCK_SIZE * BLOCK_SIZE
        answer = space.match(prompt)
        assert answer.num_tokens <= known
        assert answer.junction in {0, known}
        row = prefill(space, prompt)
        if answers:
            space.append(row, tokens(10, first=1000 * (len(served) + 1) + 500))
            run_step(space)
        space.free(row)
        assert hit(space, prompt) == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE, (
            "a prompt can be sent again while there is room"
        )
        if answer.junction:
            branch = joined(prompt[: answer.junction], tokens(5, first=777_000))
            assert hit(space, branch) == answer.junction, "from the second time on"
        served.append(prompt)
        use_up_spare(space)
        space.check()


def common(left: Prompt, right: Prompt) -> int:
    """Length of the common prefix."""
    most = min(len(left), len(right))
    differs = np.flatnonzero(left[:most] != right[:most])
    return int(differs[0]) if len(differs) else most


@pytest.mark.parametrize("length", [159, 160, 161])
def test_a_prompt_of_whole_blocks_sent_again_stays_hit_as_long_as_any_other(length: int) -> None:
    assert strangers_survived(length, 0) == 7


def strangers_survived(length: int, num_decoded: int) -> int:
    """Count the strangers that come and go before a prompt that is sent again loses its whole hit."""
    for num_strangers in range(12):
        space = new_space(FullAttention(16), SlidingWindow(32, 16), num_blocks=61, max_tokens=256)
        row = prefill(space, tokens(length))
        for token in range(num_decoded):
            space.append(row, [token])
            run_step(space)
        space.free(row)
        for number in range(num_strangers):
            space.free(prefill(space, tokens(70, first=1_000 * (number + 1))))
        if hit(space, tokens(length)) == 0:
            return num_strangers - 1
    raise AssertionError("strangers do not push it out")


def test_a_prompt_of_whole_blocks_gives_both_its_ends_up_where_a_longer_one_goes_on() -> None:
    space = hybrid()
    prompt = tokens(40)
    space.free(prefill(space, prompt))
    assert found(space, prompt) == [7, 8, 9]
    space.free(prefill(space, prompt))
    assert found(space, prompt) == [7, 8, 9], "sent again, it ends where it ended"
    longer = joined(prompt, tokens(20, first=500))
    space.free(prefill(space, longer))
    assert found(space, longer) == [12, 13, 14]
    space.check()


def test_a_prompt_of_whole_blocks_has_one_end_when_its_answer_has_another() -> None:
    space = hybrid()
    sequence = tokens(52)
    row = prefill(space, sequence[:40])
    space.append(row, sequence[40:])
    run_step(space)
    space.free(row)
    assert found(space, sequence) == [11, 12]


INTERVAL = 16


def at_intervals(*groups: GroupSpec, num_blocks: int = 200) -> BlockSpace:
    """Build a space that keeps what hits at multiples of 16 tokens need: a full group and a window by default."""
    return new_space(*(groups or (FULL, WINDOW)), num_blocks=num_blocks, retention_interval=INTERVAL)


def test_at_an_interval_the_first_prompt_that_leaves_a_sequence_hits() -> None:
    space = at_intervals()
    sequence = tokens(59)
    cache(space, sequence)
    use_up_spare(space)
    assert found(space, sequence) == [2, 3, 6, 7, 10, 11, 12, 13], "before 16, 32 and 48, and before the end"
    assert hit(space, joined(sequence[:50], tokens(10, first=500))) == 48, "where no prompt has branched yet"
    assert hit(space, joined(sequence[:47], tokens(10, first=500))) == 32
    space.check()


@pytest.mark.parametrize("chunk", [1, 7, 16, 62])
def test_intervals_are_kept_however_a_sequence_grows(chunk: int) -> None:
    space = at_intervals()
    sequence = tokens(62)
    row = prefill(space, sequence[:chunk])
    for start in range(chunk, len(sequence), chunk):
        space.append(row, sequence[start : start + chunk])
        run_step(space)
    space.free(row)
    assert set(found(space, sequence)) >= {2, 3, 6, 7, 10, 11, 13, 14}
    use_up_spare(space)
    assert [hit(space, joined(sequence[:length], tokens(9, first=500))) for length in (16, 33, 55)] == [16, 32, 48]
    space.check()


def test_retained_windows_survive_what_is_served_after_them() -> None:
    """Of 112 blocks 48 are retained, and a sequence takes all others: those that were shed are among them."""
    space = at_intervals(num_blocks=113)
    first = tokens(128)
    cache(space, first)
    cache(space, tokens(128, first=1000))
    assert hit(space, joined(first[:100], tokens(9, first=5000))) == 96
    space.check()


def test_an_interval_stays_when_the_end_that_was_there_too_moves_on() -> None:
    space = at_intervals()
    sequence = tokens(80)
    cache(space, sequence[:33])
    cache(space, sequence)
    use_up_spare(space)
    assert hit(space, joined(sequence[:32], tokens(9, first=500))) == 32
    space.check()


def test_states_and_chunks_are_retained_at_intervals() -> None:
    groups = FULL, RecurrentState(8, pool="device"), ChunkedLocal(chunk_size=32, block_size=BLOCK_SIZE)
    space = at_intervals(*groups)
    sequence = tokens(60)
    cache(space, sequence)
    use_up_spare(space)
    assert found(space, sequence, 1) == [1, 3, 5, 6], "the states at 16, 32 and 48, and at the end, 56"
    assert hit(space, joined(sequence[:50], tokens(10, first=500))) == 48
    assert hit(space, joined(sequence[:31], tokens(10, first=500))) == 16
    space.check()


def test_of_bounded_states_those_at_intervals_go_before_those_at_ends() -> None:
    """Bits of the reasons are ranks: an interval is worth less than an end, and an end that is at one more."""
    space = at_intervals(FULL, RecurrentState(8, pool="device", max_checkpoints=2))
    first, second = tokens(28), tokens(60, first=500)
    cache(space, first)
    assert found(space, first, 1) == [1, 2], "the state at 16, and the end"
    cache(space, second)
    assert found(space, first, 1) == [2]
    assert found(space, second, 1) == [6]
    space.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 50)), max_size=8))
def test_what_is_common_with_any_sequence_hits_at_intervals(turns: list[tuple[int, int, int]]) -> None:
    """Compare with all sequences that were served, in a pool whose spare blocks are taken before each prompt."""
    space = at_intervals(FULL, WINDOW, num_blocks=2000)
    served: list[Prompt] = []
    for origin, cut, more in turns:
        base = served[origin % len(served)][:cut] if served else tokens(0)
        prompt = joined(base, tokens(more + 1, first=1000 * (len(served) + 1)))
        longest = max((common(prompt[:-1], other) for other in served), default=0)
        use_up_spare(space)
        assert longest // INTERVAL * INTERVAL <= hit(space, prompt) <= longest
        cache(space, prompt)
        space.check()
        served.append(prompt)


@pytest.mark.parametrize(("interval", "groups"), [(6, (FULL, WINDOW)), (24, (FULL, SlidingWindow(8, 16)))])
def test_an_interval_is_a_multiple_of_all_block_sizes(interval: int, groups: tuple[GroupSpec, ...]) -> None:
    with pytest.raises(ConfigurationError, match=f"retention_interval = {interval} is no multiple of"):
        new_space(*groups, retention_interval=interval)
