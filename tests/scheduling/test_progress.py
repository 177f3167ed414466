"""The scheduler never thrashes: some sequence always advances, none starves, and the running ones soon stay."""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import ceil, log2

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.scheduling import Batch, PreemptionKind, Request, SchedulingConfig
from tests.scheduling.engine import Engine


@dataclass
class Observer:
    """Steps an engine and watches what the rule promises."""

    engine: Engine
    first_promise: int
    num_preemptions: Counter[Request] = field(default_factory=Counter)
    returned: dict[Request, tuple[int, int]] = field(default_factory=dict)  # tokens known then, and promised
    num_idle: int = 0
    num_tokens: int = 0
    num_changes: int = 0

    def step(self) -> Batch:
        """Run one step, and hold what happened against the rule."""
        before = list(self.engine.scheduler.running)
        known = {each.request: each.request.num_known for each in self.engine.served}
        batch = self.engine.step()
        for preempted in batch.preempted:
            self._see_preempted(preempted.request, known[preempted.request], before)
        for request in [*(admission.request for admission in batch.admitted), *batch.resumed]:
            if self.num_preemptions[request]:
                promise = self.first_promise * 2 ** (self.num_preemptions[request] - 1)
                self.returned[request] = (known[request], min(known[request] + promise, request.most_tokens))
        num_computed = len(batch.decoded_token_ids) + sum(chunk.stop - chunk.start for chunk in batch.prefilling)
        self.num_tokens += num_computed
        self.num_idle = 0 if num_computed else self.num_idle + 1
        self.num_changes += len(batch.admitted) + len(batch.resumed) + len(batch.preempted)
        assert num_computed or batch.preempted or batch.resumed, "a step in which nothing happens"
        assert self.num_idle <= len(before) + 1, "no sequence advances"
        return batch

    def _see_preempted(self, request: Request, num_known: int, before: list[Request]) -> None:
        self.num_preemptions[request] += 1
        assert request is not before[0], "the first who runs was preempted"
        if request in self.returned:
            known, promised = self.returned.pop(request)
            assert num_known >= promised, f"returned with {known} tokens, was promised {promised}, came to {num_known}"
        longest = max(1.0, request.max_new_tokens / self.first_promise)
        assert self.num_preemptions[request] <= 2 + ceil(log2(longest))


