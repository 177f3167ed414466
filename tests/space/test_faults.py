"""Faults seen in other systems, each with the test that pagedkv does not have it; docs/faults.md lists them."""

import gc

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import (
    AllocStatus,
    BlockSpace,
    FullAttention,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    hash_request_tokens,
)
from pagedkv.blocks.record import NEXT, PREVIOUS
from pagedkv.errors import FreedSequenceError
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    held,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
    unchanged,
)


@pytest.mark.interpreted
def test_fault_01_twins_prefilled_together_free_nothing_that_a_row_points_at() -> None:
    """mini-sglang: of two identical prompts prefilled together the duplicates were freed while a row ran on them."""
    space = new_space()
    first, second = allocate(space, tokens(10)), allocate(space, tokens(10))
    run_step(space)
    space.free([first])
    for token in range(6):
        space.append([second], [token])
        run_step(space)
        strangers = [allocate(space, tokens(3, first=100 * token + 100))]
        assert not set(space.block_ids(second)) & {block for row in strangers for block in space.block_ids(row)}
        space.check()


def test_fault_01_duplicates_of_prompts_that_could_not_share_are_dropped_safely() -> None:
    """The same where sharing within the step is impossible (a recurrent state): both compute, one block stays."""
    space = new_space(FullAttention(4), RecurrentState(4), num_blocks={"device": 101, "state": 21})
    rows = [allocate(space, tokens(10)), allocate(space, tokens(10))]
    assert not set(held(space, rows[0])) & set(held(space, rows[1]))
    run_step(space)
    assert space.block_ids(rows[0])[:2] == space.block_ids(rows[1])[:2]
    space.free(rows[:1])
    space.check()
    assert len(held(space, rows[1])) == 3


@pytest.mark.interpreted
def test_fault_02_freeing_twice_is_an_error_at_once() -> None:
    """vLLM: a second free was silent, the reference count became -1, and the engine died later."""
    space = new_space()
    row = prefill(space, tokens(10))
    space.free([row])
    with unchanged(space), pytest.raises(FreedSequenceError, match=f"row {row} serves no sequence: it was freed"):
        space.free([row])


def num_relinked(space: BlockSpace, before: npt.NDArray[np.int32]) -> int:
    """How many blocks' links in the free queue differ from before."""
    links = only_pool(space).arrays.records[:, [NEXT, PREVIOUS]]
    return int((links != before[:, [NEXT, PREVIOUS]]).any(axis=1).sum())


@pytest.mark.interpreted
def test_fault_03_a_hit_and_a_free_touch_no_other_free_block() -> None:
    """nano-vllm: a hit searched a deque for each freed block. SGLang: each free copied the whole free list."""
    space = new_space(num_blocks=2001)
    for first in (1000, 0, 2000):  # cached, and so in the middle of the queue
        cache(space, tokens(80, first=first))
    before = only_pool(space).arrays.records.copy()
    row = allocate(space, tokens(80))
    assert num_relinked(space, before) <= 20 + 4
    run_step(space)
    before = only_pool(space).arrays.records.copy()
    space.free([row])
    assert num_relinked(space, before) <= 20 + 4


@pytest.mark.interpreted
def test_fault_04_a_forged_digest_hands_out_nothing() -> None:
    """HF continuous batching: matching trusts a 64-bit hash. vLLM, LMCache: Python's salted ``hash()`` as a key.

    More of it in tests/space/test_matching.py; digests in processes with other hash seeds in
    tests/blocks/test_digests.py.
    """
    victim, forger = tokens(9), tokens(9, first=100)
    space = new_space()
    digests = np.frombuffer(b"".join(hash_request_tokens(victim, 4)), np.uint8).reshape(2, 32)
    space.allocate(forger, digests=digests)
    run_step(space)
    assert hit(space, victim) == 0
    assert space.match(victim, digests=digests).num_tokens == 0


@pytest.mark.parametrize(
    ("owner", "other"),
    [
        (RequestKeys(lora_name="acme"), RequestKeys(salt=b"acme")),
        (RequestKeys("sql", "/adapters/sql-1"), RequestKeys("sql", "/adapters/sql-2")),
    ],
    ids=["a salt equal to a LoRA's name", "a LoRA re-pointed to another path"],
)
def test_fault_05_other_keys_share_nothing(owner: RequestKeys, other: RequestKeys) -> None:
    """vLLM: a salt equal to a LoRA's name shared its blocks, and so did a LoRA re-pointed to another path."""
    space = new_space()
    cache(space, tokens(13), owner)
    assert hit(space, tokens(13), other) == 0
    assert hit(space, tokens(13), owner) == 12


