"""MemoryNeed: how much KV memory a trace needs, in blocks and GiB, in the same words wherever it is told.

Two sizes answer the question. Requests in flight need their blocks at the peak: with less memory they wait or are
preempted. The cache needs more: the least capacity at which LRU has 99 % of the hits of an unbounded cache.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from pagedkv.contract.budget import GIB

__all__ = ["CacheNeed", "LiveNeed", "MemoryNeed", "cache_need", "live_need"]

SHARE_OF_HITS: Final = "0.99"
"""The share of the ideal hits that the cache is to have, as in ``CapacityCurve.capacity_for``."""
MANY_GIB: Final = 100
UNKNOWN: Final = "KV memory needed: unknown"
ALONE: Final = "what requests in flight need is told by pagedkv plan and pagedkv replay"


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


def live_need(peaks: Mapping[str, int], sizes: Mapping[str, int], nbytes: Mapping[str, int], rests_on: str) -> LiveNeed:
    """Sum up the peaks of all pools.

    Args:
        peaks: most live blocks, by pool; sizes: usable blocks; nbytes: bytes of a block, empty without a model.
        rests_on: the simulation.
    """
    total = sum(count * nbytes[pool] for pool, count in peaks.items()) if nbytes.keys() >= peaks.keys() else None
    return LiveNeed(sum(peaks.values()), total, any(count >= sizes[pool] for pool, count in peaks.items()), rests_on)


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
