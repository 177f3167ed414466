"""ReplicaIndex: which blocks each replica of a cluster has cached, by the events of the replicas' block spaces.

A *lifetime* is the name of one run of a replica's process, in which batches of events are numbered from 0. The index of
a replica is

    EMPTY       no event was applied, or another lifetime has begun: the index has no blocks
    EXACT       all events of the lifetime were applied, or a snapshot and all events since
    DEGRADED    a batch was lost: the replica may have evicted blocks of the index, and stored others; or the engine
                names no lifetime, so that nothing proves that none was lost (``is_proven``)

    EMPTY --- batch 0 | snapshot ---> EXACT --- a gap ---> DEGRADED --- snapshot ---> EXACT
      ^---------------------------- another lifetime | forget ----------------------------|
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias, final

import numpy as np

from pagedkv.blocks.digests import words_of_digests
from pagedkv.contract.answers import CacheEventKind, CacheEvents, StoredBlocks, TierEvents
from pagedkv.contract.arguments import as_count
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import GroupSpec, TokenIds
from pagedkv.errors import ConfigurationError
from pagedkv.routing.prompts import HashedPrompt, PromptHasher
from pagedkv.routing.residency import MOST_REPLICAS, HitLengths, Residency, Uint64Array, leading_blocks
from pagedkv.routing.tier_entries import TierEntries

Note: TypeAlias = Callable[[str, float | None, Mapping[str, object]], None]
"""Called with each input of a router: its kind, its time in seconds or None, and its values."""

LARGEST_BATCH: Final = 2**62
DEVICE: Final = "GPU"


class IndexState(StrEnum):
    """How complete the index of a replica is."""

    EMPTY = "empty"
    EXACT = "exact"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """The state of a replica in the index.

    Args:
        name: the replica's name.
        lifetime: lifetime of its process; "" before the first batch.
        state: how complete its index is.
        since_s: time of the last change of ``state``.
        next_batch: number of the next expected batch.
        num_blocks: its blocks in the index.
        num_lost_batches: lost batches of this lifetime.
        num_tier_entries: its entries in each medium below device memory.
    """

    name: str
    lifetime: str
    state: IndexState
    since_s: float
    next_batch: int
    num_blocks: int
    num_lost_batches: int
    num_tier_entries: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Replica:
    number: int
    lifetime: str = ""
    state: IndexState = IndexState.EMPTY
    since_s: float = 0.0
    next_batch: int = 0
    num_lost_batches: int = 0


@final
class ReplicaIndex:
    """Cached blocks of up to 64 replicas of one model.

    Args:
        groups: the model's KV-cache groups, as in the replicas' ``SpaceConfig``.
        weights_epoch: the epoch of the replicas' ``SpaceConfig``.
        num_expected: number of blocks for which memory is allocated at once; the tables grow beyond.

    Raises:
        ConfigurationError: no group has prefix caching.
    """

    def __init__(self, groups: Sequence[GroupSpec], *, weights_epoch: str = "", num_expected: int = 0) -> None:
        self._lengths = HitLengths(groups)
        self._hasher = PromptHasher(self._lengths.block_sizes, weights_epoch)
        self._pool_of_group = [group.pool for group in groups]
        self._pools = {name: Residency(num_expected) for name in dict.fromkeys(self._pool_of_group)}
        self._unpromised = Residency(), Residency()
        self._tiers = TierEntries(groups)
        self._replicas: dict[str, _Replica] = {}
        self._vacant = list(range(MOST_REPLICAS - 1, -1, -1))
        self._mask = 0  # the bits of all replicas
        self._note: Note | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the replicas, in the order in which they were added."""
        return tuple(self._replicas)

    @property
    def alignment(self) -> int:
        """Hits end at multiples of this number of tokens."""
        return self._lengths.alignment

    @property
    def nbytes(self) -> int:
        """Size of the tables of blocks, in bytes."""
        return sum(blocks.nbytes for blocks in self._pools.values()) + self._tiers.nbytes

    def note_inputs(self, note: Note) -> None:
        """Set a function that is called with each input from replicas before it is applied; routers that record do."""
        self._note = note

    # Replicas and their events

    def add_replica(self, name: str, now_s: float = 0.0) -> None:
        """Add a replica with an empty index.

        Raises:
            ConfigurationError: the index has this replica already, or 64 replicas.
        """
        if name in self._replicas:
            raise ConfigurationError(f"replica {name!r} is in the index already")
        if not self._vacant:
            raise ConfigurationError(f"an index has at most {MOST_REPLICAS} replicas")
        replica = self._replicas[name] = _Replica(self._vacant.pop(), since_s=now_s)
        self._mask |= 1 << replica.number

    def remove_replica(self, name: str) -> None:
        """Remove a replica and its blocks. O(table). Raises ConfigurationError for an unknown one."""
        replica = self._replica(name)
        self._clear(replica)
        self._vacant.append(replica.number)
        self._mask &= ~(1 << replica.number)
        del self._replicas[name]

    def apply(  # noqa: PLR0913 - a batch, and what it proves
        self,
        name: str,
        lifetime: str,
        batch: int,
        events: Collection[CacheEvents | TierEvents],
        now_s: float = 0.0,
        *,
        is_proven: bool = True,
    ) -> bool:
        """Apply a batch of a replica's events; return whether the replica's index is exact afterwards.

        A batch that was applied before is ignored. A batch after a gap is applied, and the state becomes DEGRADED. A
        batch of another lifetime empties the replica's index first, so the transport must not deliver batches of an
        earlier lifetime afterwards.

        Args:
            name: the replica.
            lifetime: lifetime of its process.
            batch: number of the batch in this lifetime.
            events: events of each pool, from :meth:`BlockSpace.drain_events <pagedkv.BlockSpace.drain_events>`, and of
                each medium below device memory.
            now_s: the caller's time.
            is_proven: whether the engine itself names its lifetime; if not, the index is DEGRADED at best.

        Raises:
            ConfigurationError: the replica is unknown, or a number is below 0.
        """
        replica = self._replica(name)
        as_count(batch, "the number of a batch", most=LARGEST_BATCH)
        if self._note is not None:
            values = {"replica": name, "lifetime": lifetime, "batch": batch, "events": tuple(events)}
            values |= {} if is_proven else {"is_proven": False}
            self._note("events", now_s, values)
        self._begin_lifetime(replica, lifetime, now_s)
        if batch < replica.next_batch:
            return replica.state is IndexState.EXACT
        num_lost = batch - replica.next_batch
        replica.num_lost_batches += num_lost
        if num_lost:
            self._set_state(replica, IndexState.DEGRADED, now_s)
        elif replica.state is IndexState.EMPTY:
            self._set_state(replica, IndexState.EXACT if is_proven else IndexState.DEGRADED, now_s)
        replica.next_batch = batch + 1
        for each in events:
            if isinstance(each, TierEvents):
                self._tiers.apply(each, replica.number)
            else:
                self._apply(replica, each, now_s)
        return replica.state is IndexState.EXACT

    def note_alive(
        self, name: str, lifetime: str, next_batch: int, now_s: float = 0.0, *, is_proven: bool = True
    ) -> bool:
        """Apply a heartbeat with the number of a replica's next batch, which shows whether earlier batches were lost.

        Returns whether the replica's index is exact. Raises as :meth:`apply`.
        """
        replica = self._replica(name)
        as_count(next_batch, "the number of a batch", most=LARGEST_BATCH)
        if self._note is not None:
            values = {"replica": name, "lifetime": lifetime, "next_batch": next_batch}
            self._note("alive", now_s, values | ({} if is_proven else {"is_proven": False}))
        self._begin_lifetime(replica, lifetime, now_s)
        if next_batch > replica.next_batch:
            replica.num_lost_batches += next_batch - replica.next_batch
            replica.next_batch = next_batch
            self._set_state(replica, IndexState.DEGRADED, now_s)
        elif not next_batch and is_proven:
            self._set_state(replica, IndexState.EXACT, now_s)
        return replica.state is IndexState.EXACT

    def restore(
        self,
        name: str,
        lifetime: str,
        next_batch: int,
        blocks: Collection[StoredBlocks | TierEvents],
        now_s: float = 0.0,
    ) -> None:
        """Replace the index of a replica by a snapshot; its state becomes EXACT. An outdated snapshot is ignored.

        Args:
            name: the replica.
            lifetime: lifetime of its process.
            next_batch: number of the first batch whose events the snapshot does not contain.
            blocks: blocks of each pool, from :meth:`BlockSpace.stored_blocks <pagedkv.BlockSpace.stored_blocks>`, and
                the entries of each medium below device memory.
            now_s: the caller's time.

        Raises:
            ConfigurationError: the replica is unknown, or a number is below 0.
        """
        replica = self._replica(name)
        as_count(next_batch, "the number of a batch", most=LARGEST_BATCH)
        if self._note is not None:
            values = {"replica": name, "lifetime": lifetime, "next_batch": next_batch, "blocks": tuple(blocks)}
            self._note("snapshot", now_s, values)
        self._begin_lifetime(replica, lifetime, now_s)
        if next_batch < replica.next_batch:
            return  # older than the applied batches
        self._clear(replica)
        for each in blocks:
            if isinstance(each, TierEvents):
                self._tiers.apply(each, replica.number)
                continue
            words = words_of_digests(each.digests, len(each.groups))
            self._pool(each.pool).add(words, each.groups, replica.number)
        replica.next_batch = next_batch
        self._set_state(replica, IndexState.EXACT, now_s)

    def forget(self, name: str, now_s: float = 0.0) -> None:
        """Empty the index of a replica, for example when it does not answer. O(table). Raises ConfigurationError."""
        replica = self._replica(name)
        if self._note is not None:
            self._note("forget", now_s, {"replica": name})
        self._clear(replica)
        self._set_state(replica, IndexState.EMPTY, now_s)
        replica.lifetime, replica.next_batch, replica.num_lost_batches = "", 0, 0

    def view(self, name: str) -> ReplicaView:
        """Return the state of a replica. O(table). Raises ConfigurationError for an unknown one."""
        replica = self._replica(name)
        return ReplicaView(
            name,
            replica.lifetime,
            replica.state,
            replica.since_s,
            replica.next_batch,
            sum(blocks.num_blocks_of(replica.number) for blocks in self._pools.values()),
            replica.num_lost_batches,
            self._tiers.num_entries_of(replica.number),
        )

    def state(self, name: str) -> IndexState:
        """Return how complete the index of a replica is. O(1). Raises ConfigurationError for an unknown one."""
        return self._replica(name).state

    # Prompts

    def hash(self, token_ids: TokenIds, keys: RequestKeys = NO_KEYS) -> HashedPrompt:
        """Hash a prompt for :meth:`hits`. O(tokens). Raises TokenError.

        Prompts of 8,192 tokens or more are kept in 64 MiB, so that those that continue them are hashed from there on.
        """
        return self._hasher.hash(token_ids, keys)

    def look_up(self, prompt: HashedPrompt) -> list[Uint64Array]:
        """Return for each cached group uint64 ``[blocks]``: the replicas that have each block, one bit for each."""
        return [
            self._pools[self._pool_of_group[number]].look_up(prompt.digests[size], number)
            for number, size in zip(self._lengths.numbers, self._lengths.block_sizes, strict=True)
        ]

    def hits(self, prompt: HashedPrompt, bits: Sequence[Uint64Array] | None = None) -> dict[str, int]:
        """Return how many tokens of a prompt hit in each replica. O(blocks of the prompt x replicas).

        Args:
            prompt: the prompt.
            bits: the replicas that have each block, as from :meth:`look_up`; None: look them up.
        """
        if bits is None:
            held, _ = self.hits_and_promised(prompt)
        else:
            held = self._lengths_of(bits, max(0, prompt.num_tokens - 1))
        return {name: held[replica.number] for name, replica in self._replicas.items()}

    def hits_and_promised(
        self, prompt: HashedPrompt, promised: tuple[Residency, Residency] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return how many tokens of a prompt hit in each replica, by its number, without and with promises.

        Args:
            prompt: the prompt.
            promised: two tables of promised blocks; None: there are none.

        Cost: O(blocks of the prompt) for one group that keeps whole prefixes, where blocks after the longest hit are
        not looked up; O(blocks x replicas) for other models.
        """
        tables = promised or self._unpromised
        most = max(0, prompt.num_tokens - 1)
        if self._lengths.is_plain:
            (number,), (size,) = self._lengths.numbers, self._lengths.block_sizes
            pool = self._pools[self._pool_of_group[number]]
            blocks = leading_blocks(pool, tables, prompt.digests[size][: most // size], number, self._mask)
            held, had = (size * blocks).tolist()
            return held, had
        bits = self.look_up(prompt)
        more = [
            tables[0].look_up(prompt.digests[size], number) | tables[1].look_up(prompt.digests[size], number)
            for number, size in zip(self._lengths.numbers, self._lengths.block_sizes, strict=True)
        ]
        held = self._lengths_of(bits, most)
        if not any(map(np.any, more)):
            return held, held
        return held, self._lengths_of([mine | theirs for mine, theirs in zip(bits, more, strict=True)], most)

    @property
    def tier_media(self) -> tuple[str, ...]:
        """Media below device memory of which replicas have announced entries."""
        return self._tiers.media

    def tier_hits(self, prompt: HashedPrompt, held: Sequence[int], order: Sequence[str]) -> dict[int, dict[str, int]]:
        """Return the tokens of a prompt that replicas can load behind their hits, by number of the replica and medium.

        Args:
            prompt: the prompt.
            held: tokens that hit, by number of the replica, as from :meth:`hits_and_promised`.
            order: the media, the fastest first: where several have an entry, it counts for the first.

        Cost: O(loaded runs x (media + replicas)) where all groups keep whole prefixes; for other models
        O(blocks of the prompt x media + runs x replicas).
        """
        return self._tiers.hits(prompt, held, [each.number for each in self._replicas.values()], order)

    def hits_by_medium(self, prompt: HashedPrompt, order: Sequence[str] | None = None) -> dict[str, dict[str, int]]:
        """Return how many tokens of a prompt hit in each replica: on the device as "GPU", and behind that by medium.

        Args:
            prompt: the prompt.
            order: the media below the device, the fastest first; None: as they were first announced.

        Cost: O(blocks of the prompt x (replicas + media)).
        """
        held, _ = self.hits_and_promised(prompt)
        tiers = self.tier_hits(prompt, held, self.tier_media if order is None else order)
        return {
            name: {DEVICE: held[replica.number], **tiers.get(replica.number, {})}
            for name, replica in self._replicas.items()
        }

    def number_of(self, name: str) -> int:
        """Return the number of a replica's bit. Raises ConfigurationError for an unknown one."""
        return self._replica(name).number

    @property
    def cached_groups(self) -> list[tuple[int, int, str]]:
        """Number, block size and pool of each cached group."""
        pools = [self._pool_of_group[number] for number in self._lengths.numbers]
        return list(zip(self._lengths.numbers, self._lengths.block_sizes, pools, strict=True))

    # Inside

    def _lengths_of(self, bits: Sequence[Uint64Array], most: int) -> list[int]:
        """Return how many tokens hit in each replica, by its number, given the replicas that have each block."""
        present = int(np.bitwise_or.reduce([np.bitwise_or.reduce(each) for each in bits if len(each)] or [0]))
        hits = [0] * MOST_REPLICAS
        for replica in self._replicas.values():
            if present >> replica.number & 1:
                mask = np.uint64(1 << replica.number)
                hits[replica.number] = self._lengths.num_hit_tokens([each & mask != 0 for each in bits], most)
        return hits

    def _replica(self, name: str) -> _Replica:
        if name not in self._replicas:
            raise ConfigurationError(f"the index has no replica {name!r}: it has {list(self._replicas)}")
        return self._replicas[name]

    def _pool(self, name: str) -> Residency:
        if name not in self._pools:
            raise ConfigurationError(f"the model has no pool {name!r}: it has {list(self._pools)}")
        return self._pools[name]

    def _clear(self, replica: _Replica) -> None:
        for blocks in self._pools.values():
            blocks.clear(replica.number)
        self._tiers.clear(replica.number)

    def _begin_lifetime(self, replica: _Replica, lifetime: str, now_s: float) -> None:
        if replica.lifetime != lifetime:
            self._clear(replica)
            replica.lifetime, replica.next_batch, replica.num_lost_batches = lifetime, 0, 0
            self._set_state(replica, IndexState.EMPTY, now_s)

    @staticmethod
    def _set_state(replica: _Replica, state: IndexState, now_s: float) -> None:
        if replica.state is not state:
            replica.state, replica.since_s = state, now_s

    def _apply(self, replica: _Replica, events: CacheEvents, now_s: float) -> None:
        """Apply the events of one pool in their order, a run of one kind at a time."""
        kinds, blocks = events.kinds, self._pool(events.pool)
        words = words_of_digests(events.digests, len(kinds))
        breaks = np.flatnonzero(np.diff(kinds)) + 1
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(kinds)], strict=True):
            if begin == end:
                continue
            kind, some = CacheEventKind(int(kinds[begin])), slice(begin, end)
            if kind is CacheEventKind.STORED:
                blocks.add(words[some], events.groups[some], replica.number)
            elif kind is CacheEventKind.REMOVED:
                blocks.remove(words[some], events.groups[some], replica.number)
            elif kind is CacheEventKind.CLEARED:
                blocks.clear(replica.number)
            else:  # a gap: the replica's own log of events was too short
                self._set_state(replica, IndexState.DEGRADED, now_s)