def test_fault_05_what_other_tiers_see_of_a_block_contains_the_salt() -> None:
    """SGLang: an external tier ignored the tenant's salt. Here the only name it could use depends on it."""
    space = new_space(events=True)
    cache(space, tokens(9), RequestKeys(salt=b"ours"))
    (events,) = space.drain_events()
    stored = {digest.tobytes() for digest in events.digests}
    assert stored == set(hash_request_tokens(tokens(9), 4, RequestKeys(salt=b"ours")))
    assert not stored & set(hash_request_tokens(tokens(9), 4, RequestKeys(salt=b"theirs")))


@pytest.mark.interpreted
def test_fault_06_blocks_that_a_step_still_writes_are_given_to_nobody() -> None:
    """SGLang, TensorRT-LLM: blocks were freed while an asynchronous step still wrote them."""
    space = new_space(num_blocks=4)
    row = allocate(space, tokens(8))
    written = set(space.block_ids(row))
    plan = space.plan_step()
    space.free([row])
    assert isinstance(space.allocate(tokens(8, first=100)), Shortage)
    assert not written & set(space.block_ids(allocate(space, tokens(4, first=100))))
    acknowledge(space, plan)
    assert set(space.block_ids(allocate(space, tokens(8, first=200)))) == written


@pytest.mark.parametrize("planned", [False, True], ids=["before the plan", "in flight"])
def test_fault_06_no_transfer_lands_in_a_block_of_somebody_else(planned: bool) -> None:  # noqa: FBT001
    """SGLang, TensorRT-LLM: here a sequence is freed while it is being swapped in."""
    space = new_space(num_blocks=4, num_host_blocks=4)
    row = prefill(space, tokens(8))
    space.swap_out([row])
    run_step(space)
    space.swap_in([row])
    landing = set(space.block_ids(row))
    plans = [space.plan_step()] if planned else []
    space.free([row])
    assert not landing & set(space.block_ids(allocate(space, tokens(4, first=100))))
    acknowledge(space, *(plans or [space.plan_step()]))
    assert landing == set(space.block_ids(allocate(space, tokens(8, first=200))))


@pytest.mark.interpreted
def test_fault_07_a_hit_is_not_counted_as_a_free_block_too() -> None:
    """vLLM: a hit on a free block passed the capacity check, and the block was allocated a second time."""
    space = new_space(num_blocks=5)
    cache(space, tokens(8))
    assert space.can_allocate(tokens(17)) is AllocStatus.NEVER
    assert space.can_allocate(tokens(16)) is AllocStatus.OK
    row = allocate(space, tokens(4, first=100))
    with unchanged(space):
        assert space.can_allocate(tokens(16)) is AllocStatus.LATER
        assert space.allocate(tokens(16)) == Shortage("device", num_needed=4, num_free=3)
    space.free([row])
    assert len(set(space.block_ids(allocate(space, tokens(16))))) == 4


@pytest.mark.interpreted
def test_fault_07_a_shortage_in_the_second_group_gives_nothing_away() -> None:
    """vLLM: what the first group had taken, hits included, leaked when the second found no blocks."""
    space = new_space(FullAttention(4), RecurrentState(4), num_blocks={"device": 101, "state": 5})
    cache(space, tokens(9))
    row = prefill(space, tokens(4, first=100))
    with unchanged(space):
        shortage = space.allocate(tokens(22))
    assert shortage == Shortage("state", num_needed=5, num_free=3)
    space.free([row])
    assert {pool.name: pool.num_in_use for pool in space.statistics().pools} == {"device": 0, "state": 0}


@pytest.mark.interpreted
def test_fault_11_a_window_model_hits_though_its_head_is_gone() -> None:
    """vLLM: window models hit 0 % without a word."""
    space = new_space(SlidingWindow(16, 4), num_blocks=13)
    for turn in range(1, 8):
        prompt = tokens(32 * turn)
        if turn > 1:
            assert hit(space, prompt) == 32 * (turn - 1)
        row = allocate(space, prompt[: 32 * (turn - 1) + 1])
        for start in range(32 * (turn - 1) + 1, 32 * turn):
            space.append([row], prompt[start : start + 1])
            run_step(space)
        space.free([row])


