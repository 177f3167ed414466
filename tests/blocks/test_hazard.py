"""The policy that learns, beside its reference: what it counts, what follows from it, and what it evicts."""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.eviction_capacities import turning
from pagedkv import BlockPool
from pagedkv.blocks.auditing import check_pool
from pagedkv.blocks.eviction.adaptive import ADAPTIVE
from pagedkv.blocks.eviction.hazard.layout import (
    HITS,
    IS_ON_CLOCK,
    NEXT_RUN,
    NUM_DEPARTED,
    NUM_GAINED,
    NUM_LOST,
    NUM_NODES,
    NUM_REF_BINS,
    NUM_SECOND_BINS,
    RATE,
    REFERENCES,
    RISK,
    ROOT_A,
    ROOT_B,
    ROOT_F,
    RUN,
    SECONDS,
    TICKS,
    VALUE,
    WIDTH,
    WORK,
    leaf_a,
    leaf_b,
    leaf_f,
    pack,
)
from pagedkv.blocks.eviction.hazard.learning import EXPONENT_A, EXPONENT_B, EXPONENT_F
from pagedkv.blocks.eviction.hazard.policy import HAZARD
from pagedkv.blocks.eviction.policy import LRU, note_request
from pagedkv.blocks.life_cycle import acquire, release, reuse
from pagedkv.blocks.prefix_index import find, name_block
from pagedkv.blocks.record import LIFE, NULL_BLOCK, NUM_EVICTED, PoolArrays
from pagedkv.planner.capacity.pool_hits import pool_hits
from pagedkv.planner.capacity.references import BlockReferences, ReferenceCollector
from pagedkv.planner.traces.request import Request
from tests.blocks.hazard_reference import HazardCache, index_of
from tests.choosing import long_but

pytestmark = pytest.mark.plain_only

STEP_S = 100 * 2**14 / 1e6  # a hundred ticks, so that ages are the same in ticks and in seconds
FIRST = 2  # the first content
MOST_WORK = 640 + 64 + 192 + 16 + 64  # runs and bins passed, runs forgotten, classes visited, leaves drawn


@dataclass(frozen=True)
class Served:
    """One request: its path in a tree with two branches everywhere, when it comes after the last, and its output."""

    path: list[int]
    steps: int
    num_outputs: int


SERVED = st.builds(Served, st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(0, 40), st.integers(0, 300))


class Serving:
    """A pool that serves one request at a time, by the hooks that engines reach through the space.

    Args:
        num_blocks: blocks that can be handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool("device", num_blocks + 1, 1, policy=HAZARD)
        self.contents: dict[tuple[int, ...], int] = {}

    @property
    def arrays(self) -> PoolArrays:
        """The pool's arrays."""
        return self.pool.arrays

    def ids(self, path: Sequence[int]) -> list[int]:
        """Number the blocks of a path."""
        return [
            self.contents.setdefault(tuple(path[: end + 1]), FIRST + len(self.contents)) for end in range(len(path))
        ]

    def serve(self, prompt: Sequence[int], now_s: float | None, num_outputs: int) -> int:
        """Serve one request, at a time if it is told; return how many of its leading blocks hit."""
        arrays = self.arrays
        if now_s is not None:
            self.pool.advance(now_s)
        prompt = prompt[: self.pool.num_usable]
        blocks: list[int] = []
        for content in prompt:
            block = find(arrays, 1, _digest(content))
            if block == NULL_BLOCK:
                break
            reuse(arrays, block)
            blocks.append(block)
        num_hits = len(blocks)
        for content in prompt[num_hits:]:
            parent = blocks[-1] if blocks else NULL_BLOCK
            blocks.append(acquire(arrays))
            arrays.digests[blocks[-1]] = _digest(content)
            name_block(arrays, 1, blocks[-1], parent, arrays.records[parent, LIFE])
        note_request(arrays, np.array(blocks, np.int32), num_outputs)
        for block in reversed(blocks):
            release(arrays, block, 0)
        return num_hits


