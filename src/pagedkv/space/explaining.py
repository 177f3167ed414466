"""Explaining a miss: where a prompt's hit ends, which group ends it, and what became of the block that it lacks.

A question throughout. What is still cached is looked at itself; of what is gone the ghosts of the pool tell
(:mod:`pagedkv.pool.ghosts`), and where they have lost some, "never stored" becomes "unknown". For the block that a
group lacks, the first of these that holds is the cause::

    it has a name after all           being computed, or orphaned
    a ghost of it                     why that went, and how long ago
    a ghost under an earlier epoch    another weights epoch
    cached under other extra keys     another adapter, salt, or medium
    what it continues goes on else    changed tokens
    a window or a state, and whole prefixes of the same content are cached     window gone, state gone
    no ghost, and none lost           never stored; else unknown

Tokens are compared with content under the same keys alone: nobody is told what another tenant has asked.
"""

from itertools import groupby, pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from pagedkv.arrays import Int32Array, Uint32Array
from pagedkv.explanation import Explanation, Miss, MissCause
from pagedkv.keys import EPOCH, LORA, MEDIA, SALT, differing_tags
from pagedkv.pool import ghosts
from pagedkv.pool.block_keys import keys_of_blocks
from pagedkv.pool.blocks import EXTRA, LIFE, NAME, NULL_BLOCK, PARENT, PARENT_LIFE, SUCCESSOR, PoolArrays
from pagedkv.pool.digests import ROOT_DIGEST, hash_block_tokens
from pagedkv.pool.prefix_index import find, is_child_of
from pagedkv.space.hits import PrefixHit, Prompt
from pagedkv.space.prompts import extra_ids_of
from pagedkv.space.state import Group, SpaceState
from pagedkv.spec import keeps_state
from pagedkv.tables.explaining import CAUSE_OF_GHOST, FORGOTTEN, NAMED, NEVER, digest_behind, find_fates
from pagedkv.tables.matching import holds_tokens
from pagedkv.tables.rows import HIT_ALIGNMENT, NAME_IN_POOL

__all__ = ["explain", "note_admission", "tell_misses"]

OTHER_KEYS: Final = {  # in the order in which they are told, where several differ
    EPOCH: MissCause.OTHER_EPOCH,
    LORA: MissCause.OTHER_ADAPTER,
    SALT: MissCause.OTHER_SALT,
    MEDIA: MissCause.OTHER_MEDIA,
}


NO_DIGESTS: Final = np.zeros((0, 8), np.uint32)
_Run: TypeAlias = tuple[int, int, MissCause]
"""Where tokens begin and end, and why they do not hit."""


class Verdict(NamedTuple):
    """What became of a block.

    Args:
        cause: why it does not hit.
        position: the token that the cause concerns.
        token_id, age: as in :class:`~pagedkv.Explanation`.
    """

    cause: MissCause
    position: int
    token_id: int | None = None
    age: int | None = None


class _Lack(NamedTuple):
    """The block that ends a hit.

    Args:
        group: the group that lacks it; place: its logical number there.
        parent: the block before it, as far as that is cached and leads there; None where it is not.
    """

    group: Group
    place: int
    parent: int | None


def explain(state: SpaceState, prompt: Prompt, hit: PrefixHit, *, is_thorough: bool = True) -> Explanation:
    """Explain a hit that was found just now.

    Args:
        state: the space.
        prompt: the prompt.
        hit: what it hits.
        is_thorough: look at all that continues what hits, and tell of all tokens that do not hit; else at the latest
            continuation alone, and at the first block. O(blocks of the pool + of the prompt), or O(1).
    """
    search = _Search(state, prompt, hit, is_thorough=is_thorough)
    verdict, group = search.run()
    misses = search.misses(verdict) if is_thorough else ()
    index = None if group is None else group.index
    return Explanation(len(prompt.tokens), hit.num_tokens, verdict.cause, verdict.position, index, *verdict[2:], misses)


def tell_misses(state: SpaceState, hit: PrefixHit) -> tuple[Miss, ...]:
    """Tell of all tokens of a prompt that do not hit why, looking at the latest continuation alone. O(tokens)."""
    search = _Search(state, hit.prompt, hit, is_thorough=False)
    return search.misses(search.run()[0])


