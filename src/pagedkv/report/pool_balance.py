"""Warns about badly divided memory: one pool is full while another is idle.

It uses the pools of a replay's result alone, so that terminal and page agree.
"""

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["pool_balance"]

FULL: Final = 0.9
IDLE: Final = 0.5
"""Shares of a pool that are live at its peak: from ``FULL`` on it is short of blocks, up to ``IDLE`` it has too
many."""


def pool_balance(pools: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe a pool that was full while another was idle; an empty text if there is none.

    Cached blocks count as idle only in the pool that is not full: they serve no running request.
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
