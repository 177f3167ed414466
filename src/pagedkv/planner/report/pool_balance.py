"""Whether memory lies well among pools: told where one is full while another lies idle.

Knows the pools of a replay's result alone, so that the tables on the terminal and the page say the same.
"""

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["pool_balance"]

FULL: Final = 0.9
IDLE: Final = 0.5
"""Shares of a pool that are live at its peak: beyond the one it is short of blocks, below the other it has too many."""


def pool_balance(pools: Mapping[str, Mapping[str, Any]]) -> str:
    """Say so where one pool was full while another one's memory lay idle; an empty text where it lies well.

    Cached blocks count as idle only in the pool that is not full: they serve no request that runs.
    """
    peaks = {name: pool["num_live"]["peak"] or 0 for name, pool in pools.items()}
    shares = {name: peaks[name] / max(1, pool["num_blocks"]) for name, pool in pools.items()}
    if not shares:
        return ""
    full = max(shares, key=lambda name: shares[name])
    idle = min(shares, key=lambda name: shares[name])
    if shares[full] < FULL or shares[idle] > IDLE:
        return ""
    blocks = ",".join(f"{name}={pool['num_blocks'] + 1}" for name, pool in pools.items())
    return (
        f"Pool {full} was {shares[full]:.0%} live at its peak, {idle} {shares[idle]:.0%}: to move memory from one to "
        f"the other, give each its own number, now `num_blocks={blocks}`"
    )
