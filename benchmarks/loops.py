"""Operations that were Python loops over rows, blocks or media: rolling back, media keys, aborting, declaring computed.

Each function builds what it needs, checks that the result is right, and only then times, by the public interface alone,
as in :mod:`benchmarks.operations`. Times are of whole calls, argument checks included.
"""

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import (
    BLOCK_SIZE,
    FULL,
    HYBRID,
    NUM_BLOCKS,
    admit,
    batch_of,
    new_space,
    prompt,
    run_step,
)
from pagedkv import (
    BlockSpace,
    GroupSpec,
    MediaSpan,
    RequestKeys,
    Shortage,
    SpaceConfig,
    StepId,
)

__all__ = ["OPERATIONS"]

NUM_ROWS = 1024
NUM_DRAFTS = 4
MILLION = 1_000_000


def truncate() -> Iterator[Row]:
    """Accept or reject four drafts of each of 1,024 rows."""
    for groups, name in ((FULL, "one group"), (HYBRID, "full + window 1,024")):
        for case, lengths, num_rejected, bar_us in (
            ("accept all, no block completed", [96] * BLOCK_SIZE, 0, 25.0),
            ("accept all, 5 of 16 rows complete a block", [108] * 5 + [96] * 11, 0, 65.0),
            ("reject 2 of 4", list(range(96, 96 + BLOCK_SIZE)), 2, 200.0),
        ):
            timing = _truncate(groups, lengths, num_rejected)
            bar = bar_us if groups is FULL else None
            yield Row(f"truncate {NUM_ROWS:,} rows with {NUM_DRAFTS} drafts, {case}, {name}", timing, "call", bar)


