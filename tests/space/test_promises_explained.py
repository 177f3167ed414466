"""Promise 26: why a request missed, recorded when it was admitted; and what cannot be explained."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import (
    Allocation,
    BlockSpace,
    Explanation,
    FullAttention,
    GroupSpec,
    MediaSpan,
    MissCause,
    RequestKeys,
    SlidingWindow,
)
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import (
    ConfigurationError,
    FreedSequenceError,
    SequenceError,
    TokenError,
    UnknownSequenceError,
)
from pagedkv.space import explaining
from tests.space.explaining import HYBRID, OURS, PROMPT, changed, explained, new
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    new_space,
    prefill,
    run_step,
    tokens,
    unchanged,
)

pytestmark = pytest.mark.interpreted


# Recorded


def recorded(space: BlockSpace, prompt: npt.ArrayLike = PROMPT, keys: RequestKeys = NO_KEYS) -> Explanation:
    """Admit a prompt, and read its explanation; it is what ``explain`` would have answered before.

    But that of what is there only the latest continuation was looked at.
    """
    before = explained(space, prompt, keys)
    row = allocate(space, prompt, keys)  # type: ignore[arg-type]
    with unchanged(space):
        answer = space.explanation(row)
    if answer.cause is before.cause is MissCause.CHANGED_TOKENS:
        assert answer.position <= before.position
    else:
        assert answer == replace(before, misses=())
    run_step(space)
    with unchanged(space):
        assert space.explanation(row) == answer
    generation = space.generation(row)
    space.free(row)
    with unchanged(space):
        assert space.explanation(row, generation) == answer
    return answer


@pytest.mark.parametrize("groups", [(FullAttention(4),), HYBRID, (SlidingWindow(8, 4),)], ids=str)
def test_why_a_request_missed_is_recorded_when_it_is_admitted(groups: tuple[GroupSpec, ...]) -> None:
    space = new_space(*groups, explain=True, ghosts_per_block=16, num_blocks=14 * len(groups))
    causes = [recorded(space).cause for _ in range(2)]
    causes.append(recorded(space, tokens(30, first=100)).cause)
    causes.append(recorded(space).cause)
    assert causes == [MissCause.NEVER_STORED, MissCause.NOT_FULL, MissCause.NEVER_STORED, causes[-1]]
    space.reset_prefix_cache()
    assert recorded(space).cause is MissCause.RESET


@pytest.mark.parametrize(
    "keys", [OURS, RequestKeys(media=(MediaSpan(5, 9, b"x"),)), RequestKeys(lora_name="a")], ids=str
)
def test_extra_keys_are_recorded_too(keys: RequestKeys) -> None:
    space = new()
    recorded(space)
    assert recorded(space, PROMPT, keys).cause in {
        MissCause.OTHER_SALT,
        MissCause.OTHER_MEDIA,
        MissCause.OTHER_ADAPTER,
    }
    assert recorded(space, PROMPT, keys).cause is MissCause.NOT_FULL
    assert recorded(space, changed(PROMPT, 17), keys).cause is MissCause.NOT_FULL
    space.set_weights_epoch("b")
    assert recorded(space, PROMPT, keys).cause is MissCause.OTHER_EPOCH


def test_changed_tokens_are_recorded_as_the_latest_continuation_has_them() -> None:
    space = new()
    recorded(space)
    assert recorded(space, changed(PROMPT, 9)).token_id == 9
    assert explained(space, changed(PROMPT, 10)).position == 10
    assert recorded(space, changed(PROMPT, 10)).position == 9


def test_a_prompt_in_chunks_is_explained_whole() -> None:
    space = new()
    match = space.match(tokens(40))
    allocation = space.allocate(tokens(6), match=match)
    assert isinstance(allocation, Allocation)
    assert space.explanation(allocation.row) == replace(explained(new(), tokens(40)), misses=())


def test_what_its_own_blocks_evict_is_not_held_against_it() -> None:
    space = new(num_blocks=8)
    cache(space, changed(PROMPT, 9))
    before = space.explain(tokens(28))
    row = allocate(space, tokens(28))
    assert space.explanation(row) == replace(before, misses=())
    assert before.cause is MissCause.CHANGED_TOKENS


def test_a_row_that_is_swapped_out_or_lost_keeps_its_explanation() -> None:
    space = new_space(explain=True, num_host_blocks=20)
    first, second = prefill(space, PROMPT), prefill(space, tokens(20, first=100))
    space.swap_out(second)
    answers = [space.explanation(row) for row in (first, second)]
    run_step(space)
    space.invalidate_memory()
    assert [space.explanation(row) for row in (first, second)] == answers


# Bad input


def test_a_fork_has_asked_for_nothing() -> None:
    space = new()
    row = prefill(space, PROMPT)
    (child,) = space.fork(row).tolist()
    with unchanged(space), pytest.raises(SequenceError, match="fork"):
        space.explanation(child)


def test_a_request_that_is_forgotten_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "LEAST_PAST", 5)
    space = new_space(explain=True, max_sequences=2, max_tokens=8, num_blocks=10)
    row = allocate(space, tokens(3))
    first = space.generation(row)
    run_step(space)
    space.free(row)
    for number in range(6):
        assert space.explanation(row, first).num_tokens == 3, number
        assert allocate(space, tokens(2)) == row
        run_step(space)
        space.free(row)
    with unchanged(space), pytest.raises(SequenceError, match=f"generation {first} of row {row}"):
        space.explanation(row, first)


@pytest.mark.parametrize(
    ("row", "generation", "error"),
    [
        (0, None, FreedSequenceError),
        (99, None, UnknownSequenceError),
        (99, 1, SequenceError),
        (0, 0, SequenceError),
        (0, -1, SequenceError),
        (0, 55, SequenceError),
    ],
)
def test_explanations_that_there_are_not_are_errors(
    row: int, generation: int | None, error: type[SequenceError]
) -> None:
    space = new()
    cache(space, PROMPT)
    with unchanged(space), pytest.raises(error):
        space.explanation(row, generation)


def test_prompts_that_cannot_be_are_refused_as_by_match() -> None:
    space = new()
    for prompt in ([], [2**31], np.zeros((2, 2), np.int32)):
        with unchanged(space), pytest.raises(TokenError):
            space.explain(prompt)
    with pytest.raises(ConfigurationError):
        space.explain([1], max_hit_tokens=-1)


def test_an_explanation_reads_as_a_sentence() -> None:
    space = new()
    cache(space, PROMPT)
    sentence = "8 of 20 tokens hit; changed tokens at 9 in group 0, where 9 is cached"
    assert str(space.explain(changed(PROMPT, 9))) == sentence


def test_a_computation_that_may_be_shared_hits_and_is_not_explained_away() -> None:
    space = new()
    allocate(space, PROMPT)
    assert explained(space).cause is MissCause.NOT_FULL
    plan = space.plan_step()
    assert explained(space).cause is MissCause.NOT_FULL
    acknowledge(space, plan)