def observer(
    num_blocks: int, first_promise: int, num_host_blocks: int = 0, num_window_blocks: int = 0, **limits: int
) -> Observer:
    """Make an engine over a pool of blocks of 4 tokens, and watch it; with windows of 6 tokens in another pool."""
    limits = {"max_sequences": 8, "max_batched_tokens": 32, "watermark_percent": 0, "block_size": 4, **limits}
    preemption: PreemptionKind = "swap" if num_host_blocks else "recompute"
    windows = {"windows": num_window_blocks} if num_window_blocks else {}
    groups: tuple[GroupSpec, ...] = (FullAttention(limits["block_size"]),)
    config = SpaceConfig(
        groups=groups + tuple(SlidingWindow(6, limits["block_size"], pool=pool) for pool in windows),
        num_blocks={"device": num_blocks} | windows,
        num_host_blocks={"device": num_host_blocks} | dict.fromkeys(windows, num_host_blocks),
        max_sequences=(2 if num_host_blocks else 1) * limits["max_sequences"],
        max_tokens=limits.get("max_tokens", limits["block_size"] * num_blocks),
        watermark=limits["watermark_percent"] / 100,
        prefix_caching=limits["block_size"] == 4,
    )
    scheduling = SchedulingConfig(
        limits["max_sequences"], limits["max_batched_tokens"], preemption, first_promise, limits.get("most_drafts", 0)
    )
    return Observer(Engine(scheduling, config), first_promise)


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_short_pool_never_thrashes(data: st.DataObject) -> None:
    watched = observer(
        data.draw(st.integers(8, 40)),
        data.draw(st.sampled_from([1, 2, 8, 64])),
        num_host_blocks=data.draw(st.sampled_from([0, 0, 8, 60])),
        num_window_blocks=data.draw(st.sampled_from([0, 0, 6, 9, 20])),
        max_sequences=data.draw(st.integers(3, 8)),
        max_batched_tokens=data.draw(st.integers(8, 40)),
        watermark_percent=data.draw(st.sampled_from([0, 1, 20])),
        most_drafts=data.draw(st.sampled_from([0, 2, 5])),
    )
    watched.engine.end_probability = data.draw(st.sampled_from([0.0, 0.0, 0.05]))
    for _ in range(data.draw(st.integers(1, 14))):
        watched.engine.add(
            data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30)),
            data.draw(st.integers(0, 60)),
            num_sequences=data.draw(st.sampled_from([1, 1, 2, 3])),
            is_guessed=data.draw(st.booleans()),
        )
        for _ in range(data.draw(st.integers(0, 6))):
            if not watched.engine.scheduler.is_idle:
                watched.step()
    num_work = sum(each.request.most_tokens * each.request.num_sequences for each in watched.engine.served)
    num_steps = 0
    while not watched.engine.scheduler.is_idle:
        watched.step()
        num_steps += 1
        assert num_steps <= 20 * num_work, "somebody is never served"


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_the_longest_sequence_of_a_table_bounds_nothing_else(data: st.DataObject) -> None:
    """What is promised to all is not what one row may have: the same steps, whatever the room of a row."""
    num_host_blocks = data.draw(st.sampled_from([0, 0, 60]))
    wishes = data.draw(
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40), st.sampled_from([1, 1, 2])), min_size=2, max_size=10)
    )
    first_promise, num_blocks = data.draw(st.sampled_from([1, 8, 64])), data.draw(st.integers(20, 60))
    longest = max(num_tokens + num_new for num_tokens, num_new, _ in wishes)
    served: list[list[tuple[int, int, int, int]]] = []
    for max_tokens in (longest, 1000):
        watched = observer(num_blocks, first_promise, num_host_blocks, max_tokens=max_tokens)
        for number, (num_tokens, num_new, num_sequences) in enumerate(wishes):
            watched.engine.add([number] * num_tokens, num_new, num_sequences=num_sequences)
        served.append([])
        while not watched.engine.scheduler.is_idle:
            batch = watched.step()
            changes = len(batch.admitted), len(batch.resumed), len(batch.preempted)
            served[-1].append((len(batch.decoded_token_ids), *changes))
    assert served[0] == served[1]


@pytest.mark.parametrize("num_host_blocks", [0, 200])
def test_the_preempted_return_beside_one_another(num_host_blocks: int) -> None:
    """Prompts as long as they may be, of which a pool holds six: none runs alone since it was preempted."""
    watched = observer(1 + 6 * 12, 8, num_host_blocks, max_sequences=12, max_batched_tokens=256, max_tokens=48)
    for number in range(24):
        watched.engine.add([number] * 24, 24)
    num_running: list[int] = []
    while len(watched.engine.finished) < 18:
        watched.step()
        num_running.append(len(watched.engine.scheduler.running))
    assert sum(watched.num_preemptions.values()) > 6
    assert sum(num_running) > 4 * len(num_running)


@pytest.mark.interpreted
@pytest.mark.parametrize("num_host_blocks", [0, 60])
@pytest.mark.parametrize("max_batched_tokens", [16, 64])
def test_a_prompt_longer_than_a_pool_of_windows_is_served_in_chunks(
    max_batched_tokens: int, num_host_blocks: int
) -> None:
    """At its arrival, and when it returns after a preemption with the tokens that it has generated."""
    watched = observer(
        40, 8, num_host_blocks, num_window_blocks=8, max_sequences=4, max_batched_tokens=max_batched_tokens
    )
    for number in range(4):
        watched.engine.add([number, *range(45)] if number == 2 else [number, 7], 60)
    while not watched.engine.scheduler.is_idle:
        watched.step()
    assert len(watched.engine.finished) == 4
    assert watched.num_preemptions