def _truncate(groups: tuple[GroupSpec, ...], lengths: list[int], num_rejected: int) -> Timing:
    """Time accepting or rejecting drafts; between the runs the rows are rolled back to where they began."""
    space = new_space(groups)
    rows = batch_of(space, lengths * (NUM_ROWS // len(lengths)))
    begun = space.lengths(rows)
    accepted = begun + NUM_DRAFTS - num_rejected
    counts = np.full(NUM_ROWS, NUM_DRAFTS, np.int32)
    drafts = iter([prompt(NUM_ROWS * NUM_DRAFTS, seed) for seed in range(32)])
    num_named = []

    def draft() -> None:
        space.truncate(rows, begun)
        shortage = space.append(rows, next(drafts), counts, num_draft=NUM_DRAFTS)
        assert shortage is None
        run_step(space)
        num_named.append(space.statistics().pools[0].num_named)

    timing = timed(lambda: space.truncate(rows, accepted), before=draft, num_runs=21)
    assert space.lengths(rows).tolist() == accepted.tolist()
    num_completed = int((accepted // BLOCK_SIZE - begun // BLOCK_SIZE).sum()) * len(groups)
    assert space.statistics().pools[0].num_named - num_named[-1] == num_completed
    space.check()
    return timing


def media() -> Iterator[Row]:
    """Match and allocate prompts with images: thousands of small ones, and one behind a long text."""
    spans = tuple(MediaSpan(4 * index, 4, b"image %026d" % index) for index in range(4000))
    yield from _match_and_allocate(RequestKeys(media=spans), 16_000, "16k tokens with 4,000 media of 4 tokens", 2000.0)
    spans = tuple(MediaSpan(32 * index + 5, 24, b"image %026d" % index) for index in range(4000))
    yield from _match_and_allocate(RequestKeys(media=spans), 131_072, "128k tokens with 4,000 media of 24 tokens")
    yield from _match_and_allocate(RequestKeys(), 131_072, "128k tokens without media")
    one = RequestKeys(media=(MediaSpan(131_072 - 64, 64, b"image"),))
    yield from _match_and_allocate(one, 131_072, "128k tokens with one image at the end")


def _match_and_allocate(keys: RequestKeys, num_tokens: int, name: str, bar_us: float | None = None) -> Iterator[Row]:
    space = new_space()
    tokens = prompt(num_tokens + 1)
    others = RequestKeys(media=tuple(MediaSpan(span.start, span.num_tokens, b"new") for span in keys.media))
    hits: list[int] = []
    held: list[int] = []

    def prepare() -> None:
        run_step(space)
        if held:
            space.free(held.pop())

    def forget() -> None:
        prepare()
        space.reset_prefix_cache()

    def allocate() -> None:
        allocation = space.allocate(tokens, keys=keys)
        assert not isinstance(allocation, Shortage)
        held.append(allocation.row)
        hits.append(allocation.num_hit_tokens)

    num_runs = 3 if len(keys.media) > 1 else 9  # a commit whose cost is blocks x media takes seconds for each
    yield Row(f"allocate {name}, no hit", timed(allocate, before=forget, num_runs=num_runs), "call", bar_us)
    assert set(hits) == {0}
    hits.clear()
    timing = timed(allocate, before=prepare, num_runs=num_runs)
    assert set(hits) == {num_tokens}
    yield Row(f"allocate {name}, all hit", timing, "call", bar_us)
    timing = timed(lambda: hits.append(space.match(tokens, keys=keys).num_tokens), num_runs=num_runs)
    assert set(hits) == {num_tokens}
    assert (
        not keys.media or space.match(tokens, keys=others).num_tokens == keys.media[0].start // BLOCK_SIZE * BLOCK_SIZE
    )
    yield Row(f"match {name}, all hit", timing, "call", bar_us)
    space.check()


def whole_pool() -> Iterator[Row]:
    """Operations that look at every block, in a pool of a million with half of it cached, events off and on."""
    for events in (False, True):
        name = f"a pool of a million blocks, half of them cached, events {'on' if events else 'off'}"
        yield Row(f"abort a step of {NUM_ROWS:,} rows, {name}", _abort(events=events))
        yield Row(f"reset_prefix_cache, {name}", _reset(events=events))


def _million(*, events: bool) -> BlockSpace:
    """Build a pool of a million blocks, half of them cached."""
    config = SpaceConfig(FULL, num_blocks=MILLION, max_sequences=NUM_ROWS, events=events)
    space = BlockSpace(config)
    _fill(space)
    return space


def _fill(space: BlockSpace) -> None:
    for seed in range(61):
        space.free(admit(space, prompt(131_072, NUM_ROWS + seed)))
    space.drain_events()


def _abort(*, events: bool) -> Timing:
    space = _million(events=events)
    rows = batch_of(space, [97] * NUM_ROWS)
    tokens = prompt(NUM_ROWS)
    planned: list[StepId] = []
    rewound: list[int] = []

    def plan() -> None:
        space.drain_events()
        space.truncate(rows, [97] * NUM_ROWS)
        run_step(space)
        assert space.append(rows, tokens) is None
        planned.append(space.plan_step().step_id)

    timing = timed(lambda: rewound.append(len(space.abort(planned.pop()).rewound_rows)), before=plan, num_runs=5)
    assert set(rewound) == {NUM_ROWS}
    assert space.num_cached_blocks() > MILLION * 0.49
    space.check()
    return timing


def _reset(*, events: bool) -> Timing:
    space = _million(events=events)

    def refill() -> None:
        if space.num_cached_blocks() == 0:
            _fill(space)
        assert space.num_cached_blocks() > MILLION * 0.49

    timing = timed(space.reset_prefix_cache, before=refill, num_runs=3, num_warm_ups=1)
    assert space.statistics().pools[0].num_named == 0
    space.check()
    return timing


def mark_computed() -> Iterator[Row]:
    """Declare the last token of each of 1,024 rows computed: alone, and while a step of other rows is in flight."""
    for length in (97, 1600):
        for num_others in (0, 16):
            timing = _mark_computed(length, num_others)
            beside = f"beside a step of {num_others} other rows in flight" if num_others else "alone"
            yield Row(f"mark_computed of {NUM_ROWS:,} rows of {length:,} tokens, {beside}", timing, "call", 60.0)


def _mark_computed(length: int, num_others: int) -> Timing:
    config = SpaceConfig(FULL, num_blocks=2 * NUM_BLOCKS, max_sequences=2 * NUM_ROWS, max_tokens=2048)
    space = BlockSpace(config)
    rows = batch_of(space, [length] * NUM_ROWS)
    others = np.array([admit(space, prompt(97, NUM_ROWS + seed)) for seed in range(num_others)], np.int32)
    tokens = prompt(NUM_ROWS)
    in_flight: list[StepId] = []

    def grow() -> None:
        if in_flight:
            space.acknowledge(in_flight.pop())
        if num_others:
            space.truncate(others, [97] * num_others)
            assert space.append(others, tokens[:num_others]) is None
            in_flight.append(space.plan_step().step_id)
        space.truncate(rows, [length] * NUM_ROWS)
        assert space.append(rows, tokens) is None

    timing = timed(lambda: space.mark_computed(rows), before=grow, num_runs=9)
    assert len(space.plan_step().compute.rows) == 0
    space.check()
    return timing


OPERATIONS: tuple[Callable[[], Iterator[Row]], ...] = (truncate, media, whole_pool, mark_computed)
