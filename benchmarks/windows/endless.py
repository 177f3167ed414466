"""Hits in a pool that never evicts and sheds nothing: what is possible at all."""

from collections.abc import Iterable

from benchmarks.windows.chains import Chains
from benchmarks.windows.setting import BLOCK_SIZE
from benchmarks.windows.workloads import Request

__all__ = ["endless_hits"]


def endless_hits(requests: Iterable[Request]) -> list[int]:
    """Count the tokens of each prompt that were computed before; the last token always is computed again."""
    chains = Chains()
    known: set[int] = set()
    hits = []
    for request in requests:
        chain = chains.of(request)
        num_hit_blocks = 0
        while num_hit_blocks < (len(request.prompt) - 1) // BLOCK_SIZE and chain[num_hit_blocks] in known:
            num_hit_blocks += 1
        known.update(chain)
        hits.append(num_hit_blocks * BLOCK_SIZE)
    return hits