def test_who_guesses_right_does_not_take_what_others_were_promised() -> None:
    """Found by a search: were all promised as much, who grows by six tokens a step would be in the way of others."""
    watched = observer(18, 8, most_drafts=5, max_batched_tokens=64)
    watched.engine.guesses_right = True
    wishes = [(4, 60, True), (5, 60, True), (12, 41, True), (9, 18, False), (12, 14, False), (12, 20, True)]
    for number, (num_tokens, num_new, is_guessed) in enumerate(wishes):
        watched.engine.add([number] * num_tokens, num_new, is_guessed=is_guessed)
    while not watched.engine.scheduler.is_idle:
        watched.step()
    assert watched.engine.num_drafted > 0


@pytest.mark.parametrize("num_spare_blocks", [5, 40, 150, 1800])
@pytest.mark.parametrize("num_host_blocks", [0, 20_000])
def test_a_fifth_prompt_waits_while_four_fill_the_pool(num_spare_blocks: int, num_host_blocks: int) -> None:
    """Five prompts of 100,000 tokens in a pool for four and a bit are served at the pace of four, whatever the bit."""
    num_new, num_prompt_tokens = 400, 100_000
    watched = observer(
        1 + 4 * num_prompt_tokens // 16 + num_spare_blocks,
        64,
        num_host_blocks,
        block_size=16,
        max_batched_tokens=8192,
    )
    watched.engine.space.check = lambda: None  # type: ignore[method-assign] # a question of 25,000 blocks each time
    for number in range(5):
        watched.engine.add([number] * num_prompt_tokens, num_new)
    num_steps = 0
    while not watched.engine.scheduler.is_idle:
        watched.step()
        num_steps += 1
    num_prefill_steps = ceil(5 * num_prompt_tokens / 8192)
    assert num_steps <= num_prefill_steps + 2 * num_new + 3 * ceil(num_prompt_tokens / 8192)
    assert watched.num_changes <= 5 + 2 * 4
    assert len(watched.engine.finished) == 5


@pytest.mark.parametrize("num_host_blocks", [0, 400])
def test_who_runs_does_not_oscillate_under_a_stationary_load(num_host_blocks: int) -> None:
    """As one is done, another comes: samples that outgrow the pool again and again, seldom let in for nothing."""
    watched = observer(101, 64, num_host_blocks, max_sequences=16, max_batched_tokens=64)
    num_requests = 24
    for _ in range(12):
        watched.engine.add([len(watched.engine.served)] * 8, 64, num_sequences=2)
    while not watched.engine.scheduler.is_idle:
        watched.step()
        while len(watched.engine.served) < min(num_requests, len(watched.engine.finished) + 12):
            watched.engine.add([len(watched.engine.served)] * 8, 64, num_sequences=2)
    assert len(watched.engine.finished) == num_requests
    assert max(watched.num_preemptions.values()) <= 2
    assert watched.num_tokens <= 2 * num_requests * (8 + 2 * 63)


