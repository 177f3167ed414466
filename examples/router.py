"""A router for replicas: it follows their cache events, and sends each prompt where most of it is cached.

    python examples/router.py

A router sees no tables and no blocks, only names: the SHA-256 chain of a prompt's full blocks, which it computes as the
replicas do. STORED and REMOVED tell what a replica can serve; CLEARED says that everything is gone, and GAP that events
were lost, so that the router asks for all names again. A stale view costs time, never truth: a replica verifies every
hit itself.
"""

from collections.abc import Iterator

import numpy as np

from pagedkv import BlockSpace, CacheEventKind, CacheEvents, FullAttention, Shortage, SpaceConfig, hash_request_tokens

BLOCK = 16


class Router:
    """Which names each replica has, as far as its events tell."""

    def __init__(self, num_replicas: int) -> None:
        self.names: list[set[bytes]] = [set() for _ in range(num_replicas)]

    def follow(self, replica: int, space: BlockSpace) -> None:
        """Take a replica's latest events, in their order; after a gap, start from all that it has."""
        for events in space.drain_events():
            if CacheEventKind.GAP in events.kinds:
                self.names[replica] = {bytes(digest) for digest in space.stored_blocks(events.pool).digests}
            else:
                self._take(self.names[replica], events)

    def _take(self, names: set[bytes], events: CacheEvents) -> None:
        for kind, digest in zip(events.kinds.tolist(), map(bytes, events.digests), strict=True):
            match CacheEventKind(kind):
                case CacheEventKind.STORED:
                    names.add(digest)
                case CacheEventKind.REMOVED:
                    names.discard(digest)
                case CacheEventKind.CLEARED:
                    names.clear()

    def cached_tokens(self, replica: int, prompt: list[int]) -> int:
        """Count the leading tokens that a replica has; the last token of a prompt is always computed."""
        num_blocks = 0
        for digest in hash_request_tokens(prompt[:-1], BLOCK):
            if digest not in self.names[replica]:
                break
            num_blocks += 1
        return num_blocks * BLOCK

    def route(self, prompt: list[int], loads: list[int]) -> int:
        """Choose the replica with the longest cached prefix; of equals, the one with the least load."""
        return min(range(len(loads)), key=lambda replica: (-self.cached_tokens(replica, prompt), loads[replica]))


class Replica:
    """An engine as the router sees it: it serves a prompt at once, and caches it."""

    def __init__(self, num_blocks: int) -> None:
        self.space = BlockSpace(SpaceConfig((FullAttention(block_size=BLOCK),), num_blocks, events=True))
        self.num_served_tokens = self.num_hit_tokens = 0

    def serve(self, prompt: list[int]) -> None:
        """Compute what is not cached."""
        allocation = self.space.allocate(prompt)
        assert not isinstance(allocation, Shortage), "one prompt fits the pool"
        self.space.acknowledge(self.space.plan_step().step_id)
        self.space.free(allocation.row)
        self.num_served_tokens += len(prompt)
        self.num_hit_tokens += allocation.num_hit_tokens


def conversations(num_users: int, num_turns: int) -> Iterator[list[int]]:
    """Prompts of users who take turns; each prompt continues that user's last one."""
    rng = np.random.default_rng(0)
    texts: list[list[int]] = [[] for _ in range(num_users)]
    for _ in range(num_turns):
        for user in rng.permutation(num_users).tolist():
            texts[user] = texts[user] + rng.integers(32_000, size=100).tolist()
            yield texts[user]


def hit_ratio(*, by_cache: bool) -> float:
    """Serve the conversations on two replicas, routed by what they have cached or in turn."""
    replicas, router = [Replica(num_blocks=1200) for _ in range(2)], Router(2)
    for number, prompt in enumerate(conversations(num_users=21, num_turns=8)):
        loads = [replica.num_served_tokens for replica in replicas]
        chosen = router.route(prompt, loads) if by_cache else number % 2
        replicas[chosen].serve(prompt)
        for at, replica in enumerate(replicas):
            router.follow(at, replica.space)
            assert router.cached_tokens(at, prompt) == replica.space.match(prompt).num_tokens
    return sum(replica.num_hit_tokens for replica in replicas) / sum(replica.num_served_tokens for replica in replicas)


def main() -> None:
    """Compare both ways of routing."""
    print(f"tokens that hit: {hit_ratio(by_cache=True):.1%} routed by events, {hit_ratio(by_cache=False):.1%} in turn")


if __name__ == "__main__":
    main()
