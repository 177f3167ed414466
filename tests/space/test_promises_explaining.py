"""Promise 26: where a hit ended and why; each cause is made to happen here."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    BlockSpace,
    ChunkedLocal,
    Explanation,
    FullAttention,
    GroupSpec,
    Load,
    MediaSpan,
    MissCause,
    RecurrentState,
    RequestKeys,
    SlidingWindow,
    SpaceConfig,
    hash_request_tokens,
)
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.record import EVICTED
from pagedkv.errors import ConfigurationError
from tests.space.explaining import HYBRID, OURS, PROMPT, THEIRS, causes, changed, explained, new
from tests.space.spaces import (
    allocate,
    cache,
    held,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
)

pytestmark = pytest.mark.interpreted


# The prompt itself


@pytest.mark.parametrize(("length", "num_hit"), [(3, 0), (4, 0), (5, 4), (19, 16), (20, 16), (21, 20)])
def test_what_fills_no_block_before_the_last_token_does_not_hit(length: int, num_hit: int) -> None:
    space = new()
    cache(space, tokens(40))
    answer = explained(space, tokens(length))
    assert answer == Explanation(length, num_hit, MissCause.NOT_FULL, num_hit, misses=answer.misses)
    assert causes(answer) == [(MissCause.NOT_FULL, length - num_hit)]


def test_a_hit_that_the_caller_bounds_ends_there() -> None:
    space = new()
    cache(space, PROMPT)
    answer = explained(space, max_hit_tokens=9)
    assert (answer.cause, answer.position) == (MissCause.BOUNDED, 8)
    assert causes(answer) == [(MissCause.BOUNDED, 8), (MissCause.NOT_FULL, 4)]


def test_without_prefix_caching_nothing_hits() -> None:
    space = new_space(prefix_caching=False)
    assert causes(explained(space)) == [(MissCause.NOT_CACHING, 20)]


# Not there yet


def test_a_state_that_the_open_step_computes_is_nobody_elses() -> None:
    space = new(FullAttention(4), RecurrentState(8, pool="device"))
    allocate(space, PROMPT)
    answer = explained(space)
    assert (answer.num_hit_tokens, answer.cause) == (0, MissCause.BEING_COMPUTED)
    run_step(space)
    assert explained(space).cause is MissCause.NOT_FULL


def test_what_is_being_loaded_is_told() -> None:
    space = new()
    load = space.load(PROMPT, 12)
    assert isinstance(load, Load)
    assert causes(explained(space)) == [(MissCause.LOADING, 16), (MissCause.NOT_FULL, 4)]
    space.finish_load(load)
    assert causes(explained(space)) == [(MissCause.NEVER_STORED, 4), (MissCause.NOT_FULL, 4)]


# It was there


def test_what_was_evicted_is_told_with_its_age() -> None:
    """The tail goes first; nine blocks are handed out, the first four of them empty, and then three evicted."""
    space = new(num_blocks=10)
    cache(space, PROMPT)
    cache(space, tokens(28, first=100))
    answer = explained(space)
    assert answer.num_hit_tokens == 8
    assert replace(answer, misses=()) == Explanation(20, 8, MissCause.EVICTED, 8, group=0, age=1)
    assert causes(answer) == [(MissCause.EVICTED, 8), (MissCause.NOT_FULL, 4)]


def test_tokens_beyond_what_was_evicted_were_never_there() -> None:
    space = new(num_blocks=10)
    cache(space, PROMPT)
    cache(space, tokens(28, first=100))
    longer = np.concatenate([PROMPT, tokens(10, first=500)])
    assert causes(explained(space, longer)) == [
        (MissCause.EVICTED, 12),
        (MissCause.NEVER_STORED, 8),
        (MissCause.NOT_FULL, 2),
    ]


def test_content_that_comes_back_and_goes_again_is_remembered_once() -> None:
    space = new(num_blocks=8)
    for _ in range(3):
        cache(space, PROMPT)
        cache(space, tokens(24, first=100))
    assert explained(space).cause is MissCause.EVICTED
    cache(space, PROMPT)
    assert explained(space).cause is MissCause.NOT_FULL


def test_what_was_superseded_is_told_apart() -> None:
    space = new(num_blocks=10)
    row = prefill(space, PROMPT)
    other = prefill(space, tokens(4, first=300))
    space.free(row, superseded_by=other)
    cache(space, tokens(28, first=100))
    assert explained(space).cause is MissCause.SUPERSEDED


@pytest.mark.parametrize(
    ("group", "cause"),
    [
        (SlidingWindow(8, 4), MissCause.WINDOW_GONE),
        (ChunkedLocal(64, 4), MissCause.WINDOW_GONE),
        (RecurrentState(4, pool="device"), MissCause.STATE_GONE),
    ],
    ids=str,
)
def test_what_a_window_or_a_state_has_dropped_is_told_by_group(group: GroupSpec, cause: MissCause) -> None:
    """The full group has all of the prompt, the other one lost what it needs in the middle."""
    space = new(FullAttention(4), group)
    cache(space, tokens(41))
    for index in range(len(space.match(tokens(41)).block_ids[1])):
        digest = hash_request_tokens(tokens(41), 4)[index]
        found = only_pool(space).prefix_index.find(1, digest)
        if found is not None:
            drop_name(only_pool(space).arrays, found)
    answer = explained(space, tokens(41))
    assert (answer.num_hit_tokens, answer.cause, answer.group) == (0, cause, 1)
    assert causes(answer) == [(cause, 40), (MissCause.NOT_FULL, 1)]


def test_a_window_that_was_shed_is_gone() -> None:
    """A prompt that leaves in the middle of what a window has passed finds the beginning, and not the window."""
    space = new(*HYBRID, num_blocks=74)
    cache(space, tokens(81))
    cache(space, tokens(100, first=500))
    prompt = np.concatenate([tokens(40), tokens(20, first=900)])
    answer = explained(space, prompt)
    assert (answer.cause, answer.group) == (MissCause.WINDOW_GONE, 1)
    assert causes(answer) == [
        (MissCause.WINDOW_GONE, 40 - answer.num_hit_tokens),
        (MissCause.CHANGED_TOKENS, 16),
        (MissCause.NOT_FULL, 4),
    ]


def test_what_an_eviction_out_of_order_has_cut_off_is_an_orphan() -> None:
    space = new()
    row = prefill(space, PROMPT)
    second = space.block_ids(row)[1]
    space.free(row)
    drop_name(only_pool(space).arrays, second, EVICTED)
    answer = explained(space)
    assert (answer.cause, answer.position) == (MissCause.EVICTED, 4)
    assert causes(answer)[0] == (MissCause.EVICTED, 12), "what is cached behind the gap does not hit because of it"
    cache(space, tokens(9))
    answer = explained(space)
    assert (answer.num_hit_tokens, answer.cause, answer.position) == (8, MissCause.ORPHANED, 8)
    cache(space, PROMPT)
    assert explained(space).cause is MissCause.NOT_FULL


def test_what_a_row_wrote_over_was_overwritten() -> None:
    space = new()
    row = prefill(space, PROMPT)
    space.truncate([row], [10])
    answer = explained(space)
    assert (answer.cause, answer.position) == (MissCause.OVERWRITTEN, 8)


def test_what_nobody_computed_was_called_off() -> None:
    space = new()
    row = allocate(space, PROMPT)
    space.free(row)
    assert explained(space).cause is MissCause.CALLED_OFF
    allocate(space, PROMPT)
    space.abort(space.plan_step().step_id)
    assert explained(space, PROMPT).cause in {MissCause.CALLED_OFF, MissCause.NOT_FULL}


def test_what_a_failed_step_was_to_compute_was_called_off() -> None:
    space = new()
    row = allocate(space, PROMPT)
    plan = space.plan_step()
    space.free(row)
    space.abort(plan.step_id)
    assert explained(space).cause is MissCause.CALLED_OFF


def test_what_was_withdrawn_is_told() -> None:
    space = new()
    row = prefill(space, PROMPT)
    space.withdraw(space.block_ids(row)[2:3])
    answer = explained(space)
    assert (answer.cause, answer.position) == (MissCause.WITHDRAWN, 8)
    assert causes(answer) == [(MissCause.WITHDRAWN, 8), (MissCause.NOT_FULL, 4)]


@pytest.mark.parametrize(
    ("lose", "cause"),
    [
        (lambda space: space.reset_prefix_cache(), MissCause.RESET),
        (lambda space: space.invalidate_memory(), MissCause.INVALIDATED),
        (lambda space: space.set_weights_epoch("next"), MissCause.OTHER_EPOCH),
    ],
)
def test_who_dropped_the_whole_cache_is_told(lose: Callable[[BlockSpace], object], cause: MissCause) -> None:
    space = new()
    cache(space, PROMPT)
    lose(space)
    answer = explained(space)
    assert (answer.cause, answer.position, answer.age) == (cause, 0, 0)
    assert explained(space, tokens(20, first=50)).cause is MissCause.NEVER_STORED


def test_epochs_before_the_last_are_known_too() -> None:
    space = new_space(explain=True, weights_epoch="first")
    cache(space, PROMPT, OURS)
    for epoch in ("second", "third"):
        space.set_weights_epoch(epoch)
        cache(space, tokens(20, first=200))
    assert explained(space, PROMPT, OURS).cause is MissCause.OTHER_EPOCH
    assert explained(space, PROMPT, THEIRS).cause is MissCause.NEVER_STORED


# Something else is there


@pytest.mark.parametrize(
    ("stored", "asked", "cause"),
    [
        (OURS, THEIRS, MissCause.OTHER_SALT),
        (OURS, RequestKeys(), MissCause.OTHER_SALT),
        (RequestKeys(), OURS, MissCause.OTHER_SALT),
        (RequestKeys(), RequestKeys(lora_name="a"), MissCause.OTHER_ADAPTER),
        (RequestKeys(lora_name="a"), RequestKeys(lora_name="a", lora_version="2"), MissCause.OTHER_ADAPTER),
        (RequestKeys(lora_name="a", salt=b"a"), RequestKeys(lora_name="a", salt=b"b"), MissCause.OTHER_SALT),
        (RequestKeys(lora_name="a", salt=b"a"), RequestKeys(lora_name="b", salt=b"b"), MissCause.OTHER_ADAPTER),
    ],
    ids=str,
)
def test_content_under_other_keys_is_told(stored: RequestKeys, asked: RequestKeys, cause: MissCause) -> None:
    space = new()
    cache(space, PROMPT, stored)
    answer = explained(space, PROMPT, asked)
    assert (answer.num_hit_tokens, answer.cause, answer.position, answer.group) == (0, cause, 0, 0)
    assert causes(answer) == [(cause, 16), (MissCause.NOT_FULL, 4)]


def test_another_image_in_the_same_place_is_told() -> None:
    space = new()
    image, other = (RequestKeys(media=(MediaSpan(9, 3, digest),)) for digest in (b"cat", b"dog"))
    cache(space, PROMPT, image)
    answer = explained(space, PROMPT, other)
    assert (answer.num_hit_tokens, answer.cause, answer.position) == (8, MissCause.OTHER_MEDIA, 8)
    assert explained(space, PROMPT).cause is MissCause.OTHER_MEDIA


@pytest.mark.parametrize("position", [1, 3, 4, 9, 12, 15])
def test_a_changed_token_is_told_with_what_stood_there(position: int) -> None:
    space = new()
    cache(space, PROMPT)
    answer = explained(space, changed(PROMPT, position))
    start = position // 4 * 4
    expected = Explanation(20, start, MissCause.CHANGED_TOKENS, position, group=0, token_id=position)
    assert replace(answer, misses=()) == expected
    assert causes(answer) == [(MissCause.CHANGED_TOKENS, 16 - start), (MissCause.NOT_FULL, 4)]


def test_the_closest_of_several_continuations_is_told() -> None:
    space = new()
    for position in (8, 11, 9):
        cache(space, changed(PROMPT, position))
    answer = explained(space, PROMPT)
    assert (answer.position, answer.token_id) == (11, 1011)


def test_a_prompt_that_begins_otherwise_was_never_there() -> None:
    space = new()
    cache(space, PROMPT)
    assert explained(space, changed(PROMPT, 0)).cause is MissCause.NEVER_STORED


def test_what_another_tenant_asked_is_not_told() -> None:
    space = new()
    cache(space, PROMPT, THEIRS)
    answer = explained(space, changed(PROMPT, 2), OURS)
    assert (answer.cause, answer.token_id) == (MissCause.NEVER_STORED, None)


def test_what_is_gone_is_told_before_what_stands_there() -> None:
    space = new()
    row = prefill(space, changed(PROMPT, 9))
    second = prefill(space, PROMPT)
    drop_name(only_pool(space).arrays, held(space, second)[2], EVICTED)
    assert explained(space).cause is MissCause.EVICTED
    assert row != second


def test_digests_that_are_not_the_prompts_are_told() -> None:
    """The walk finds the latest continuation alone; another one is looked up by its digest."""
    space = new()
    for position in (20, 9):
        cache(space, changed(tokens(21), position))
    wrong = np.zeros((5, 32), np.uint8)
    answer = space.explain(tokens(21), digests=wrong)
    assert (answer.num_hit_tokens, answer.cause) == (8, MissCause.OTHER_DIGEST)
    assert explained(space, tokens(21)).cause is MissCause.NOT_FULL


def test_content_that_was_stored_under_a_wrong_digest_is_told() -> None:
    space = new()
    forged = np.zeros((5, 32), np.uint8)
    forged[:, 0] = range(5)
    allocation = space.allocate(PROMPT, digests=forged)
    assert isinstance(allocation, Allocation)
    run_step(space)
    cache(space, changed(PROMPT, 2))
    assert explained(space).cause is MissCause.OTHER_DIGEST


# Nothing is known of it


def test_what_nobody_has_asked_was_never_stored() -> None:
    answer = explained(new())
    assert replace(answer, misses=()) == Explanation(20, 0, MissCause.NEVER_STORED, 0, group=0)
    assert causes(answer) == [(MissCause.NEVER_STORED, 16), (MissCause.NOT_FULL, 4)]


def test_content_that_was_not_to_be_published_was_never_stored() -> None:
    space = new()
    allocation = space.allocate(PROMPT, publish=False)
    assert isinstance(allocation, Allocation)
    run_step(space)
    space.free(allocation.row)
    assert explained(space).cause is MissCause.NEVER_STORED


def test_what_is_forgotten_is_unknown_and_so_is_what_may_have_been() -> None:
    space = new_space(explain=True, ghosts_per_block=1, num_blocks=6)
    prompts = [tokens(20, first=100 * number) for number in range(20)]
    for prompt in prompts:
        cache(space, prompt)
    assert explained(space, prompts[0]).cause is MissCause.UNKNOWN
    assert explained(space, tokens(20, first=5000)).cause is MissCause.UNKNOWN
    assert explained(space, prompts[-2]).cause is MissCause.EVICTED


def test_without_the_switch_what_is_gone_is_unknown_and_what_is_cached_is_told() -> None:
    space = new_space()
    cache(space, PROMPT)
    assert explained(space, changed(PROMPT, 9)).token_id == 9
    assert explained(space, PROMPT, OURS).cause is MissCause.OTHER_SALT
    space.reset_prefix_cache()
    assert explained(space).cause is MissCause.UNKNOWN
    with pytest.raises(ConfigurationError, match="explain=True"):
        space.explanation(allocate(space, PROMPT))


def test_without_the_switch_no_memory_is_taken() -> None:
    assert only_pool(new_space()).arrays.ghosts.nbytes == 0
    for per_block in (1, 4, 16):
        space = new_space(explain=True, ghosts_per_block=per_block, num_blocks=10_000)
        nbytes = only_pool(space).arrays.ghosts.nbytes
        assert 12.8 * per_block <= nbytes / 10_000 <= 13 * per_block


# Several groups


def test_the_group_that_ends_the_hit_is_named() -> None:
    space = new_space(
        FullAttention(4, pool="a"),
        FullAttention(8, pool="b"),
        num_blocks={"a": 100, "b": 5},
        explain=True,
    )
    cache(space, tokens(30))
    cache(space, tokens(30, first=100))
    answer = explained(space, tokens(30))
    assert (answer.num_hit_tokens, answer.cause, answer.group) == (0, MissCause.EVICTED, 1)


def test_windows_alone_are_explained_too() -> None:
    space = new(SlidingWindow(8, 4), num_blocks=12)
    cache(space, tokens(30))
    assert explained(space, tokens(30)).cause is MissCause.NOT_FULL
    cache(space, tokens(40, first=100))
    answer = explained(space, tokens(30))
    assert answer.cause is MissCause.EVICTED
    assert answer.group == 0


def test_states_kept_inside_intervals_are_explained_too() -> None:
    groups, num_blocks = (FullAttention(4), RecurrentState(16)), {"device": 31, "state": 8}
    space = new_space(*groups, num_blocks=num_blocks, explain=True)
    allocation = space.allocate(tokens(20), match=space.match(tokens(22)))
    assert isinstance(allocation, Allocation)
    run_step(space)
    space.free(allocation.row)
    assert hit(space, tokens(22)) == 20
    answer = explained(space, tokens(40))
    assert answer.num_hit_tokens == 20
    assert answer.cause in {MissCause.NEVER_STORED, MissCause.CHANGED_TOKENS}


def test_content_that_new_weights_dropped_has_their_cause_when_the_old_ones_are_back() -> None:
    """Its digest is that of the epoch that is back, so only the recorded cause says why it is gone."""
    space = BlockSpace(SpaceConfig((FullAttention(4),), num_blocks=20, explain=True, weights_epoch="a"))
    prompt = list(range(13))
    space.free(prefill(space, prompt))
    space.reset_prefix_cache()
    assert space.explain(prompt).cause is MissCause.RESET
    space.free(prefill(space, prompt))
    for epoch in ("b", "a"):
        space.set_weights_epoch(epoch)
    assert space.explain(prompt).cause is MissCause.OTHER_EPOCH
