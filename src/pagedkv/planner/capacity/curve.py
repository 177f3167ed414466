"""Hits of a trace at each size of the cache, the causes of its misses, and the memory that it needs.

Between the hits of a policy and 1 lie three gaps, as shares of all references::

    0            LRU            optimum            ideal                       1
    |--- hits ---|-- policy gap --|-- capacity gap --|---- content ceiling ----|
                  a better policy    a larger cache    none: content is new

How much KV memory a trace needs is told in blocks and GiB, in the same words everywhere (:class:`MemoryNeed`). Two
sizes answer the question. Requests in flight need their blocks at the peak: with less memory they wait or are
preempted. The cache needs more: the least capacity at which LRU has 99 % of the hits of an unbounded cache.

Tiers below a cache (:class:`TierCurve`) hit what the device does not have, and a store core still does. As in
:mod:`pagedkv.planner.capacity`, prompts come one at a time and take no time. There is no clock, so a load always pays
and takes no time, and a store writes at once. An entry is one block of the trace (an engine's has up to eight)::

    prompt:  | hits of the device | in host memory | on disk | computed ...
    then:    all its blocks, as far as the capacity holds them, are offered to every tier

Loaded blocks enter the device as computed ones do, so tiers do not change what the device hits. The stores are driven
by offers alone: a load uses entries that the offer of the same prompt uses right after it, which leaves LRU as it is.
So what a store holds depends on a capacity only where that is below the blocks of a prompt, and one replay of the
stores serves all other capacities and all policies of the device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.blocks import EvictionPolicy, policy_named
from pagedkv.contract.arguments import as_choice, as_count
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.contract.space_config import DEFAULT_EVICTION, EVICTION_POLICIES, GIB
from pagedkv.errors import ConfigurationError
from pagedkv.planner.capacity.pool_hits import (
    Pause,
    Point,
    hits_by_request,
    lru_hits_by_capacity,
    lru_hits_by_request,
    measure_side_by_side,
    optimal_hits_by_request,
)
from pagedkv.planner.capacity.references import SPREAD, WORD, BlockReferences, Partition, write_path
from pagedkv.tiers import Admission, HostTier, StoreCore
from pagedkv.tiers.specs import BEFORE_EVICTION
from pagedkv.tiers.words import MOST_NBYTES

Policy: TypeAlias = Callable[[BlockReferences, int, Pause], Int32Array | Int64Array]
"""Counts the hits of each request at a capacity."""


def _of_pool(policy: EvictionPolicy) -> Policy:
    return lambda references, capacity, pause: hits_by_request(references, capacity, policy, pause)


LRU: Final = "lru"
OPTIMAL: Final = "optimal"
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {name: _of_pool(policy_named(name)) for name in EVICTION_POLICIES} | {OPTIMAL: optimal_hits_by_request}
)
"""Policies by name, in the order of results. The optimum is no online policy, but its hits are counted like a
policy's."""
NUM_DEFAULT_CAPACITIES: Final = 10
BY_DEFAULT: Final = ("lru", "adaptive", "fifo", "hazard")
"""Policies measured if none is named. Without numbers, which no log has, ``priority`` is LRU; ``tlru`` gives hits up
for the slowest requests, which hits do not show."""
FOR_MANY_REQUESTS: Final = ("lru", "adaptive")
"""Policies measured by default for very many requests: LRU takes no time per capacity, adaptive 3 to 6 us a request and
capacity. Fifo takes as long; hazard, which learns, takes some 20 us."""
MOST_FOR_ALL: Final = 300_000
FACTORS: Final = (2, 4)
"""Multiples of a capacity for which the gain is shown."""
SHARES_OF_IDEAL: Final = MappingProxyType({"0.9": 90, "0.99": 99, "1.0": 100})
"""Shares of the ideal hits for which the capacity is computed, with the same in whole percent, to avoid rounding."""


