"""How much KV memory a run needs, by its documents; for its page and for terminals."""

from collections.abc import Mapping
from typing import Any

from pagedkv.planner.capacity.memory_need import MemoryNeed, cache_need, live_need

__all__ = ["need_of"]


def need_of(replay: Mapping[str, Any], curve: Mapping[str, Any] | None = None) -> MemoryNeed:
    """Read the need from the document of a replay, and of a curve of the same trace.

    The bytes of a token follow from the replay's only pool; with several pools the cache is unknown.
    """
    pools, block_size = replay["pools"], replay["config"].get("block_size")
    nbytes = {name: pool["block_nbytes"] for name, pool in pools.items() if pool["block_nbytes"] is not None}
    peaks = {name: int(pool["num_live"]["peak"] or 0) for name, pool in pools.items()}
    load = float(replay["config"].get("load", 1.0))
    traffic = "the recorded traffic" if load == 1 else f"{load:g} times the recorded traffic"
    live = live_need(
        peaks, {name: pool["num_blocks"] for name, pool in pools.items()}, nbytes, f"this replay of {traffic}"
    )
    if curve is None or len(pools) != 1 or not isinstance(block_size, int) or not curve["ideal_hits"]:
        return MemoryNeed(live)
    (name,) = pools
    token_nbytes = nbytes[name] / block_size if name in nbytes else None
    return MemoryNeed(live, cache_need(curve["capacity_for"], curve["block_size"], token_nbytes))
