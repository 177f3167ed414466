"""TierEntries: the entries of media below device memory by replica, and the tokens of a prompt that replicas can load.

A replica has those entries of a medium that its own store lists: what it stored, what a scan found when it started, and
what was announced to it. So entries of a shared folder, server or bucket belong to each replica that can load them, and
an entry that a replica has not seen yet does not count for it. The rule is that of
:class:`~pagedkv.tiers.tier_loads.TierLoads`: behind a hit, consecutive runs, each from the first medium that has it;
and for models with windows or states the last end whose runs are all there.

For models that keep whole prefixes each run counts for the medium of the run before it, if that has it too. The runs of
a prompt are looked up some at a time, and only where some replica goes on: a prompt that is in no tier costs one
look-up of a few runs in each medium.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import lcm
from typing import Final, final

import numpy as np

from pagedkv.blocks.digests import words_of_digests
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import STORED, TierEvents
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.spec import GroupSpec, keeps_state, keeps_whole_prefix
from pagedkv.errors import ConfigurationError
from pagedkv.routing.prompts import HashedPrompt
from pagedkv.routing.residency import MOST_REPLICAS, NOTHING, ONE, Residency, Uint64Array

FIRST_RUNS: Final = 32
"""Runs of the first look-up; each further one has twice as many."""
NO_MEDIUM: Final = -1

END_WORDS: Final = np.frombuffer(b"pagedkv end of a chain, version1", ">u4").astype(np.uint32)
"""What tells the key of an end from the digest of its last block, as in :mod:`pagedkv.tiers.identity`."""


@compiled
def _count(  # noqa: PLR0913, PLR0917 - what is looked up, the hits, and where it is written
    bits: Uint64Array,
    first: int,
    replicas: np.uint64,
    held: Int32Array,
    run_tokens: int,
    most: int,
    next_run: Int32Array,
    medium_of: Int32Array,
    counts: Int32Array,
) -> np.uint64:
    """Count the tokens of runs from ``first`` on; return the replicas that may go on behind them, one bit for each.

    ``bits`` has a row for each medium, and ``counts`` a column. ``next_run`` and ``medium_of`` are the next run of each
    replica, and the medium of the last one.
    """
    num_media, end = bits.shape[0], first + bits.shape[1]
    going = NOTHING
    for replica in range(MOST_REPLICAS):
        mask = ONE << np.uint64(replica)
        if replicas & mask == NOTHING:
            continue
        run, medium = next_run[replica], medium_of[replica]
        while run < end:
            if medium == NO_MEDIUM or bits[medium, run - first] & mask == NOTHING:
                medium = NO_MEDIUM
                for number in range(num_media - 1, -1, -1):
                    if bits[number, run - first] & mask != NOTHING:
                        medium = number
                if medium == NO_MEDIUM:
                    break
            num_tokens = min((run + 1) * run_tokens, most) - max(run * run_tokens, held[replica])
            if num_tokens > 0:
                counts[replica, medium] += num_tokens
            run += 1
        next_run[replica], medium_of[replica] = run, medium
        if run >= end:
            going |= mask
    return going


def tokens_behind_hits(  # noqa: PLR0913, PLR0917 - tables, a prompt, and its hits
    media: Sequence[Residency], keys: Uint32Array, held: Sequence[int], replicas: int, run_tokens: int, most: int
) -> Int32Array:
    """Count the tokens behind each replica's hit that it can load: int32 ``[64, media]``.

    Args:
        media: the tables of entries, the fastest medium first.
        keys: uint32 ``[runs, 8]``, of the prompt's runs.
        held: tokens that hit, by number of the replica.
        replicas: the replicas to count for, one bit for each.
        run_tokens: tokens of a run.
        most: tokens of the prompt that may hit.

    Cost: O(media x runs up to the end of the longest load + replicas x these runs).
    """
    hits = np.array(held, np.int32)
    next_run = hits // np.int32(run_tokens)
    medium_of = np.full(MOST_REPLICAS, NO_MEDIUM, np.int32)
    counts = np.zeros((MOST_REPLICAS, len(media)), np.int32)
    going, at_once = replicas, FIRST_RUNS
    while going:
        first = min(int(next_run[number]) for number in range(going.bit_length()) if going >> number & 1)
        if first >= len(keys):
            break
        some = np.ascontiguousarray(keys[first : first + at_once])
        bits = np.empty((len(media), len(some)), np.uint64)
        for row, entries in zip(bits, media, strict=True):
            entries.look_up(some, out=row)
        going = int(_count(bits, first, np.uint64(going), hits, run_tokens, most, next_run, medium_of, counts))
        at_once *= 2
    return counts


@final
class _Medium:
    """The entries of one medium."""

    def __init__(self) -> None:
        self.entries = Residency()
        self.run_tokens = 0


@final
class TierEntries:
    """Entries of all replicas, by medium.

    Args:
        groups: the model's KV-cache groups.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        sizes = [group.block_size for group in groups]
        tokens = [group.block_size for group in groups if not keeps_state(group)]
        self._block_size = min(tokens, default=min(sizes))
        self._alignment = lcm(*sizes)
        self._has_runs = any(map(keeps_whole_prefix, groups))
        self._has_ends = not all(map(keeps_whole_prefix, groups))
        self._media: dict[str, _Medium] = {}

    @property
    def media(self) -> tuple[str, ...]:
        """Media of which entries were announced."""
        return tuple(self._media)

    @property
    def nbytes(self) -> int:
        """Size of the tables in bytes."""
        return sum(medium.entries.nbytes for medium in self._media.values())

    def apply(self, events: TierEvents, replica: int) -> None:
        """Apply events of a replica, by its number, in their order. O(events).

        Raises ConfigurationError: a run has a length that the model's blocks do not have.
        """
        medium = self._media.setdefault(events.medium, _Medium())
        words = words_of_digests(events.keys, len(events))
        zeros = np.zeros(len(events), np.int32)
        is_stored = events.kinds == STORED
        if is_stored.any():
            if events.run_tokens % self._block_size:
                raise ConfigurationError(
                    f"a run of {events.run_tokens} tokens in {events.medium}, but the model's blocks have "
                    f"{self._block_size}: name a replica that serves the same model"
                )
            medium.run_tokens = events.run_tokens
        for run in np.split(np.arange(len(events)), np.flatnonzero(np.diff(is_stored)) + 1):
            if len(run):
                change = medium.entries.add if is_stored[run[0]] else medium.entries.remove
                change(words[run], zeros[run], replica)

    def clear(self, replica: int) -> None:
        """Remove all entries of a replica. O(tables)."""
        for medium in self._media.values():
            medium.entries.clear(replica)

    def num_entries_of(self, replica: int) -> dict[str, int]:
        """Count a replica's entries in each medium. O(tables)."""
        return {name: medium.entries.num_blocks_of(replica) for name, medium in self._media.items()}

    def hits(
        self, prompt: HashedPrompt, held: Sequence[int], replicas: Collection[int], order: Sequence[str]
    ) -> dict[int, dict[str, int]]:
        """Return the tokens of a prompt that replicas can load behind their hits.

        Args:
            prompt: the prompt.
            held: by number of the replica: tokens of the prompt that it has cached.
            replicas: numbers of the replicas.
            order: the media, the fastest first.

        Returns:
            By number of the replica, for those that have any: tokens by medium, the fastest first.

        Cost: O(loaded runs x (media + replicas)) where all groups keep whole prefixes; for other models
        O(blocks of the prompt x media), and O(runs x media) for each replica that has any.
        """
        media = [name for name in order if name in self._media]
        run_tokens = max((self._media[name].run_tokens for name in media), default=0)
        digests = prompt.digests.get(self._block_size)
        if digests is None or not media or (self._has_runs and not run_tokens):
            return {}
        per_run = run_tokens // self._block_size
        if not self._has_ends:
            tables = [self._media[name].entries for name in media]
            mask = sum(1 << replica for replica in replicas)
            most = prompt.num_tokens - 1
            counted = tokens_behind_hits(tables, digests[per_run - 1 :: per_run], held, mask, run_tokens, most)
            return _by_medium(media, replicas, counted.tolist())
        runs = self._look_up(media, digests[per_run - 1 :: per_run] if self._has_runs else digests[:0])
        ends = self._look_up(media, digests ^ END_WORDS if self._has_ends else digests[:0])
        present = np.bitwise_or.reduce([np.bitwise_or.reduce(each) for each in (*runs, *ends) if len(each)] or [0])
        counts: dict[int, Sequence[int]] = {}
        for replica in replicas:
            if not int(present) >> replica & 1:
                continue
            own = np.uint64(1 << replica)
            of_replica = _Owned([each & own != 0 for each in runs], [each & own != 0 for each in ends])
            counts[replica] = self._counts(of_replica, held[replica], run_tokens, prompt.num_tokens)
        return _by_medium(media, counts, counts)

    def _look_up(self, media: Sequence[str], keys: Uint32Array) -> list[Uint64Array]:
        return [self._media[name].entries.look_up(np.ascontiguousarray(keys)) for name in media]

    def _counts(self, owned: "_Owned", held: int, run_tokens: int, num_tokens: int) -> list[int]:
        """Count the tokens behind a hit, up to an end, that one replica can load from each medium."""
        spans = owned.run_spans(held // run_tokens, run_tokens) if self._has_runs else []
        spans = self._up_to_end(owned, spans, held, run_tokens, num_tokens)
        counts = [0] * owned.num_media
        for medium, begin, end in spans:
            counts[medium] += max(0, min(end, num_tokens - 1) - max(begin, held))
        return counts

    def _up_to_end(
        self, owned: "_Owned", spans: list[tuple[int, int, int]], held: int, run_tokens: int, num_tokens: int
    ) -> list[tuple[int, int, int]]:
        """Cut the runs at the last end whose runs are all there, and add the end."""
        whole_before = held // run_tokens * run_tokens if self._has_runs else 0
        reach = spans[-1][2] if spans else whole_before
        for end in range(num_tokens // self._alignment * self._alignment, held, -self._alignment):
            medium = owned.medium_of_end(end // self._block_size - 1)
            whole = end // run_tokens * run_tokens if self._has_runs else held
            if medium is not None and (whole <= reach or not self._has_runs):
                cut = [(number, begin, min(last, whole)) for number, begin, last in spans if begin < whole]
                return [*cut, (medium, whole, end)]
        return []


def _by_medium(
    media: Sequence[str], replicas: Iterable[int], counts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
) -> dict[int, dict[str, int]]:
    """Name the counts of each replica that has any, by its number."""
    return {
        replica: {name: count for name, count in zip(media, counts[replica], strict=True) if count}
        for replica in replicas
        if any(counts[replica])
    }


@final
class _Owned:
    """The entries of a prompt that one replica has: bool ``[runs]`` and bool ``[blocks]`` for each medium."""

    def __init__(self, runs: Sequence[np.ndarray], ends: Sequence[np.ndarray]) -> None:
        self._runs, self._ends = runs, ends

    @property
    def num_media(self) -> int:
        return len(self._runs)

    def run_spans(self, first: int, run_tokens: int) -> list[tuple[int, int, int]]:
        """Return consecutive runs from one on: the medium, and the positions of their first and last token."""
        spans: list[tuple[int, int, int]] = []
        while True:
            medium = next((number for number, has in enumerate(self._runs) if first < len(has) and has[first]), None)
            if medium is None:
                return spans
            has = self._runs[medium][first:]
            count = len(has) if has.all() else int(has.argmin())
            spans.append((medium, first * run_tokens, (first + count) * run_tokens))
            first += count

    def medium_of_end(self, block: int) -> int | None:
        """Return the first medium that has the end behind a block."""
        return next((number for number, has in enumerate(self._ends) if has[block]), None)