@dataclass(frozen=True, slots=True)
class PartCurve:
    """Hits of one tenant, or of one window of time, in the common cache.

    Args:
        kind: "tenant" or "window".
        name: name of the tenant or window.
        num_requests, num_block_refs, num_prompt_tokens: its requests, and their blocks and tokens.
        ideal_hits: blocks that hit in an unbounded cache.
        ideal_hit_tokens: tokens of those blocks.
        hits: hits by policy and capacity.
    """

    kind: str
    name: str
    num_requests: int
    num_block_refs: int
    num_prompt_tokens: int
    ideal_hits: int
    ideal_hit_tokens: int
    hits: Mapping[str, Mapping[int, int]]

    @property
    def ideal_token_ratio(self) -> float:
        """Tokens that hit in an unbounded cache, as a share of its prompt tokens."""
        return self.ideal_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def hit_ratio(self, policy: str, capacity: int) -> float:
        """Hits of a policy, as a share of its references."""
        return self.hits[policy][capacity] / self.num_block_refs if self.num_block_refs else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the values for JSON."""
        return {
            "name": self.name,
            "num_requests": self.num_requests,
            "num_block_refs": self.num_block_refs,
            "num_prompt_tokens": self.num_prompt_tokens,
            "ideal_hits": self.ideal_hits,
            "ideal_token_ratio": self.ideal_token_ratio,
            "policies": {name: _with_text_keys(hits) for name, hits in self.hits.items()},
        }


@dataclass(frozen=True, slots=True)
class LiveNeed:
    """The blocks of requests in flight at their peak.

    Args:
        num_blocks: blocks of all pools.
        nbytes: their bytes; None without a model.
        is_bounded: whether a pool was full, so that requests may have waited for memory.
        rests_on: the simulation: the setting and the traffic.
    """

    num_blocks: int
    nbytes: int | None
    is_bounded: bool
    rests_on: str


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """The least cache with 99 % of the hits of an unbounded one, by LRU, where prompts come one at a time.

    Args:
        num_blocks: blocks of the trace.
        block_size: tokens of such a block; None: those of the model's pools.
        nbytes: their bytes; None without a model.
        bound: "at most" or "more than", where only some sizes were measured.
    """

    num_blocks: int
    block_size: int | None
    nbytes: int | None
    bound: str = ""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """How much KV memory a trace needs.

    Args:
        live: for requests in flight; None: no simulation was run.
        cache: for the hits; None where they are unknown, or by other rules than LRU's of one pool.
    """

    live: LiveNeed | None = None
    cache: CacheNeed | None = None

    @property
    def sentence(self) -> str:
        """The answer and what it rests on, in one line."""
        sizes, grounds = [], []
        if self.live is not None:
            most = "at least " if self.live.is_bounded else ""
            sizes.append(f"{most}{_size(self.live.num_blocks, self.live.nbytes)} for requests in flight at their peak")
            grounds.append(self.live.rests_on)
        if self.cache is not None and self.cache.num_blocks:
            size = _size(self.cache.num_blocks, self.cache.nbytes, self.cache.block_size)
            bound = f"{self.cache.bound} " if self.cache.bound else ""
            sizes.append(f"{bound}{size} with the cache, for 99 % of the hits of an unbounded one")
            grounds.append("LRU, prompts one at a time")
        if not sizes:
            return f"{UNKNOWN}; {ALONE}"
        missing = f"; {ALONE}" if self.live is None else ""
        return f"KV memory needed: {'; '.join(sizes)} (by {'; '.join(grounds)}){missing}"

    def as_dict(self) -> dict[str, object]:
        """Return the sizes for JSON, with the sentence."""
        return {
            "live": None if self.live is None else {**asdict(self.live), "gib": _gib(self.live.nbytes)},
            "cache": None
            if self.cache is None
            else {**asdict(self.cache), "gib": _gib(self.cache.nbytes), "share_of_hits": float(SHARE_OF_HITS)},
            "sentence": self.sentence,
        }


@dataclass(frozen=True, slots=True)
class CurveTier:
    """A tier of a curve.

    Args:
        medium: "host" or "disk".
        nbytes: most bytes of entries.
        admission: "always" writes every offered block; "second-offer" a block that is offered for the second time.

    Raises:
        ConfigurationError: a value out of range.
    """

    medium: str
    nbytes: int
    admission: Admission = "always"

    def __post_init__(self) -> None:
        """Check every field."""
        as_choice(self.medium, MEDIA, "medium")
        if self.admission == BEFORE_EVICTION:
            raise ConfigurationError(
                f"the tiers of a curve get all blocks of a prompt at once: replay the trace for {BEFORE_EVICTION!r}"
            )
        as_count(self.nbytes, f"the size of a {self.medium} tier", least=1, most=MOST_NBYTES)
        HostTier(self.nbytes, admission=self.admission)


@dataclass(frozen=True, slots=True)
class TierCurve:
    """Hits of a trace by medium, with the same tiers below the device at each of its capacities.

    Args:
        tiers: the tiers, the fastest first.
        block_nbytes: bytes of a block.
        device_hits: hits of the device alone, by its policy and capacity.
        tier_hits: hits of each tier beside them, in the order of ``tiers``, by policy and capacity.
        num_written: blocks that each tier has written, by capacity.
    """

    tiers: tuple[CurveTier, ...]
    block_nbytes: int
    device_hits: Mapping[str, Mapping[int, int]]
    tier_hits: Mapping[str, Mapping[int, tuple[int, ...]]]
    num_written: Mapping[int, tuple[int, ...]]

    def num_hits(self, policy: str, capacity: int) -> int:
        """Hits of the device and all tiers."""
        return self.device_hits[policy][capacity] + sum(self.tier_hits[policy][capacity])

    def as_dict(self) -> dict[str, object]:
        """Return the curve for JSON."""
        media = [tier.medium for tier in self.tiers]

        def of_tiers(counts: tuple[int, ...]) -> dict[str, int]:
            return dict(zip(media, counts, strict=True))

        return {
            "tiers": {tier.medium: {"nbytes": tier.nbytes, "admission": tier.admission} for tier in self.tiers},
            "block_nbytes": self.block_nbytes,
            "hits": {
                policy: {
                    str(capacity): {
                        "device": num_hits,
                        **dict(zip(media, self.tier_hits[policy][capacity], strict=True)),
                    }
                    for capacity, num_hits in by_capacity.items()
                }
                for policy, by_capacity in self.device_hits.items()
            },
            "written_blocks": {str(capacity): of_tiers(counts) for capacity, counts in self.num_written.items()},
        }


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """Hits of a trace by policy and capacity.

    Args:
        block_size: tokens of a block.
        num_requests: requests, including those without a block.
        num_block_refs: blocks of all prompts.
        num_unique_blocks: distinct blocks, including kept blocks of answers.
        num_prompt_tokens: tokens of all prompts, including those in no block.
        ideal_hits: blocks that hit in an unbounded cache.
        ideal_hit_tokens: tokens of those blocks.
        hits: hits by policy and capacity.
        capacity_for: by share of the ideal hits, the smallest capacity at which LRU reaches it.
        parts: the same by tenant and by window of time, if the trace was divided; parts of one kind add up to the
            whole.
        num_answer_blocks: blocks of answers that are kept after their prompts, as in engines, so that next turns hit
            them; they count as distinct blocks, not as references. 0 where the trace has no tokens of answers.
        tiers: hits by medium, for each setting of tiers below the device that was measured.
        token_nbytes: bytes of a token of the model; None without one.
    """

    block_size: int
    num_requests: int
    num_block_refs: int
    num_unique_blocks: int
    num_prompt_tokens: int
    ideal_hits: int
    ideal_hit_tokens: int
    hits: Mapping[str, Mapping[int, int]]
    capacity_for: Mapping[str, int]
    parts: tuple[PartCurve, ...] = ()
    num_answer_blocks: int = 0
    tiers: tuple[TierCurve, ...] = ()
    token_nbytes: int | None = None

    @property
    def need(self) -> MemoryNeed:
        """How much KV memory the cache needs."""
        return MemoryNeed(
            cache=cache_need(self.capacity_for, self.block_size, self.token_nbytes) if self.ideal_hits else None
        )

    def gib(self, num_blocks: int) -> float | None:
        """GiB of a number of blocks; None without a model."""
        return None if self.token_nbytes is None else num_blocks * self.block_size * self.token_nbytes / GIB

    @property
    def capacities(self) -> list[int]:
        """The capacities measured, in ascending order."""
        return list(self.hits[OPTIMAL])

    @property
    def ideal_block_ratio(self) -> float:
        """Hits of an unbounded cache, as a share of all references."""
        return self.ideal_hits / self.num_block_refs

    @property
    def ideal_token_ratio(self) -> float:
        """Tokens of those hits, as a share of all prompt tokens."""
        return self.ideal_hit_tokens / self.num_prompt_tokens

    @property
    def content_ceiling(self) -> float:
        """Share of the references that no cache can hit, because their content is new."""
        return (self.num_block_refs - self.ideal_hits) / self.num_block_refs

    def hit_ratio(self, policy: str, capacity: int) -> float:
        """Hits of a policy, as a share of all references."""
        return self.hits[policy][capacity] / self.num_block_refs

    def capacity_gap(self, capacity: int) -> float:
        """Share of the references that only a larger cache can hit: ideal minus optimum."""
        return (self.ideal_hits - self.hits[OPTIMAL][capacity]) / self.num_block_refs

    def policy_gap(self, policy: str, capacity: int) -> float:
        """Share of the references that a better policy might hit: optimum minus policy."""
        return (self.hits[OPTIMAL][capacity] - self.hits[policy][capacity]) / self.num_block_refs

    def gains(self) -> dict[tuple[int, int], dict[str, float]]:
        """Return the gain of two and four times a capacity: share of the references, by capacity and factor, by policy.

        It has each capacity whose multiple was measured too, or holds all blocks, so that none is evicted.
        """
        return {
            (capacity, factor): {
                name: (self._hits_at(name, factor * capacity) - hits[capacity]) / self.num_block_refs
                for name, hits in self.hits.items()
            }
            for capacity in self.capacities
            for factor in FACTORS
            if self._is_known(factor * capacity) and not self._holds_all(capacity)
        }

    def _holds_all(self, capacity: int) -> bool:
        return capacity >= self.num_unique_blocks

    def _is_known(self, capacity: int) -> bool:
        return capacity in self.hits[OPTIMAL] or self._holds_all(capacity)

    def _hits_at(self, policy: str, capacity: int) -> int:
        return self.ideal_hits if self._holds_all(capacity) else self.hits[policy][capacity]

    def as_dict(self) -> dict[str, object]:
        """Return the curve for JSON, equal on every run."""
        return {
            "need": self.need.as_dict(),
            "block_size": self.block_size,
            "num_requests": self.num_requests,
            "num_block_refs": self.num_block_refs,
            "num_unique_blocks": self.num_unique_blocks,
            "ideal_hits": self.ideal_hits,
            "ideal_block_ratio": self.ideal_block_ratio,
            "ideal_token_ratio": self.ideal_token_ratio,
            **({"num_answer_blocks": self.num_answer_blocks} if self.num_answer_blocks else {}),
            "policies": {name: _with_text_keys(hits) for name, hits in self.hits.items()},
            "capacity_for": dict(self.capacity_for),
            "gaps": {
                "content_ceiling": self.content_ceiling,
                "capacity_gap": _with_text_keys(
                    {capacity: self.capacity_gap(capacity) for capacity in self.capacities}
                ),
                "policy_gap": {
                    name: _with_text_keys({capacity: self.policy_gap(name, capacity) for capacity in self.capacities})
                    for name in self.hits
                    if name != OPTIMAL
                },
            },
            "gains": [
                {"capacity": capacity, "factor": factor, "by_policy": by_policy}
                for (capacity, factor), by_policy in self.gains().items()
            ],
            **{
                f"by_{kind}": [part.as_dict() for part in self.parts if part.kind == kind]
                for kind in dict.fromkeys(part.kind for part in self.parts)
            },
            **({"tiers": [each.as_dict() for each in self.tiers]} if self.tiers else {}),
        }


def default_capacities(references: BlockReferences) -> list[int]:
    """Choose ten capacities in geometric progression, and two and four times the one in the middle.

    The range begins at the longest prompt, below which not every request can be cached whole, or at the capacity where
    LRU has half of the ideal hits, if that is less. It ends at the number of distinct blocks, where eviction ends. A
    small trace has fewer capacities.
    """
    half_of_ideal = _capacity_for(50, lru_hits_by_capacity(references))
    lowest = min(references.longest_prompt, half_of_ideal)
    spread = np.geomspace(lowest, references.num_unique_blocks, NUM_DEFAULT_CAPACITIES)
    chosen = {int(capacity) for capacity in spread.round()}
    return with_multiples(chosen, sorted(chosen)[len(chosen) // 2], references.num_unique_blocks)


def policies_for(num_requests: int, wanted: Iterable[str] | None = None) -> tuple[str, ...]:
    """Choose the eviction policies of a curve.

    Args:
        num_requests: requests of the trace.
        wanted: names; None: ``BY_DEFAULT``, or only ``FOR_MANY_REQUESTS`` for very many requests.

    Raises:
        ConfigurationError: a name is unknown or repeated, or there is none.

    >>> policies_for(1000), policies_for(10**6), policies_for(10**6, ["hazard"])
    (('lru', 'adaptive', 'fifo', 'hazard'), ('lru', 'adaptive'), ('hazard',))
    """
    if wanted is None:
        return BY_DEFAULT if num_requests <= MOST_FOR_ALL else FOR_MANY_REQUESTS
    names = tuple(wanted)
    for name in names:
        policy_named(name)
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(f"`policies` must be a list of different policies, got {','.join(names)!r:.60}")
    return names


def with_multiples(capacities: Iterable[int], capacity: int, num_unique_blocks: int) -> list[int]:
    """Add a capacity and two and four times it, so that a curve shows the gain of more memory.

    Multiples above the number of distinct blocks are left out, since no block is evicted there; the capacity itself
    stays.
    """
    wanted = {factor * capacity for factor in FACTORS if factor * capacity < num_unique_blocks}
    return sorted({*capacities, *wanted, min(capacity, num_unique_blocks)})


def measure_curve(  # noqa: PLR0913 - a trace, and all options of its measurement
    references: BlockReferences,
    capacities: Iterable[int],
    policies: Mapping[str, Policy] = POLICIES,
    show: Callable[[int], None] = lambda _: None,
    num_threads: int = 1,
    *,
    partitions: Sequence[Partition] = (),
) -> CapacityCurve:
    """Count the hits of every policy at every capacity.

    Args:
        references: the trace.
        capacities: numbers of blocks, in any order, each at least 1.
        policies: policies by name, including the optimum.
        show: called after each point with the number of finished points (policies by capacities).
        num_threads: most points measured at a time; together they take no more memory than the largest.
        partitions: divisions of the requests, to count hits by part as well.

    Raises:
        ConfigurationError: a capacity is not positive.
    """
    ascending = sorted(set(capacities))
    if ascending and ascending[0] < 1:
        raise ConfigurationError(f"a capacity must be at least 1 block, got {ascending[0]}")
    lru_hits, capacity_for = _lru_of(references, ascending)
    hits: dict[str, dict[int, Int64Array]] = {name: {} for name in policies}
    wanted: list[tuple[str, int]] = []
    for name, capacity in product(policies, ascending):
        is_never_full = capacity >= references.num_unique_blocks  # then no policy evicts
        if is_never_full or (name == LRU and capacity > ascending[0]):
            hits[name][capacity] = _lru_sums(references, capacity, lru_hits[capacity], partitions)
        else:
            wanted.append((name, capacity))
    num_known = len(policies) * len(ascending) - len(wanted)
    show(num_known)
    points = [
        Point(capacity, partial(_measured, policies[name], references, capacity, partitions))
        for name, capacity in wanted
    ]
    measured = measure_side_by_side(points, num_threads, lambda num_done: show(num_known + num_done))
    for (name, capacity), sums in zip(wanted, measured, strict=True):
        hits[name][capacity] = sums
    if LRU in hits and ascending:
        _compare(ascending[0], int(hits[LRU][ascending[0]][0]), lru_hits[ascending[0]])
    return CapacityCurve(
        block_size=references.block_size,
        num_requests=references.num_requests,
        num_block_refs=references.num_block_refs,
        num_unique_blocks=references.num_unique_blocks,
        num_prompt_tokens=int(references.input_lengths.sum(dtype=np.int64)),
        ideal_hits=int(references.ideal_hits().sum()),
        ideal_hit_tokens=int(references.ideal_hit_tokens().sum()),
        hits={name: {capacity: int(hits[name][capacity][0]) for capacity in ascending} for name in policies},
        capacity_for=capacity_for,
        num_answer_blocks=references.num_answer_blocks,
        parts=tuple(_parts(references, partitions, hits, ascending)),
    )


def _measured(
    policy: Policy, references: BlockReferences, capacity: int, partitions: Sequence[Partition], pause: Pause
) -> Int64Array:
    return _sums(policy(references, capacity, pause), partitions)


def _sums(hits: Int32Array | Int64Array, partitions: Sequence[Partition]) -> Int64Array:
    """Add up hits of all requests, and of the parts of each partition."""
    total = np.array([hits.sum(dtype=np.int64)])
    return np.concatenate([total, *(partition.sums(hits) for partition in partitions)])


def _lru_sums(references: BlockReferences, capacity: int, num_hits: int, partitions: Sequence[Partition]) -> Int64Array:
    """Return the sums of LRU, whose total is known."""
    if not partitions:
        return np.array([num_hits])
    sums = _sums(lru_hits_by_request(references, capacity), partitions)
    _compare(capacity, int(sums[0]), num_hits)
    return sums


def _parts(
    references: BlockReferences,
    partitions: Sequence[Partition],
    hits: Mapping[str, Mapping[int, Int64Array]],
    capacities: Sequence[int],
) -> Iterator[PartCurve]:
    place = 1
    counted = (
        references.num_prompt_blocks.astype(np.int64),
        references.input_lengths,
        references.ideal_hits(),
        references.ideal_hit_tokens(),
    )
    for partition in partitions:
        facts = [partition.counts().tolist(), *(partition.sums(values).tolist() for values in counted)]
        for name, num_requests, num_block_refs, num_tokens, ideal, ideal_tokens in zip(
            partition.names, *facts, strict=True
        ):
            by_policy = {
                policy: {capacity: int(sums[capacity][place]) for capacity in capacities}
                for policy, sums in hits.items()
            }
            yield PartCurve(
                partition.kind, name, num_requests, num_block_refs, num_tokens, ideal, ideal_tokens, by_policy
            )
            place += 1


def _lru_of(references: BlockReferences, capacities: Iterable[int]) -> tuple[dict[int, int], dict[str, int]]:
    """Return the hits of LRU at each capacity, and the capacity for each share of the ideal hits.

    The hits at other capacities are dropped, which frees 8 bytes a block for the caches of points.
    """
    by_capacity = lru_hits_by_capacity(references)
    largest = len(by_capacity) - 1
    hits = {capacity: int(by_capacity[min(capacity, largest)]) for capacity in capacities}
    return hits, _capacities_for(by_capacity)


def lru_capacity_for(references: BlockReferences) -> dict[str, int]:
    """Find the smallest capacity at which LRU reaches each share of the ideal hits. O(references log references)."""
    return _capacities_for(lru_hits_by_capacity(references))


def _capacities_for(by_capacity: Int64Array) -> dict[str, int]:
    return {share: _capacity_for(percent, by_capacity) for share, percent in SHARES_OF_IDEAL.items()}


def _capacity_for(percent: int, hits_by_capacity: Int64Array) -> int:
    """Find the smallest capacity, at least 1, whose hits reach a percentage of the last value."""
    enough = -(-percent * int(hits_by_capacity[-1]) // 100)
    return max(1, int(np.searchsorted(hits_by_capacity, enough)))


def _compare(capacity: int, num_hits: int, expected: int) -> None:
    """Assert that the pool's hits equal those from stack distances."""
    assert num_hits == expected, f"the pool of {capacity} blocks had {num_hits} hits, stack distances {expected}"