def note_admission(state: SpaceState, row: int, hit: PrefixHit) -> None:
    """Record why the hit of a prompt ends, to which a row is about to be given, if the space records that.

    Where the chain of the one group that keeps whole prefixes ends with the hit, a loop finds out: 0.7 us.
    """
    book, group = state.explanations, hit.ends_chain_of
    if book is None:
        return
    if group is None or hit.loading is not None or hit.tails or hit.num_replayed or not _is_bare(state, hit):
        book.put_away(row)
    elif state.loops.record_miss(
        group.pool.arrays,
        group.arrays,
        state.extra_keys.arrays,
        hit.prompt.tokens,
        hit.block_ids[group.index],
        hit.prompt.max_hit_tokens,
        row,
        state.serials,
        book.arrays,
    ):
        return
    book.record(row, int(state.serials[row]), explain(state, hit.prompt, hit, is_thorough=False))


def _is_bare(state: SpaceState, hit: PrefixHit) -> bool:
    """Tell whether the block behind a hit has no extra keys of its own, and no earlier epoch concerns it."""
    if hit.num_tokens:
        return not hit.prompt.keys.media
    return not state.former_epochs and not hit.prompt.has_extra_keys(state.identity_epoch)


class _Search:
    """One prompt, and why it hits no more than it does.

    Attributes:
        _most: where the longest hit that any cache could serve ends; _bounded: the same with the caller's bound.
        _digests: of a lane's first blocks, as far as they were needed.
    """

    def __init__(self, state: SpaceState, prompt: Prompt, hit: PrefixHit, *, is_thorough: bool) -> None:
        self._state = state
        self._prompt = prompt
        self._hit = hit
        self._is_thorough = is_thorough
        self._alignment = max(1, int(state.cached_groups[0].arrays.parameters[HIT_ALIGNMENT]))
        self._most = self._aligned(len(prompt.tokens) - 1)
        self._bounded = self._aligned(prompt.num_hittable)
        self._digests: dict[int, Uint32Array] = {}

    def _aligned(self, length: int) -> int:
        return length // self._alignment * self._alignment

    # Where it ended

    def run(self) -> tuple[Verdict, Group | None]:
        """Tell why the hit ended, and which group ended it."""
        end, hit = self._hit.num_tokens, self._hit
        if not self._state.config.prefix_caching:
            return Verdict(MissCause.NOT_CACHING, 0), None
        if end >= self._most:
            return Verdict(MissCause.NOT_FULL, end), None
        if end >= self._bounded:
            return Verdict(MissCause.BOUNDED, end), None
        if hit.loading is not None:
            return Verdict(MissCause.LOADING, end), None
        lack = self._first_lack(self._aligned(end) + self._alignment)
        if lack is None:
            return Verdict(MissCause.BEING_COMPUTED, end), None
        return self._verdict(lack), lack.group

    def _first_lack(self, length: int) -> _Lack | None:
        """Find the first group that could not serve a hit of so many tokens; None if each of them could, alone."""
        lack = self._first_lack_of_chains(length)
        for group in self._state.cached_groups if lack is None else ():
            if not group.keeps_whole_prefix:
                index = self._missing_block(group, length)
                if index >= 0:
                    return _Lack(group, index, self._block_at(group, index - 1))
        return lack

    def _first_lack_of_chains(self, length: int) -> _Lack | None:
        """Find the group that ends a hit first of those that keep whole prefixes; None if all go on for so long."""
        lacks = []
        for group in self._state.cached_groups:
            if group.keeps_whole_prefix:
                chain = self._chain(group, length)
                lacks.append(_Lack(group, len(chain), int(chain[-1]) if len(chain) else NULL_BLOCK))
        first = min(lacks, key=lambda lack: lack.place * lack.group.block_size, default=None)
        return first if first is not None and first.place * first.group.block_size < length else None

    def _chain(self, group: Group, length: int) -> Int32Array:
        """Follow the prompt through a group that keeps whole prefixes, for at most so many tokens."""
        if group is self._state.only_chain:
            return self._hit.block_ids[group.index]
        found = np.empty(length // group.block_size, np.int32)
        extra_ids = extra_ids_of(self._state, self._prompt, group.block_size, len(found))
        num_hits, _, _ = self._state.loops.match_chain(
            group.pool.arrays,
            group.arrays,
            self._prompt.tokens,
            extra_ids,
            self._state.extra_keys.arrays,
            self._prompt.digests,
            found,
        )
        return found[:num_hits]

    def _missing_block(self, group: Group, length: int) -> int:
        """Name the block that a group lacks for a hit of so many tokens, or -1."""
        num_blocks = length // group.block_size
        digests = self._digests_up_to(group, num_blocks)
        extra_ids = extra_ids_of(self._state, self._prompt, group.block_size, num_blocks)
        return self._state.loops.missing_block(
            group.pool.arrays, group.arrays, self._prompt.tokens, extra_ids, digests, length, length
        )

    def _block_at(self, group: Group, index: int) -> int | None:
        """Find the block that carries a logical block's content; None if none does, the null block before the first."""
        if index < 0:
            return NULL_BLOCK
        return find(group.pool.arrays, _name(group), self._digest(group, index)) or None

    # What became of a block

    def _verdict(self, lack: _Lack) -> Verdict:
        """Tell what became of the block that ends the hit."""
        group, index = lack.group, lack.place
        digest = self._digest(group, index)
        start = index * group.block_size
        block = find(group.pool.arrays, _name(group), digest)
        if block != NULL_BLOCK and self._holds(group, block, index):
            return Verdict(self._cause_of_named(lack, block), start)
        told = self._from_ghosts(group, index, digest) or self._from_siblings(lack)
        if told is not None:
            return told
        if not group.keeps_whole_prefix and any(other.keeps_whole_prefix for other in self._state.cached_groups):
            return Verdict(_cause_of_gap(group), start)
        is_forgotten = ghosts.has_forgotten(group.pool.arrays, digest)
        return Verdict(MissCause.UNKNOWN if is_forgotten else MissCause.NEVER_STORED, start)

    def _holds(self, group: Group, block: int, index: int) -> bool:
        """Tell whether a block holds the tokens and the extra keys of a logical block: a digest may be forged."""
        arrays, size = group.pool.arrays, group.block_size
        encoding = self._state.extra_keys.encoding_of(int(arrays.records[block, EXTRA]))
        is_same = holds_tokens(arrays, block, self._prompt.tokens, index * size, size)
        return is_same and encoding == self._encoding(group, index)

    def _cause_of_named(self, lack: _Lack, block: int) -> MissCause:
        """Tell why a block that has its name is not found, or is not to be had."""
        group, brought = lack.group, self._prompt.digests
        if group.keeps_whole_prefix:
            assert lack.parent is not None
            if not is_child_of(group.pool.arrays, _name(group), block, lack.parent):
                return MissCause.ORPHANED
        is_forged = len(brought) > 0 and (brought[lack.place] != self._digest(group, lack.place)).any()
        return MissCause.OTHER_DIGEST if is_forged else MissCause.BEING_COMPUTED

    def _from_ghosts(self, group: Group, index: int, digest: Uint32Array) -> Verdict | None:
        """Tell what a ghost says, under this weights epoch or an earlier one."""
        told = _ghost(group, digest)
        if told is None and index == 0:
            for epoch in self._state.former_epochs:
                before = self._digest_under(group, 0, keys_of_first(self._prompt, epoch, group.block_size))
                ghost = _ghost(group, before)
                if ghost is not None:
                    told = MissCause.OTHER_EPOCH, ghost[1]
                    break
        return None if told is None else Verdict(told[0], index * group.block_size, age=told[1])

    def _from_siblings(self, lack: _Lack) -> Verdict | None:
        """Tell how what is cached goes on otherwise."""
        group, size = lack.group, lack.group.block_size
        start = lack.place * size
        wanted = self._prompt.tokens[start : start + size]
        siblings = self._siblings(lack)
        if not len(siblings):
            return None
        arrays = group.pool.arrays
        in_common = np.cumprod(arrays.tokens[siblings, :size] == wanted, axis=1).sum(axis=1)
        same = siblings[in_common == size]
        if len(same):
            return Verdict(self._cause_of_keys(group, lack.place, same), start)
        own = self._state.extra_keys.id_of(self._encoding(group, lack.place))
        in_common = in_common[arrays.records[siblings, EXTRA] == own]
        if not len(in_common) or start + in_common.max() == 0:
            return None
        longest = int(in_common.max())
        stood = siblings[arrays.records[siblings, EXTRA] == own][int(in_common.argmax())]
        return Verdict(MissCause.CHANGED_TOKENS, start + longest, int(arrays.tokens[stood, longest]))

    def _siblings(self, lack: _Lack) -> Int32Array:
        """List the blocks that continue what comes before a block: all of them, or the latest."""
        if lack.parent is None:
            return np.zeros(0, np.int32)
        arrays, parent = lack.group.pool.arrays, lack.parent
        among = np.arange(1, lack.group.pool.num_blocks, dtype=np.int32)
        if not self._is_thorough:
            among = arrays.records[parent, SUCCESSOR].reshape(1)
        return _children(arrays, _name(lack.group), among, parent)

    def _cause_of_keys(self, group: Group, index: int, same: Int32Array) -> MissCause:
        """Tell which extra key differs from that of the content that differs in fewest."""
        own, table = self._encoding(group, index), self._state.extra_keys
        others = {int(extra) for extra in group.pool.arrays.records[same, EXTRA]}
        fewest = min((differing_tags(own, table.encoding_of(extra)) for extra in sorted(others)), key=len)
        return next((cause for tag, cause in OTHER_KEYS.items() if tag in fewest), MissCause.OTHER_DIGEST)

    # Digests, whatever the extra keys: some may have no id, since no block carries them

    def _digest(self, group: Group, index: int) -> Uint32Array:
        """Digest of a logical block of the prompt, in words."""
        digest: Uint32Array = self._digests_up_to(group, index + 1)[index]
        return digest

    def _digests_up_to(self, group: Group, num_blocks: int) -> Uint32Array:
        """Digests of the prompt's first blocks, uint32 ``[num_blocks, 8]``."""
        known = self._digests.get(group.lane)
        if known is None:
            known = self._digests[group.lane] = self._digests_of_hit(group)
        if len(known) < num_blocks:
            known = self._digests[group.lane] = self._continued(group, known, num_blocks)
        while len(known) < num_blocks:  # extra keys that no block carries
            encoding = self._encoding(group, len(known))
            known = np.concatenate([known, self._digest_under(group, len(known), encoding)[np.newaxis]])
            self._digests[group.lane] = known
        return known[:num_blocks]

    def _digests_of_hit(self, group: Group) -> Uint32Array:
        """Digests of the blocks that hit, where all of them are there."""
        lane = self._state.lanes[group.lane]
        whole = next((other for other in lane if other.keeps_whole_prefix), None)
        if whole is None:
            return NO_DIGESTS
        digests: Uint32Array = whole.pool.arrays.digests[self._hit.block_ids[whole.index]]
        return digests

    def _continued(self, group: Group, known: Uint32Array, num_blocks: int) -> Uint32Array:
        """Continue a chain of digests, up to the first block whose extra keys nobody carries."""
        state, first = self._state, len(known)
        extra_ids = np.zeros(num_blocks, np.int32)
        told = extra_ids_of(state, self._prompt, group.block_size, num_blocks)
        extra_ids[: len(told)] = told
        stop = first + int(np.argmin(np.append(extra_ids[first:] >= 0, False)))
        digests = np.empty((stop, 8), np.uint32)
        digests[:first] = known
        digest_behind(self._prompt.tokens, group.block_size, first, extra_ids, state.extra_keys.arrays, digests)
        return digests

    def _digest_under(self, group: Group, index: int, encoding: bytes) -> Uint32Array:
        """Digest of a logical block of the prompt with these extra keys, behind the blocks that it has."""
        size = group.block_size
        parent = self._digest(group, index - 1).astype(">u4").tobytes() if index else ROOT_DIGEST
        digest = hash_block_tokens(parent, self._prompt.tokens[index * size : (index + 1) * size], encoding)
        return np.frombuffer(digest, ">u4").astype(np.uint32)

    def _encoding(self, group: Group, index: int) -> bytes:
        """Extra keys of a logical block of the prompt."""
        keys, epoch = self._prompt.keys, self._state.identity_epoch
        if not self._prompt.has_extra_keys(epoch):
            return b""
        return keys_of_blocks(keys, epoch, group.block_size, index, index + 1).get(index, b"")

    # All that does not hit

    def misses(self, verdict: Verdict) -> tuple[Miss, ...]:
        """Tell of each token that does not hit why, in runs."""
        end, num_tokens = self._hit.num_tokens, len(self._prompt.tokens)
        if verdict.cause is MissCause.NOT_CACHING:
            return (Miss(0, num_tokens, verdict.cause),)
        runs = [*self._behind(verdict), (max(end, self._bounded), self._most, MissCause.BOUNDED)]
        runs.append((max(end, self._most), num_tokens, MissCause.NOT_FULL))
        joined = []
        for cause, same in groupby((run for run in runs if run[0] < run[1]), key=lambda run: run[2]):
            pieces = list(same)
            joined.append(Miss(pieces[0][0], pieces[-1][1], cause))
        return tuple(joined)

    def _behind(self, verdict: Verdict) -> list[_Run]:
        """Tell of the tokens that could have hit why they did not: runs from the hit's end to the bound."""
        start, stop = self._hit.num_tokens, self._bounded
        if start >= stop:
            return []
        if verdict.cause in {MissCause.BEING_COMPUTED, MissCause.LOADING}:
            return [(start, stop, verdict.cause)]
        lack = self._first_lack_of_chains(stop)
        if lack is None:  # all that is cached, or there are windows and states alone
            group = self._state.cached_groups[0]
            is_chain = group.keeps_whole_prefix
            return [(start, stop, verdict.cause)] if is_chain else self._by_block(group, start, stop, verdict.cause)
        known = self._aligned(lack.place * lack.group.block_size)
        if known > start:
            return [(start, known, verdict.cause), *self._by_block(lack.group, known, stop, self._verdict(lack).cause)]
        return self._by_block(lack.group, start, stop, verdict.cause)

    def _by_block(self, group: Group, start: int, stop: int, cause: MissCause) -> list[_Run]:
        """Tell of each block what became of it, in runs.

        Args:
            group: the group whose blocks are looked at.
            start, stop: positions.
            cause: why the first block does not hit, if no ghost says it; it holds of all that follows, up to a ghost.
        """
        size, first = group.block_size, start // group.block_size
        fates = np.empty(stop // size - first, np.int32)
        find_fates(group.pool.arrays, _name(group), self._digests_up_to(group, stop // size)[first:], fates)
        runs: list[_Run] = []
        is_gone = False
        for index, fate in zip(_changes(fates), fates[_changes(fates)].tolist(), strict=True):
            if fate > NEVER:
                cause, is_gone = _cause_of_ghost(group, fate), True
            elif fate != NAMED and is_gone:
                cause, is_gone = MissCause.UNKNOWN if fate == FORGOTTEN else MissCause.NEVER_STORED, False
            runs.append((max(start, (first + index) * size), stop, cause))
        return [(begin, after[0], why) for (begin, _, why), after in pairwise([*runs, (stop, stop, cause)])]


def _changes(fates: Int32Array) -> list[int]:
    """Tell where runs of equal fates begin."""
    begins: list[int] = np.flatnonzero(np.append(True, fates[1:] != fates[:-1])[: len(fates)]).tolist()
    return begins


def _name(group: Group) -> int:
    return int(group.arrays.parameters[NAME_IN_POOL])


def keys_of_first(prompt: Prompt, weights_epoch: str, block_size: int) -> bytes:
    """Extra keys of a prompt's first block under some weights epoch."""
    return keys_of_blocks(prompt.keys, weights_epoch, block_size, 0, 1).get(0, b"")


def _ghost(group: Group, digest: Uint32Array) -> tuple[MissCause, int] | None:
    """Tell why content went, and how long ago; None if no ghost of it is there."""
    pool = group.pool.arrays
    place = ghosts.find_ghost(pool, _name(group), digest)
    if place < 0:
        return None
    return _cause_of_ghost(group, ghosts.ghost_cause(pool, place)), ghosts.ghost_age(pool, place)


def _cause_of_ghost(group: Group, ghost: int) -> MissCause:
    """Tell in a caller's words what a ghost says."""
    cause = CAUSE_OF_GHOST[ghost]
    is_gap = cause in {MissCause.SUPERSEDED, MissCause.OVERWRITTEN} and not group.keeps_whole_prefix
    return _cause_of_gap(group) if is_gap else cause


def _cause_of_gap(group: Group) -> MissCause:
    """Tell what it is called where a group has dropped what others have."""
    return MissCause.STATE_GONE if keeps_state(group.spec) else MissCause.WINDOW_GONE


def _children(pool: PoolArrays, name: int, among: Int32Array, parent: int) -> Int32Array:
    """Find those of some blocks that continue a block, in the life that it has now."""
    records = pool.records[among]
    is_child = (records[:, NAME] == name) & (records[:, PARENT] == parent)
    children: Int32Array = among[is_child & (records[:, PARENT_LIFE] == pool.records[parent, LIFE])]
    return children