def _digest(content: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array([content * 0x9E3779B1 % 2**32, content, 0, 0, 0, 0, 0, 0], np.uint32)


def counts_by_class(arrays: PoolArrays) -> dict[int, tuple[list[float], list[float]]]:
    """Hits and risk of the nodes that have any."""
    rates = arrays.eviction_rates[:NUM_NODES].astype(np.float64)
    hits, risk = rates[:, HITS:RISK], rates[:, RISK:RATE]
    nodes = np.flatnonzero(hits.any(axis=1) | risk.any(axis=1))
    return {int(node): (hits[node].tolist(), risk[node].tolist()) for node in nodes}


def reference_counts(cache: HazardCache) -> dict[int, tuple[list[float], list[float]]]:
    """The same of the reference, whose classes are tuples."""
    found = {}
    for tree, (scale, leaf) in zip(cache.trees, enumerate((leaf_a, leaf_b, leaf_f)), strict=True):
        for key, (hits, risk) in tree.counts.items():
            if hits.any() or risk.any():
                padding = [0.0] * (NUM_REF_BINS - len(hits))
                found[leaf(_packed(scale, key))] = (hits.tolist() + padding, risk.tolist() + padding)
    return found


def _packed(scale: int, key: tuple[int, ...]) -> int:
    match scale:
        case 0:
            last, uses, output, gap = key
            return pack(last, uses, output, 0, gap, 0)
        case 1:
            output, previous = key
            return pack(0, 0, output, 0, 0, previous)
        case _:
            last, uses, length = key
            return pack(last, uses, 0, length, 0, 0)


@settings(deadline=None, max_examples=30)
@given(st.lists(SERVED, min_size=1, max_size=14), st.integers(1, 12))
def test_until_it_learns_it_hits_and_counts_as_the_reference_does(trace: list[Served], num_blocks: int) -> None:
    serving, cache = Serving(num_blocks), HazardCache(num_blocks)
    now_s = STEP_S
    for request in trace:
        now_s += request.steps * STEP_S
        prompt = serving.ids(request.path)
        hits = [side.serve(prompt, now_s, request.num_outputs) for side in (serving, cache)]
        assert hits[0] == hits[1]
        check_pool(serving.pool)
    serving.serve([], now_s, 0)  # counts what was asked for last
    cache.serve([], now_s, 0)
    counted, expected = counts_by_class(serving.arrays), reference_counts(cache)
    assert counted.keys() == expected.keys()
    for node in counted:
        np.testing.assert_allclose(counted[node], expected[node], rtol=1e-4, atol=1e-6)


def references_of(num_requests: int, seed: int) -> BlockReferences:
    """Conversations of many turns, of which some go on and most do not, and the output's length tells which."""
    random = np.random.default_rng(seed)
    collector = ReferenceCollector("generated")
    now_s, num_ids = 0.0, 0
    going_on: list[list[int]] = []
    for _ in range(num_requests):
        now_s += random.exponential(2.0)
        turns = going_on.pop(random.integers(len(going_on))) if going_on and random.random() < 0.6 else []
        new = list(range(num_ids, num_ids + int(random.integers(2, 12))))
        num_ids += len(new)
        prompt = turns + new
        stays = random.random() < 0.4
        if stays and len(prompt) < 60:
            going_on.append(prompt)
        num_outputs = 400 if stays else 20
        collector.add(Request(now_s, len(prompt), num_outputs, np.array(prompt, np.int64), 1))
    return collector.references()


def served(references: BlockReferences) -> Iterator[tuple[list[int], float, int]]:
    """Give each request's blocks from the first on, its arrival in seconds, and its tokens of output."""
    for last, now_s, num_outputs, num_blocks in zip(
        references.last_blocks.tolist(),
        references.arrivals_s.tolist(),
        references.output_lengths.tolist(),
        references.num_prompt_blocks.tolist(),
        strict=True,
    ):
        path = [last]
        while len(path) < num_blocks:
            path.append(int(references.parents[path[-1]]))
        yield path[::-1], now_s, num_outputs


def reference_hits(references: BlockReferences, capacity: int) -> int:
    """Play a trace through the reference."""
    cache = HazardCache(capacity)
    num_hits = 0
    for path, now_s, num_outputs in served(references):
        num_hits += cache.serve(path, now_s, num_outputs)
    return num_hits


@pytest.mark.long
def test_once_it_has_learnt_it_hits_as_often_as_the_reference_and_more_than_others() -> None:
    references = references_of(800, seed=3)
    lru, adaptive, ours = (pool_hits(references, 150, policy) for policy in (LRU, ADAPTIVE, HAZARD))
    expected = reference_hits(references, 150)
    assert ours > lru
    assert ours > adaptive
    assert abs(ours - expected) < 0.25 * (expected - lru)


def learnt(num_requests: int = 200) -> Serving:
    """Make a pool that has swept its classes."""
    references = references_of(num_requests, seed=1)
    serving = Serving(100)
    for path, now_s, num_outputs in served(references):
        serving.serve(path, now_s, num_outputs)
    return serving


@cache
def learnt_once() -> Serving:
    """Make one for all examples, which copy it."""
    return learnt()


def test_values_are_the_index_by_its_definition() -> None:
    rates = learnt_once().arrays.eviction_rates.astype(np.float64)
    num_checked = 0
    for node in range(NUM_NODES):
        if not rates[node, RATE]:
            continue
        scale, num_bins = (REFERENCES, NUM_REF_BINS) if node >= ROOT_F else (SECONDS, NUM_SECOND_BINS)
        exponent = EXPONENT_F if node >= ROOT_F else EXPONENT_B if node >= ROOT_B else EXPONENT_A
        index = index_of(rates[node, RATE : RATE + num_bins], rates[scale, WIDTH : WIDTH + num_bins])
        np.testing.assert_allclose(
            rates[node, VALUE : VALUE + num_bins], exponent * np.log(index), rtol=1e-3, atol=1e-3
        )
        num_checked += 1
    assert num_checked > 20
    assert all(rates[root, RATE] for root in (ROOT_A, ROOT_B, ROOT_F))


@pytest.mark.long
def test_the_same_requests_evict_the_same_blocks() -> None:
    references = references_of(250, seed=5)
    assert len({pool_hits(references, 80, HAZARD) for _ in range(3)}) == 1
    first, second = learnt(100).arrays, learnt(100).arrays
    assert (first.eviction == second.eviction).all()
    assert (first.eviction_runs == second.eviction_runs).all()
    assert (first.eviction_rates == second.eviction_rates).all()


@settings(deadline=None, max_examples=8)
@given(st.lists(SERVED, min_size=30, max_size=60), st.sampled_from([1, 1000, 10**6]))
def test_no_request_pays_for_what_others_left(trace: list[Served], pause: int) -> None:
    """However long nothing happened: counted is work on runs and classes, of which each piece takes nanoseconds."""
    serving = copy.deepcopy(learnt_once(), {id(HAZARD): HAZARD})
    now_s = 10_000.0
    before = int(serving.arrays.eviction[WORK])
    for request in trace:
        now_s += request.steps * STEP_S * pause
        prompt = serving.ids(request.path)
        serving.serve(prompt, now_s, request.num_outputs)
        work = int(serving.arrays.eviction[WORK])
        assert work - before <= MOST_WORK + (1 + 64) * len(prompt)  # in the worst case each block is drawn alone
        before = work


@pytest.mark.parametrize("num_blocks", [100_000, 131_073, 1_000_000])
def test_a_block_takes_at_most_500_bytes(num_blocks: int) -> None:
    assert BlockPool("device", num_blocks, 16, policy=HAZARD).nbytes <= 500 * num_blocks


def test_a_pool_without_it_keeps_nothing_for_it() -> None:
    for policy in (LRU, ADAPTIVE):
        arrays = BlockPool("device", 100, 16, policy=policy).arrays
        assert arrays.eviction_blocks.nbytes == arrays.eviction_runs.nbytes == arrays.eviction_rates.nbytes == 0


def test_what_is_given_back_by_itself_has_a_run_and_waits_its_turn() -> None:
    """Behind a window, for example: its sequence has not ended."""
    serving = learnt(100)
    block = acquire(serving.arrays)
    serving.arrays.digests[block] = _digest(99_999)
    name_block(serving.arrays, 1, block, NULL_BLOCK, 0)
    release(serving.arrays, block, 0)
    assert serving.arrays.eviction_blocks[block, RUN] > 0
    check_pool(serving.pool)
    victims = [acquire(serving.arrays) for _ in range(65)]
    assert block not in victims
    check_pool(serving.pool)


def test_what_lru_would_have_is_known_without_playing_it() -> None:
    """As long as nothing was learnt, LRU is followed: nothing is gained, lost or evicted that it would keep."""
    serving, lru = Serving(24), OrderedDict[int, None]()
    random = np.random.default_rng(2)
    for number in range(15):
        prompt = serving.ids(random.integers(2, size=random.integers(1, 12)).tolist())
        expected = next((place for place, content in enumerate(prompt) if content not in lru), len(prompt))
        assert serving.serve(prompt, 100.0 + number, 20) == expected
        for content in reversed(prompt):
            lru[content] = None
            lru.move_to_end(content)
        while len(lru) > serving.pool.num_usable:
            lru.popitem(last=False)
        check_pool(serving.pool)
    assert serving.pool.arrays.counts[NUM_EVICTED] > 0
    assert not serving.arrays.eviction[[NUM_GAINED, NUM_LOST, NUM_DEPARTED]].any()


@pytest.mark.parametrize("num_outputs", long_but([20], [0, 20]))
def test_whoever_learns_what_is_wrong_loses_half_a_point_to_lru_at_most(num_outputs: int) -> None:
    """Conversations that went on by the length of their answers end by it from the middle on."""
    references = turning(num_requests=400, seed=4)
    lengths = references.output_lengths if num_outputs else np.full_like(references.output_lengths, -1)
    references = replace(references, output_lengths=lengths)
    for capacity in (60, 120):
        lost = pool_hits(references, capacity, LRU) - pool_hits(references, capacity, HAZARD)
        assert lost <= references.num_block_refs / 200


def test_ages_are_counted_in_blocks_until_there_is_a_clock() -> None:
    serving = Serving(8)
    for number in range(40):
        prompt = serving.ids([number % 2, number % 3 % 2, number % 5 % 2])
        serving.serve(prompt, 1e6 + number if number >= 20 else None, 5)
        check_pool(serving.pool)
    assert serving.arrays.eviction[IS_ON_CLOCK]
    ticks = serving.arrays.eviction_runs[: serving.arrays.eviction[NEXT_RUN], TICKS]
    assert (np.diff(ticks[1:]) >= 0).all()