def _with_text_keys(by_capacity: Mapping[int, int | float]) -> dict[str, int | float]:
    return {str(capacity): value for capacity, value in by_capacity.items()}


SHARE_OF_HITS: Final = "0.99"
"""The share of the ideal hits that the cache is to have, as in ``CapacityCurve.capacity_for``."""
MANY_GIB: Final = 100
UNKNOWN: Final = "KV memory needed: unknown"
NEARLY_FULL: Final = 0.98
"""Requests wait for blocks before the last one is taken: the watermark is left free, and the next prompt needs many."""
ALONE: Final = "what requests in flight need is told by pagedkv plan and pagedkv replay"


def live_need(peaks: Mapping[str, int], sizes: Mapping[str, int], nbytes: Mapping[str, int], rests_on: str) -> LiveNeed:
    """Sum up the peaks of all pools.

    Args:
        peaks: most live blocks, by pool; sizes: usable blocks; nbytes: bytes of a block, empty without a model.
        rests_on: the simulation.
    """
    total = sum(count * nbytes[pool] for pool, count in peaks.items()) if nbytes.keys() >= peaks.keys() else None
    is_bounded = any(count >= NEARLY_FULL * sizes[pool] for pool, count in peaks.items())
    return LiveNeed(sum(peaks.values()), total, is_bounded, rests_on)