@st.composite
def tight_configurations(draw: st.DrawFn) -> tuple[SchedulingConfig, SpaceConfig]:
    """Draw groups of all kinds, in one pool or in pools of their own, in which windows hardly fit."""
    block_size, has_own_pools = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    groups: list[GroupSpec] = []
    num_blocks: Counter[str] = Counter()
    for kind in draw(st.lists(st.sampled_from(["full", "window", "chunk", "state"]), min_size=1, max_size=3)):
        pool = f"{kind} {len(groups)}" if has_own_pools or kind == "state" else "device"
        is_cached = draw(st.sampled_from([True, True, True, False]))
        group: GroupSpec
        match kind:
            case "full":
                group = FullAttention(block_size, pool, prefix_caching=is_cached)
            case "window":
                sinks = draw(st.sampled_from([0, 0, block_size]))
                group = SlidingWindow(draw(st.integers(1, 8)), block_size, sinks, pool=pool, prefix_caching=is_cached)
            case "chunk":
                size = block_size * draw(st.integers(1, 4))
                group = ChunkedLocal(size, block_size, pool=pool, prefix_caching=is_cached)
            case _:
                interval = block_size * draw(st.sampled_from([1, 2, 4]))
                group = RecurrentState(interval, pool=pool, prefix_caching=is_cached)
        groups.append(group)
        num_blocks[pool] += draw(st.integers(20, 60) if kind == "full" else st.integers(3, 14))
    num_host_blocks = draw(st.sampled_from([0, 0, 10]))
    space = SpaceConfig(
        tuple(groups),
        num_blocks=dict(num_blocks),
        num_host_blocks=dict.fromkeys(num_blocks, num_host_blocks),
        max_sequences=12,
        max_tokens=40,
        watermark=draw(st.sampled_from([0.0, 0.1, 0.2])),
        prefix_caching=any(group.prefix_caching for group in groups),
    )
    preemption: PreemptionKind = "swap" if num_host_blocks else "recompute"
    scheduling = SchedulingConfig(draw(st.integers(3, 6)), draw(st.integers(6, 16)), preemption, 4)
    keeps_states = any(isinstance(group, RecurrentState) for group in groups)
    most_drafts = 0 if keeps_states else draw(st.sampled_from([0, 3]))
    return replace(scheduling, most_drafts=most_drafts, overlap=draw(st.booleans())), space


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_request_that_is_served_alone_is_served_whatever_came_before(data: st.DataObject) -> None:
    """Whatever is cached: each step does something, every request ends, and none is rejected for it alone."""
    scheduling, space = data.draw(tight_configurations())
    engine = Engine(scheduling, space)
    trunk = [number % 3 for number in range(20)]
    num_in_flight = 1 if scheduling.overlap else data.draw(st.integers(1, 2))
    wishes = []
    for _ in range(data.draw(st.integers(1, 7))):
        prompt = trunk[: data.draw(st.integers(0, 20))] + data.draw(st.lists(st.integers(7, 9), min_size=1, max_size=9))
        wishes.append((prompt, data.draw(st.integers(0, 10)), data.draw(st.sampled_from([1, 1, 1, 2]))))
        is_guessed, priority = data.draw(st.booleans()), data.draw(st.integers(0, 1))
        engine.add(prompt, wishes[-1][1], num_sequences=wishes[-1][2], is_guessed=is_guessed, priority=priority)
        for _ in range(data.draw(st.sampled_from([0, 1, 3, 30]))):
            if not engine.scheduler.is_idle:
                engine.schedule()
                if len(engine.in_flight) == num_in_flight:
                    engine.finish()
    while engine.in_flight:
        engine.finish()
    while not engine.scheduler.is_idle:
        batch = engine.step()
        has_moved = batch.preempted or batch.resumed or batch.rejected
        assert batch.plan.compute.num_tokens or has_moved, "a step in which nothing happens"
    for request in engine.rejected:
        prompt, num_new, num_sequences = wishes[request.number]
        alone = Engine(scheduling, space)
        alone.add(prompt, num_new, num_sequences=num_sequences)
        alone.run()
        assert alone.rejected, "rejected, though it is served by an empty space"


