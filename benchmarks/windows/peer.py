"""A small model of what vLLM keeps of windows by default (``prefix_cache_retention_interval`` 0).

See vllm#43447 and vllm#52216. One pool for all groups, or two; in each one queue of free blocks, and names for full
blocks that are computed. A window group names only blocks that one of two windows covers: the last one of the sequence,
and the one before the point where the prompt left a chain that is cached in the full group. What a window leaves behind
goes to the back of the queue if it is named, else to the front. What is computed twice is stored twice: equal blocks
are not merged.

Two readings of "last" are at hand. ``Ends.SEQUENCE`` is the rule as documented, and the stronger one. ``Ends.PROMPT``,
where nothing of an answer is kept, comes close to what vLLM itself hits in these workloads, from other seeds:

=============  =====  =====  =====
blocks         1,500  3,000  6,000
=============  =====  =====  =====
conversations  0.465  0.701  0.817
conversations  0.322  0.604  0.810
questions      0.248  0.732  0.780
questions      0.355  0.750  0.780
=============  =====  =====  =====
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeAlias

from benchmarks.windows.chains import Chains
from benchmarks.windows.setting import BLOCK_SIZE, NUM_NEEDED, NUM_WINDOWS, WINDOW, steps, two_pools
from benchmarks.windows.workloads import Request

__all__ = ["Ends", "Peer", "PeerPool", "peer_hits"]

Name: TypeAlias = tuple[int, int]
"""Number of the group, and of the prefix."""


class Ends(Enum):
    """Which window is the last of a sequence: that at its end, or that at the end of its prompt."""

    SEQUENCE = "sequence"
    PROMPT = "prompt"


def peer_hits(
    requests: Iterable[Request], num_blocks: int, *, separate: bool = False, ends: Ends = Ends.SEQUENCE
) -> list[int]:
    """Count the tokens of each prompt that hit in ``num_blocks``, null blocks included, of one pool or of two."""
    peer = Peer(two_pools(num_blocks) if separate else (num_blocks,), ends)
    return [peer.serve(request) for request in requests]


class PeerPool:
    """Blocks: how many sequences use each, which name it has, and which free one is taken next."""

    def __init__(self, num_blocks: int) -> None:
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.num_uses = dict.fromkeys(self.free, 0)
        self.name_of: dict[int, Name] = {}
        self.blocks_of: dict[Name, list[int]] = {}

    def take(self) -> int:
        """Take the first free block; if it is named, the name is gone."""
        block, _ = self.free.popitem(last=False)
        if block in self.name_of:
            name = self.name_of.pop(block)
            self.blocks_of[name].remove(block)
            if not self.blocks_of[name]:
                del self.blocks_of[name]
        self.num_uses[block] = 1
        return block

    def share(self, name: Name) -> int:
        """Use the first block of this name once more."""
        block = self.blocks_of[name][0]
        self.num_uses[block] += 1
        self.free.pop(block, None)
        return block

    def publish(self, block: int, name: Name) -> None:
        """Give a block a name, which others may have as well."""
        self.name_of[block] = name
        self.blocks_of.setdefault(name, []).append(block)

    def give_back(self, block: int) -> None:
        """Use a block once less: free, a named one is taken last and another one first."""
        self.num_uses[block] -= 1
        if self.num_uses[block] == 0:
            self.free[block] = None
            self.free.move_to_end(block, last=block in self.name_of)


class Peer:
    """Serves one request after another."""

    def __init__(self, sizes: Sequence[int], ends: Ends) -> None:
        pools = [PeerPool(num_blocks) for num_blocks in sizes]
        self.pools = [pools[0], *(NUM_WINDOWS * [pools[-1]])]  # of each group
        self.ends = ends
        self.chains = Chains()

    def serve(self, request: Request) -> int:
        """Compute a prompt and its answer; return how many tokens of the prompt hit."""
        chain = self.chains.of(request)
        num_hittable = (len(request.prompt) - 1) // BLOCK_SIZE
        left_at = self._num_known(chain[:num_hittable])
        num_hit = self._num_hit(chain[:left_at])
        tables = self._hit_tables(chain, num_hit)
        num_computed = num_hit * BLOCK_SIZE
        boundaries = left_at, len(chain) if self.ends is Ends.SEQUENCE else num_hittable
        for stop in steps(request, num_computed):
            self._slide(tables, num_computed)
            self._grow(tables, stop)
            self._publish(tables, chain, range(num_computed // BLOCK_SIZE, stop // BLOCK_SIZE), boundaries)
            num_computed = stop
        for pool, table in zip(self.pools, tables, strict=True):
            for index in sorted(table, reverse=True):
                pool.give_back(table[index])
        return num_hit * BLOCK_SIZE

    def _num_known(self, chain: list[int]) -> int:
        """Count the leading blocks that the full group has."""
        for index, prefix in enumerate(chain):
            if (0, prefix) not in self.pools[0].blocks_of:
                return index
        return len(chain)

    def _num_hit(self, chain: list[int]) -> int:
        """Count the leading blocks of the longest hit that the windows can serve as well."""
        for end in range(len(chain), 0, -1):
            needed = chain[max(0, end - NUM_NEEDED) : end]
            groups = range(1, NUM_WINDOWS + 1)
            if all((group, prefix) in self.pools[group].blocks_of for group in groups for prefix in needed):
                return end
        return 0

    def _hit_tables(self, chain: list[int], num_hit: int) -> list[dict[int, int]]:
        first = [0] + NUM_WINDOWS * [max(0, num_hit - NUM_NEEDED)]
        return [
            {index: self.pools[group].share((group, chain[index])) for index in range(start, num_hit)}
            for group, start in enumerate(first)
        ]

    def _slide(self, tables: list[dict[int, int]], num_computed: int) -> None:
        """Give back what lies wholly below the window of the next position."""
        first_needed = max(0, num_computed - WINDOW + 1) // BLOCK_SIZE
        for pool, table in zip(self.pools[1:], tables[1:], strict=True):
            for index in sorted((index for index in table if index < first_needed), reverse=True):
                pool.give_back(table.pop(index))

    def _grow(self, tables: list[dict[int, int]], num_tokens: int) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            for index in range(max(table, default=-1) + 1, -(-num_tokens // BLOCK_SIZE)):
                table[index] = pool.take()

    def _publish(
        self, tables: list[dict[int, int]], chain: list[int], completed: range, boundaries: tuple[int, int]
    ) -> None:
        """Name what is complete now: all of the full group, and what a kept window covers of the others."""
        for index in completed:
            is_reachable = any(end - NUM_NEEDED <= index < end for end in boundaries)
            for group, table in enumerate(tables):
                if group == 0 or is_reachable:
                    self.pools[group].publish(table[index], (group, chain[index]))