def cache_need(capacity_for: Mapping[str, int], block_size: int, token_nbytes: float | None) -> CacheNeed | None:
    """Read the cache that is needed from a curve of one pool; None where there are no hits to have.

    Args:
        capacity_for: blocks by share of the ideal hits.
        block_size: tokens of such a block.
        token_nbytes: bytes of a token; None without a model.
    """
    num_blocks = capacity_for.get(SHARE_OF_HITS)
    if num_blocks is None:
        return None
    return CacheNeed(
        num_blocks, block_size, None if token_nbytes is None else int(num_blocks * block_size * token_nbytes)
    )


def _gib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / GIB


def _size(num_blocks: int, nbytes: int | None, block_size: int | None = None) -> str:
    of = "" if block_size is None else f" of {block_size:,} tokens"
    blocks = f"{num_blocks:,} block{'s'[: num_blocks != 1]}{of}"
    if nbytes is None:
        return f"{blocks} (name a model for GiB)"
    gib = nbytes / GIB
    return f"{gib:,.0f} GiB ({blocks})" if gib >= MANY_GIB else f"{gib:.3g} GiB ({blocks})"


MEDIA: Final = ("host", "disk")
KEY_WORDS: Final = 8


def device_hits_of(
    references: BlockReferences, policies: Sequence[str], capacities: Sequence[int]
) -> dict[str, dict[int, Int32Array | Int64Array]]:
    """Count the hits of each request in the device alone, by policy and capacity. O(references) for each of these."""
    return {
        name: {
            capacity: lru_hits_by_request(references, capacity)
            if name == DEFAULT_EVICTION
            else hits_by_request(references, capacity, policy_named(name))
            for capacity in capacities
        }
        for name in policies
    }