@pytest.mark.interpreted
@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_a_hit_that_an_idle_pool_of_windows_has_no_room_for_leads_on(num_in_flight: int) -> None:
    """With the hit a chunk of 8 takes more windows than there are, and nothing runs that could give any back."""
    groups = FullAttention(1, "full"), SlidingWindow(4, 1, pool="windows")
    space = SpaceConfig(groups, num_blocks={"full": 60, "windows": 10}, max_sequences=4, max_tokens=40, watermark=0.0)
    engine = Engine(SchedulingConfig(4, 8), space)
    engine.add([0, 1, 2, 3, 99], 1)
    engine.run()
    engine.add([*range(13)], 3)
    chunks = []
    while not engine.scheduler.is_idle:
        batch = engine.schedule()
        chunks += [(chunk.start, chunk.stop) for chunk in batch.prefilling]
        assert batch.plan.step_id < 50, "nothing leads on"
        if len(engine.in_flight) == num_in_flight:
            engine.finish()
    assert chunks == [(1, 9), (9, 13)]  # after the whole hit there is room for chunks of 4 only, which take 3 steps


@pytest.mark.interpreted
def test_a_hit_is_given_up_where_only_a_shorter_one_leaves_room() -> None:
    """A window outside prefix caching holds the whole hit in the first chunk."""
    groups = FullAttention(1, "full"), SlidingWindow(4, 1, pool="windows", prefix_caching=False)
    space = SpaceConfig(groups, num_blocks={"full": 60, "windows": 10}, max_sequences=4, max_tokens=40, watermark=0.0)
    engine = Engine(SchedulingConfig(4, 8), space)
    engine.add([*range(20)], 1)
    engine.run()
    engine.add([*range(20), 7], 1)
    engine.run()
    assert not engine.rejected
    assert len(engine.finished) == 2


@pytest.mark.interpreted
def test_a_prompt_that_does_not_fit_token_by_token_is_rejected_with_the_numbers() -> None:
    groups = FullAttention(1, "full"), SlidingWindow(8, 1, pool="windows")
    space = SpaceConfig(groups, num_blocks={"full": 60, "windows": 6}, max_sequences=4, max_tokens=40, watermark=0.0)
    engine = Engine(SchedulingConfig(4, 8), space)
    large, answering = engine.add([*range(13)], 3), engine.add([1, 2, 3], 9)
    engine.run()
    assert engine.rejected == [large, answering]
    told = "its 13 tokens take more blocks than it may have, even one by one: 59 of pool 'full', 5 of pool 'windows'"
    assert large.rejection == told
    assert answering.rejection == "it ran out of blocks alone: pool 'windows' has 0 free blocks, 1 are needed"


@pytest.mark.interpreted
def test_accepted_drafts_leave_a_block_for_the_next_token() -> None:
    """Windows slide behind accepted drafts one step later; until then a request alone must not be short of blocks."""
    groups = FullAttention(1, "full"), ChunkedLocal(2, 1, pool="chunks")
    space = SpaceConfig(groups, num_blocks={"full": 60, "chunks": 4}, max_sequences=4, max_tokens=40, watermark=0.0)
    engine = Engine(SchedulingConfig(4, 14, most_drafts=2), space)
    engine.guesses_right = True
    for length in range(2, 6):
        engine.add([*range(length)], 15, is_guessed=True)
    engine.run()
    assert len(engine.finished) == 4


@pytest.mark.interpreted
def test_a_swapped_out_request_that_can_never_go_on_is_computed_again_and_rejected_with_the_numbers() -> None:
    """Its three samples share a state until they go on, and there are two states."""
    groups = FullAttention(4), RecurrentState(4, pool="state", prefix_caching=False)
    config = SpaceConfig(
        groups, {"device": 40, "state": 3}, {"device": 20, "state": 20}, max_sequences=12, max_tokens=40
    )
    engine = Engine(SchedulingConfig(6, 16, "swap"), config)
    first, samples = engine.add([1, 2, 3], 6), engine.add([4, 5, 6], 6, num_sequences=3)
    engine.step()
    assert engine.step().preempted[0].kind == "swap"
    engine.run(100)
    assert (engine.finished, engine.rejected) == ([first], [samples])
    assert samples.rejection == "it ran out of blocks alone: pool 'state' has 1 free blocks, 2 are needed"
