"""Tiers below a cache, against a model that is a few lists: the device by LRU, below it a host tier that stores all."""

from dataclasses import replace
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.capacity.curve import CurveTier, TierCurve, _keys_of, _paths, _Replay, measure_tiers
from pagedkv.planner.capacity.pool_hits import hits_by_request
from pagedkv.planner.capacity.references import BlockReferences
from pagedkv.tiers import Loaded, StoreCore
from tests.capacity.prompts import Prompt, prompts, references_of

pytestmark = pytest.mark.plain_only

NBYTES: Final = 100


class ListedCache:
    """At most ``size`` blocks, the least recently used first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: list[int] = []

    def leading(self, prompt: Prompt, start: int = 0) -> int:
        """Count the blocks from ``start`` on that are here, up to the first that is not."""
        count = 0
        while start + count < len(prompt) and prompt[start + count] in self.blocks:
            count += 1
        return count

    def use(self, prompt: Prompt) -> None:
        """Hold a whole prompt, evicting others; then release it tail first."""
        self.blocks = [block for block in self.blocks if block not in prompt]
        del self.blocks[: max(0, len(self.blocks) + len(prompt) - self.size)]
        self.blocks += reversed(prompt)

    def offer(self, prompt: Prompt) -> int:
        """Store what is not here, head first, while anything else can be evicted; return how much was stored."""
        known = [block for block in prompt if block in self.blocks]
        self.blocks = [block for block in self.blocks if block not in known] + known[::-1]
        stored: list[int] = []
        for block in [block for block in prompt if block not in known]:
            if len(self.blocks) + len(stored) == self.size:
                if not self.blocks:
                    break
                del self.blocks[0]
            stored.append(block)
        self.blocks += reversed(stored)
        return len(stored)


def modelled(trace: list[Prompt], capacity: int, sizes: list[int]) -> tuple[int, list[int], list[int]]:
    """Return hits of the device, hits of each tier, and blocks that each has stored."""
    device, tiers = ListedCache(capacity), [ListedCache(size) for size in sizes]
    hits, tier_hits, stored = 0, [0] * len(sizes), [0] * len(sizes)
    for whole in trace:
        prompt = whole[:capacity]
        position = device.leading(prompt)
        hits += position
        while position < len(prompt):
            tier = next((number for number, each in enumerate(tiers) if prompt[position] in each.blocks), None)
            if tier is None:
                break
            count = tiers[tier].leading(prompt, position)
            tier_hits[tier] += count
            position += count
        device.use(prompt)
        for number, each in enumerate(tiers):
            stored[number] += each.offer(prompt)
    return hits, tier_hits, stored


def measured(references: BlockReferences, capacities: list[int], tiers: list[CurveTier]) -> TierCurve:
    device = {"lru": {capacity: hits_by_request(references, capacity) for capacity in capacities}}
    return measure_tiers(references, device, tiers, NBYTES)


@settings(deadline=None, max_examples=200)
@given(prompts(), st.sets(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 15), st.integers(0, 15))
def test_hits_are_those_of_lists(trace: list[Prompt], capacities: set[int], host: int, disk: int) -> None:
    sizes = [("host", host), ("disk", disk)][: 1 + bool(disk)]
    tiers = [CurveTier(medium, size * NBYTES) for medium, size in sizes]
    curve = measured(references_of(trace), sorted(capacities), tiers)
    for capacity in capacities:
        hits, tier_hits, stored = modelled(trace, capacity, [size for _, size in sizes])
        assert curve.device_hits["lru"][capacity] == hits
        assert list(curve.tier_hits["lru"][capacity]) == tier_hits
        assert list(curve.num_written[capacity]) == stored
        assert curve.num_hits("lru", capacity) == hits + sum(tier_hits)


class LoadingReplay(_Replay):
    """As the replay, and each prompt loads what it hits, as an engine does."""

    num_loaded = 0

    def serve(self, place: int, path: Int32Array, num_prompt_blocks: int) -> None:
        """Load what the first tier has behind the hit of the device, then go on."""
        start = int(self.device_hits[0][place])
        keys = _keys_of(path[start:num_prompt_blocks])
        store = self.stores[0]
        count = store.look_up(keys)
        if count:
            store.load(keys[:count], 0.0, 1.0)
            while actions := store.take_actions():
                for action in actions:
                    store.completed(action.action, 0.0)
            (answer,) = store.take_answers()
            assert isinstance(answer, Loaded)
            self.num_loaded += answer.num_entries
        super().serve(place, path, num_prompt_blocks)


@settings(deadline=None, max_examples=100)
@given(prompts(), st.integers(1, 12), st.integers(1, 15), st.sampled_from(["always", "second-offer"]))
def test_loads_change_nothing_that_a_store_holds(trace: list[Prompt], capacity: int, host: int, admission: str) -> None:
    references = references_of(trace)
    device = hits_by_request(references, capacity)
    tier = CurveTier("host", host * NBYTES, admission)  # type: ignore[arg-type]
    plain, loading = (kind([tier], NBYTES, [device]) for kind in (_Replay, LoadingReplay))
    for replay in (plain, loading):
        for place, path in enumerate(_paths(references, capacity)):
            replay.serve(place, path, min(int(references.num_prompt_blocks[place]), len(path)))
    assert plain.hits.tolist() == loading.hits.tolist()
    assert plain.num_written == loading.num_written
    assert loading.num_loaded == loading.hits.sum()  # type: ignore[attr-defined]


def test_a_tier_that_holds_all_serves_what_an_unbounded_cache_would() -> None:
    trace = [[1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 6], [4, 5]]
    references = references_of(trace)
    curve = measured(references, [1, 2, 3, 6], [CurveTier("disk", 100 * NBYTES)])
    assert [curve.num_hits("lru", capacity) for capacity in (3, 6)] == [int(references.ideal_hits().sum())] * 2
    assert curve.num_written[6] == (6,)
    assert curve.as_dict()["hits"]["lru"]["6"] == {"device": 7, "disk": 0}  # type: ignore[index]


def test_second_offer_writes_what_comes_twice() -> None:
    trace = [[1, 2], [3], [1, 4], [1, 2], [3]]
    tier = CurveTier("host", 100 * NBYTES)
    always, second = (
        measured(references_of(trace), [1], [each]) for each in (tier, replace(tier, admission="second-offer"))
    )
    assert (always.num_written[1], second.num_written[1]) == ((2,), (2,))
    wide = measured(references_of(trace), [2], [replace(tier, admission="second-offer")])
    assert wide.num_written[2] == (3,)


@pytest.mark.long
def test_the_model_notices_a_store_that_evicts_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreCore, "select_for_offer", lambda self, keys, _: ~self.contains(keys))  # no use is noted
    with pytest.raises(AssertionError):
        test_hits_are_those_of_lists()


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([], "at least one"),
        ([CurveTier("host", 1), CurveTier("host", 2)], "one tier of a medium at most"),
    ],
)
def test_what_is_no_curve_is_refused(tiers: list[CurveTier], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        measured(references_of([[1]]), [1], tiers)
    with pytest.raises(ConfigurationError, match="medium"):
        CurveTier("tape", 1)
    with pytest.raises(ConfigurationError, match="the size of a disk tier"):
        CurveTier("disk", 0)
    with pytest.raises(ConfigurationError, match="admission"):
        CurveTier("disk", 1, "never")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="bytes of a block"):
        measure_tiers(references_of([[1]]), {"lru": {1: np.zeros(1, np.int32)}}, [CurveTier("host", 1)], 0)