def test_fault_11_a_hybrid_models_cache_works_when_the_pool_is_full() -> None:
    """vLLM: a cache that collapsed at 25 % occupancy. Here 11 prompts fill the pool, and every one still hits."""
    space = new_space(FullAttention(4), SlidingWindow(8, 4), num_blocks=100)
    for prompt in range(11):
        cache(space, tokens(16, first=100 * prompt))
    (pool,) = space.statistics().pools
    assert (pool.num_cached, pool.num_evictions) == (88, 0)
    assert [hit(space, tokens(17, first=100 * prompt)) for prompt in range(11)] == [16] * 11


def test_fault_11_a_short_prompt_takes_one_block_of_each_group() -> None:
    """vLLM: blocks blown up to 7,808 tokens, to equal a state's size, gave 12 tokens a third of the pool."""
    groups = FullAttention(16), SlidingWindow(1024, 16), RecurrentState(4096)
    space = new_space(*groups, num_blocks={"device": 101, "state": 9})
    allocate(space, tokens(12))
    assert {pool.name: pool.num_in_use for pool in space.statistics().pools} == {"device": 2, "state": 1}


@pytest.mark.interpreted
def test_fault_12_new_weights_find_nothing_of_the_old() -> None:
    """vLLM, NeMo-RL: weights were updated in place, and keys and values of the old ones still served."""
    space = new_space(weights_epoch="1")
    running = prefill(space, tokens(9, first=100))
    cache(space, tokens(9))
    space.set_weights_epoch("2")
    assert hit(space, tokens(9)) == 0
    space.append([running], tokens(8, first=109), [8])
    run_step(space)
    assert hit(space, tokens(18, first=100)) == 0
    cache(space, tokens(9))
    assert hit(space, tokens(9)) == 8


@pytest.mark.interpreted
def test_fault_13_allocating_does_not_evict_its_own_hits() -> None:
    """TensorRT-LLM: eviction re-entered a commit under way. Here the hits are the next in line for eviction."""
    space = new_space(num_blocks=6)
    cache(space, tokens(8))
    cache(space, tokens(12, first=100))
    row = allocate(space, tokens(20))
    assert len(set(space.block_ids(row))) == 5
    run_step(space)
    assert hit(space, tokens(21)) == 20
    space.check()


def test_fault_13_publishing_survives_the_eviction_of_the_block_before() -> None:
    """The append that completes a block takes the block of its predecessor, which the window has given up."""
    space = new_space(SlidingWindow(1, 4), num_blocks=3)
    row = prefill(space, tokens(4))
    for token in range(4, 40):
        assert space.append([row], [token]) is None
        run_step(space)
        space.check()
    assert hit(space, tokens(41)) == 40


@pytest.mark.interpreted
@pytest.mark.parametrize("planned", [False, True], ids=["before the plan", "in flight"])
def test_fault_13_freeing_what_is_being_loaded_leaks_nothing(planned: bool) -> None:  # noqa: FBT001
    """vLLM: a request that was aborted while its blocks were being loaded never gave them back."""
    space = new_space(num_blocks=5, num_host_blocks=5)
    row = prefill(space, tokens(12))
    space.swap_out([row])
    run_step(space)
    space.swap_in([row])
    plans = [space.plan_step()] if planned else []
    space.free([row])
    acknowledge(space, *plans, space.plan_step())
    statistics = space.statistics()
    assert [pool.num_free for pool in (*statistics.pools, *statistics.host_pools)] == [4, 4]
    space.check()


def test_fault_13_a_load_that_failed_leaks_nothing() -> None:
    """vLLM: the same where the step itself is aborted: the sequence is lost, and gives everything back."""
    space = new_space(num_blocks=5, num_host_blocks=5)
    row = prefill(space, tokens(12))
    space.swap_out([row])
    run_step(space)
    cache(space, tokens(12, first=500))  # evicts all but the first block
    space.swap_in([row])
    aborted = space.abort(space.plan_step().step_id)
    assert aborted.lost_rows == (row,)
    space.free([row])
    statistics = space.statistics()
    assert [pool.num_free for pool in (*statistics.pools, *statistics.host_pools)] == [4, 4]
    assert hit(space, tokens(12)) == 4  # the first block, which had never left; not what was to be loaded


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_fault_14_there_is_no_python_object_a_block() -> None:
    """vLLM: millions of small objects made garbage collection pause for 50 to 200 ms."""
    before = num_objects()
    space = new_space(num_blocks=100_001, max_sequences=10_000, max_tokens=64)
    rows = [space.allocate(tokens(40, first=40 * number)) for number in range(10_000)]
    del rows
    assert space.statistics().pools[0].num_in_use == 100_000
    assert num_objects() - before < 1000
