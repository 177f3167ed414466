"""Promise 25: hits are told group by group, before the groups agree."""

import pytest

from pagedkv import BlockSpace, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, RequestKeys, SlidingWindow
from pagedkv.contract.keys import NO_KEYS
from tests.space.replay_model import evict_windows
from tests.space.spaces import allocate, cache, hit, named, new_space, run_step, tokens
from tests.space.test_promises_states import serve

pytestmark = pytest.mark.interpreted

MIXES: tuple[tuple[GroupSpec, ...], ...] = (
    (FullAttention(4),),
    (FullAttention(4), SlidingWindow(8, 2, pool="windows")),
    (SlidingWindow(5, 2, num_sink_tokens=3, pool="windows"), ChunkedLocal(8, 4), FullAttention(2)),
    (FullAttention(4), RecurrentState(8)),
)


def space_of(groups: tuple[GroupSpec, ...], **settings: object) -> BlockSpace:
    pools = dict.fromkeys((group.pool for group in groups), 101)
    return new_space(*groups, num_blocks=pools, **settings)  # type: ignore[arg-type]


def served(space: BlockSpace, group: int, length: int) -> bool:
    """Whether a group has, by its rule and by name, all that a hit of a length needs."""
    spec = space.config.groups[group]
    have, last = set(named(space, tokens(length), group)), length // spec.block_size
    match spec:
        case FullAttention():
            needed = set(range(last))
        case SlidingWindow():
            first = max(0, length - spec.window + 1) // spec.block_size
            sinks = -(-spec.num_sink_tokens // spec.block_size)
            needed = {*range(min(first, last - 1), last), *range(min(sinks, last))}
        case ChunkedLocal():
            needed = set(range(length // spec.chunk_size * spec.chunk_size // spec.block_size, last))
        case RecurrentState():
            needed = {last - 1}
    return needed <= have


@pytest.mark.parametrize("groups", MIXES, ids=str)
@pytest.mark.parametrize("num_evicted", [0, 1, 3, 6, 40])
def test_each_group_tells_the_longest_prefix_that_it_has_by_itself(
    groups: tuple[GroupSpec, ...], num_evicted: int
) -> None:
    space = space_of(groups, shed_windows=False)
    cache(space, tokens(39))
    for pool in {group.pool for group in groups}:
        space.evict(num_evicted, pool=pool)
    expected = [
        max([0, *(end for end in range(spec.block_size, 39, spec.block_size) if served(space, index, end))])
        for index, spec in enumerate(groups)
    ]
    assert list(space.match_each(tokens(39))) == expected
    assert hit(space, tokens(39)) <= min(expected)


def test_what_full_attention_has_is_told_where_windows_are_gone() -> None:
    space = space_of(MIXES[1])
    cache(space, tokens(39))
    evict_windows(space)
    assert hit(space, tokens(39)) == 0
    assert space.match_each(tokens(39)) == (36, 0)


def test_a_state_inside_an_interval_counts() -> None:
    space = space_of(MIXES[3])
    serve(space, tokens(15))
    assert space.match_each(tokens(15)) == (12, 12)
    assert space.match_each(tokens(12)) == (8, 8)


def test_groups_outside_prefix_caching_have_nothing_and_keys_are_told_apart() -> None:
    space = space_of((FullAttention(4), SlidingWindow(8, 4, prefix_caching=False)))
    cache(space, tokens(20), RequestKeys(salt=b"a"))
    assert space.match_each(tokens(20), keys=RequestKeys(salt=b"a")) == (16, 0)
    assert space.match_each(tokens(20), keys=NO_KEYS) == (0, 0)
    plain = space_of((FullAttention(4),), prefix_caching=False)
    allocate(plain, tokens(9))
    run_step(plain)
    assert plain.match_each(tokens(9)) == (0,)
