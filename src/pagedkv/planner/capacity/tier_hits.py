"""Hits of tiers below a cache of each capacity: what the device does not have, and a store core still does.

As in :mod:`pagedkv.planner.capacity`, prompts come one at a time and take no time. There is no clock, so a load always
pays and takes no time, and a store writes at once. An entry is one block of the trace (an engine's has up to eight)::

    prompt:  | hits of the device | in host memory | on disk | computed ...
    then:    all its blocks, as far as the capacity holds them, are offered to every tier

Loaded blocks enter the device as computed ones do, so tiers do not change what the device hits. The stores are driven
by offers alone: a load uses entries that the offer of the same prompt uses right after it, which leaves LRU as it is.
So what a store holds depends on a capacity only where that is below the blocks of a prompt, and one replay of the
stores serves all other capacities and all policies of the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks import policy_named
from pagedkv.contract.arguments import as_choice, as_count
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.contract.space_config import DEFAULT_EVICTION
from pagedkv.errors import ConfigurationError
from pagedkv.planner.capacity.pool_hits import hits_by_request, lru_hits_by_request
from pagedkv.planner.capacity.references import BlockReferences, write_path
from pagedkv.tiers import Admission, HostTier, StoreCore

MEDIA: Final = ("host", "disk")
MOST_NBYTES: Final = 2**62
KEY_WORDS: Final = 8
SPREAD: Final = 0x9E3779B1
WORD: Final = 2**32 - 1


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