def measure_tiers(
    references: BlockReferences,
    device_hits: Mapping[str, Mapping[int, Int32Array | Int64Array]],
    tiers: Sequence[CurveTier],
    block_nbytes: int,
) -> TierCurve:
    """Count the hits of tiers below caches of several capacities and policies.

    Args:
        references: the trace.
        device_hits: hits of each request in the device, int32 ``[num_requests]``, by policy and capacity.
        tiers: the tiers, the fastest first.
        block_nbytes: bytes of a block.

    Raises:
        ConfigurationError: no tier, two of one medium, or a block of less than a byte.

    Cost: some 2 us a reference and 20 us a written block and tier, for each capacity below the longest prompt and once
    for all others.
    """
    as_count(block_nbytes, "the bytes of a block", least=1)
    media = [tier.medium for tier in tiers]
    if not tiers or len(set(media)) < len(media):
        raise ConfigurationError(f"a curve has one tier of a medium at most, and at least one, got {media}")
    by_policy = next(iter(device_hits.values()))
    limits = {capacity: min(capacity, references.longest_prompt) for capacity in by_policy}
    counted: dict[str, dict[int, tuple[int, ...]]] = {policy: {} for policy in device_hits}
    written: dict[int, tuple[int, ...]] = {}
    for limit in sorted(set(limits.values())):
        capacities = [capacity for capacity, own in limits.items() if own == limit]
        wanted = list(product(device_hits, capacities))
        replay = _Replay(tiers, block_nbytes, [device_hits[policy][capacity] for policy, capacity in wanted])
        for place, path in enumerate(_paths(references, limit)):
            replay.serve(place, path, min(int(references.num_prompt_blocks[place]), len(path)))
        for (policy, capacity), counts in zip(wanted, replay.hits.tolist(), strict=True):
            counted[policy][capacity] = tuple(counts)
        written |= dict.fromkeys(capacities, tuple(replay.num_written))
    return TierCurve(
        tiers=tuple(tiers),
        block_nbytes=block_nbytes,
        device_hits={
            policy: {capacity: int(hits.sum(dtype=np.int64)) for capacity, hits in own.items()}
            for policy, own in device_hits.items()
        },
        tier_hits=counted,
        num_written=written,
    )


@dataclass(slots=True)
class _Replay:
    """The stores of one replay, and the hits of each tier at each point: int64 ``[points, tiers]``."""

    tiers: Sequence[CurveTier]
    block_nbytes: int
    device_hits: Sequence[Int32Array | Int64Array]
    stores: list[StoreCore] = field(init=False)
    hits: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.stores = [StoreCore(_spec(tier).store_config(self.block_nbytes)) for tier in self.tiers]
        self.hits = np.zeros((len(self.device_hits), len(self.tiers)), np.int64)

    @property
    def num_written(self) -> list[int]:
        """Blocks that each tier has written."""
        return [store.statistics().written_nbytes // self.block_nbytes for store in self.stores]

    def serve(self, place: int, path: Int32Array, num_prompt_blocks: int) -> None:
        """Count the hits of a prompt, and offer its blocks, and those of its answer, to every tier."""
        if not len(path):
            return
        keys = _keys_of(path)
        has = [store.contains(keys[:num_prompt_blocks]) for store in self.stores]
        if any(each.any() for each in has):
            ends = [_ends_of_runs(each) for each in has]
            for point, device_hits in enumerate(self.device_hits):
                self._count(point, int(device_hits[place]), ends)
        for store in self.stores:
            self._offer(store, keys)

    def _count(self, point: int, position: int, ends: Sequence[npt.NDArray[np.int64]]) -> None:
        """Count the hits behind those of the device: runs of blocks, each in the first tier that has its first one."""
        while position < len(ends[0]):
            tier = next((tier for tier, end in enumerate(ends) if end[position] > position), None)
            if tier is None:
                return
            self.hits[point, tier] += ends[tier][position] - position
            position = int(ends[tier][position])

    def _offer(self, store: StoreCore, keys: npt.NDArray[np.uint8]) -> None:
        """Offer blocks, and carry out what the store decides."""
        wanted = keys[store.select_for_offer(keys, 0.0)]
        if not len(wanted):
            return
        store.offer(wanted, [self.block_nbytes] * len(wanted), 0.0, is_noted=True)
        while actions := store.take_actions():
            for action in actions:
                store.completed(action.action, 0.0)
        store.take_answers()


def _spec(tier: CurveTier) -> HostTier:
    """Return a tier with the settings of an engine's, and a queue without bounds, since writes take no time."""
    return HostTier(tier.nbytes, admission=tier.admission, settings={"max_queued_nbytes": MOST_NBYTES})


def _paths(references: BlockReferences, limit: int) -> Iterator[Int32Array]:
    """Yield the first blocks of each prompt and its answer, at most ``limit``."""
    for last_block, num_blocks in zip(references.last_blocks.tolist(), references.num_blocks.tolist(), strict=True):
        path = np.zeros(num_blocks, np.int32)
        write_path(references.parents, last_block, path)
        yield path[:limit]


def _keys_of(path: Int32Array) -> npt.NDArray[np.uint8]:
    """Return a unique key for each block of a tree: uint8 ``[n, 32]``."""
    words = np.zeros((len(path), KEY_WORDS), ">u4")
    words[:, 0] = path.astype(np.int64) * SPREAD & WORD
    words[:, 1] = path
    return words.view(np.uint8)


def _ends_of_runs(is_there: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return for each place where the run of blocks that are there ends: the place itself if its block is not."""
    ends = np.where(is_there, len(is_there), np.arange(len(is_there)))
    return np.minimum.accumulate(ends[::-1])[::-1]
