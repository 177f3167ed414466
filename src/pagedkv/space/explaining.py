"""Explaining a miss: where a prompt's hit ends, which group ends it, and what happened to the block that it lacks.

Asking changes nothing. Cached blocks are compared themselves; for evicted ones the pool's ghosts record the cause
(:mod:`pagedkv.blocks.ghosts`), and if ghosts were forgotten, "never stored" becomes "unknown". There are three
passes, each of which makes a value from the result of the one before::

    PrefixHit -> lacks ------------> Lack -> verdicts --------> Verdict -> misses --------> runs
                 the first group             what happened                 all tokens that
                 that could serve            to that block                 do not hit, and
                 no more, and the                                          why
                 block that it lacks

An example with blocks of 4 tokens and a window of 4; ``x`` marks what is gone::

    position    0   4   8   12  16
    full        [##][##][##][##]         hit        8 tokens; the next boundary is 12
    window      [##][##]  x [##]         lack       block 2 of the window, which a hit of 12 would need
                                         verdict    window gone, since full attention still has that content

Nothing is lacking if the prompt has no further boundary (block not full), if the caller allows no longer hit (bounded),
if a load brings the next block, or if the open step computes it and it cannot be taken over. Else the verdict on the
block that a group lacks is the first of these that applies::

    the block is in the prefix index  being computed, or orphaned
    there is a ghost of it            why it was evicted or dropped, and how long ago
    a ghost under an earlier epoch    another weights epoch
    cached under other extra keys     another adapter, salt, or medium
    its parent has other children     changed tokens
    a window or a state, and whole prefixes of the same content are cached     window gone, state gone
    no ghost, and none lost           never stored; else unknown

Tokens are compared only with content under the same keys, so that no answer reveals the prompts of another tenant.

If :attr:`SpaceConfig.explain <pagedkv.SpaceConfig>` is set, why a request's hit ended is also recorded when it is
admitted: one record a row, and a ring of the records of earlier sequences. A row's record stays when the row is freed,
and moves into the ring when the row is given to another sequence, so freeing costs nothing.
"""

from itertools import groupby, pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from pagedkv.blocks import ghosts
from pagedkv.blocks.digests import (
    ROOT_DIGEST,
    ROOT_WORDS,
    ExtraKeyArrays,
    digest_block,
    hash_block_tokens,
    keys_of_blocks,
)
from pagedkv.blocks.ghosts import find_ghost, ghost_age, ghost_cause, has_forgotten
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.prefix_index import find, is_child_of
from pagedkv.blocks.record import (
    CALLED_OFF,
    DISMISSED,
    EVICTED,
    EXTRA,
    INVALIDATED,
    LIFE,
    NAME,
    NULL_BLOCK,
    OTHER_EPOCH,
    OVERWRITTEN,
    PARENT,
    PARENT_LIFE,
    RESET,
    SHED,
    SUCCESSOR,
    WITHDRAWN,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.answers import ORDER, Explanation, Miss, MissCause, number_of
from pagedkv.contract.arrays import Int32Array, Int64Array, Uint32Array
from pagedkv.contract.keys import EPOCH, LORA, MEDIA, SALT, differing_tags
from pagedkv.contract.spec import keeps_state
from pagedkv.errors import SequenceError
from pagedkv.space.hits import NO_DIGESTS, UNKNOWN_KEY, PrefixHit, Prompt, extra_ids_of, holds_tokens, missing_block
from pagedkv.space.matching import follow
from pagedkv.space.rows import BLOCK_SIZE, HIT_ALIGNMENT, NAME_IN_POOL, GroupArrays
from pagedkv.space.state import BookArrays, Group, SpaceState


class Case(NamedTuple):
    """A prompt whose hit is to be explained.

    Args:
        state: the space; prompt: the prompt; hit: its hit.
        is_thorough: whether all blocks that continue the hit are compared, or only the latest.
        alignment: hits of whole blocks end at multiples of this number of tokens.
        most: where the longest hit that any cache could serve ends; bounded: the same within the caller's bound.
    """

    state: SpaceState
    prompt: Prompt
    hit: PrefixHit
    is_thorough: bool
    alignment: int
    most: int
    bounded: int

    def aligned(self, length: int) -> int:
        """Round a length down to one where hits can end."""
        return length // self.alignment * self.alignment


class Lack(NamedTuple):
    """The block that ends a hit.

    Args:
        group: the group that lacks it; place: its logical index there.
        parent: the block before it, if that is cached and reachable by links; else None.
        digests: digests of the prompt's blocks up to this one at least, uint32 ``[more than place, 8]``.
    """

    group: Group
    place: int
    parent: int | None
    digests: Uint32Array

    @property
    def start(self) -> int:
        """The block's first position."""
        return self.place * self.group.block_size


def first_lack(case: Case, length: int) -> Lack | None:
    """Find the first group that could not serve a hit of this length; None if each could, taken alone."""
    lack = first_lack_of_chains(case, length)
    return _first_lack_of_lookups(case, length) if lack is None else lack


def first_lack_of_chains(case: Case, length: int, before: Lack | None = None) -> Lack | None:
    """Find the group that ends a hit first, among those that keep whole prefixes; None if all reach this length.

    Args:
        case: the case; length: of the hit.
        before: the lack of a shorter hit, if any; its digests are reused.
    """
    chains = [(group, _chain(case, group, length)) for group in case.state.cached_groups if group.keeps_whole_prefix]
    if not chains:
        return None
    group, chain = min(chains, key=lambda each: len(each[1]) * each[0].block_size)
    place = len(chain)
    if place * group.block_size >= length:
        return None
    known = before.digests if before is not None and before.group.lane == group.lane else NO_DIGESTS
    parent = int(chain[-1]) if place else NULL_BLOCK
    return Lack(group, place, parent, digests_up_to(case, group, place + 1, known))


def _chain(case: Case, group: Group, length: int) -> Int32Array:
    """Follow the prompt through a group that keeps whole prefixes, for at most ``length`` tokens."""
    state = case.state
    if group is state.only_chain:
        return case.hit.block_ids[group.index]
    extra_ids = extra_ids_of(state, case.prompt, group, length // group.block_size)
    return follow(state, group, case.prompt, extra_ids, length).blocks


def _first_lack_of_lookups(case: Case, length: int) -> Lack | None:
    """Find the first group that drops blocks and lacks one for a hit of this length."""
    state, prompt = case.state, case.prompt
    by_lane: dict[int, Uint32Array] = {}
    for group in state.cached_groups:
        if group.keeps_whole_prefix:
            continue
        num_blocks = length // group.block_size
        if group.lane not in by_lane:
            by_lane[group.lane] = digests_up_to(case, group, num_blocks)
        digests, extra_ids = by_lane[group.lane], extra_ids_of(state, prompt, group, num_blocks)
        index = state.loops[missing_block](
            group.pool.arrays, group.arrays, prompt.tokens, extra_ids, digests, length, length
        )
        if index >= 0:
            return Lack(group, index, _parent(group, index, digests), digests)
    return None


def _parent(group: Group, index: int, digests: Uint32Array) -> int | None:
    """Find the block before a logical block; None if it is not cached, the null block before the first."""
    if index == 0:
        return NULL_BLOCK
    return find(group.pool.arrays, name_of(group), digests[index - 1]) or None


OTHER_KEYS: Final = {  # if several differ, the first of them is the cause
    EPOCH: MissCause.OTHER_EPOCH,
    LORA: MissCause.OTHER_ADAPTER,
    SALT: MissCause.OTHER_SALT,
    MEDIA: MissCause.OTHER_MEDIA,
}


class Verdict(NamedTuple):
    """What happened to a block.

    Args:
        cause: why it does not hit.
        position: the token that the cause concerns.
        token_id, age: as in :class:`~pagedkv.Explanation`.
    """

    cause: MissCause
    position: int
    token_id: int | None = None
    age: int | None = None


def verdict_of(case: Case, lack: Lack) -> Verdict:
    """Return what happened to the block that ends the hit."""
    return (
        _from_its_name(case, lack)
        or _from_ghosts(case, lack)
        or _from_siblings(case, lack)
        or Verdict(_cause_without_trace(case, lack), lack.start)
    )


# It is in the prefix index


def _from_its_name(case: Case, lack: Lack) -> Verdict | None:
    """Return why a block in the prefix index was not found, or cannot be hit; None if it is not there."""
    group, digest = lack.group, lack.digests[lack.place]
    block = find(group.pool.arrays, name_of(group), digest)
    if block == NULL_BLOCK or not _holds(case, lack, block):
        return None
    if group.keeps_whole_prefix:
        assert lack.parent is not None
        if not is_child_of(group.pool.arrays, name_of(group), block, lack.parent):
            return Verdict(MissCause.ORPHANED, lack.start)
    brought = case.prompt.digests
    is_forged = len(brought) > 0 and (brought[lack.place] != digest).any()
    return Verdict(MissCause.OTHER_DIGEST if is_forged else MissCause.BEING_COMPUTED, lack.start)


def _holds(case: Case, lack: Lack, block: int) -> bool:
    """Return whether a block holds the tokens and extra keys of the missing one, since a digest may be forged."""
    arrays = lack.group.pool.arrays
    encoding = case.state.extra_keys.encoding_of(int(arrays.records[block, EXTRA]))
    is_same = holds_tokens(arrays, block, case.prompt.tokens, lack.start, lack.group.block_size)
    return is_same and encoding == encoding_of(case, lack.group, lack.place)


# It is gone


def _from_ghosts(case: Case, lack: Lack) -> Verdict | None:
    """Return the cause in a ghost of the block, under this weights epoch or an earlier one."""
    ghost = _ghost(lack.group, lack.digests[lack.place])
    if ghost is None and lack.place == 0:
        ghost = _ghost_of_earlier_epoch(case, lack.group)
    return None if ghost is None else Verdict(ghost[0], lack.start, age=ghost[1])


def _ghost_of_earlier_epoch(case: Case, group: Group) -> tuple[MissCause, int] | None:
    """Return how long ago the prompt's first block left the cache, if a ghost of it under an earlier epoch is left."""
    for epoch in case.state.weights.former:
        ghost = _ghost(group, digest_of_first(case.prompt, epoch, group.block_size))
        if ghost is not None:
            return MissCause.OTHER_EPOCH, ghost[1]
    return None


def _ghost(group: Group, digest: Uint32Array) -> tuple[MissCause, int] | None:
    """Return why content left the cache, and how long ago; None without a ghost of it."""
    pool = group.pool.arrays
    place = ghosts.find_ghost(pool, name_of(group), digest)
    if place < 0:
        return None
    return cause_of_ghost(group, ghosts.ghost_cause(pool, place)), ghosts.ghost_age(pool, place)


def cause_of_ghost(group: Group, ghost: int) -> MissCause:
    """Convert a ghost's cause to a public one."""
    cause = CAUSE_OF_GHOST[ghost]
    is_gap = cause in {MissCause.SUPERSEDED, MissCause.OVERWRITTEN} and not group.keeps_whole_prefix
    return _cause_of_gap(group) if is_gap else cause


def _cause_of_gap(group: Group) -> MissCause:
    """Return the cause for a group that has dropped what other groups have."""
    return MissCause.STATE_GONE if keeps_state(group.spec) else MissCause.WINDOW_GONE


# Other content is cached in its place


def _from_siblings(case: Case, lack: Lack) -> Verdict | None:
    """Return how the cached blocks behind the same parent differ."""
    arrays, size = lack.group.pool.arrays, lack.group.block_size
    siblings = _siblings(case, lack)
    if not len(siblings):
        return None
    wanted = case.prompt.tokens[lack.start : lack.start + size]
    in_common = np.cumprod(arrays.tokens[siblings, :size] == wanted, axis=1).sum(axis=1)
    same = siblings[in_common == size]
    if len(same):
        return Verdict(_cause_of_keys(case, lack, same), lack.start)
    own = case.state.extra_keys.id_of(encoding_of(case, lack.group, lack.place))
    is_own = arrays.records[siblings, EXTRA] == own
    siblings, in_common = siblings[is_own], in_common[is_own]
    if not len(in_common) or lack.start + in_common.max() == 0:
        return None
    longest = int(in_common.max())
    stood = siblings[int(in_common.argmax())]
    return Verdict(MissCause.CHANGED_TOKENS, lack.start + longest, int(arrays.tokens[stood, longest]))


def _siblings(case: Case, lack: Lack) -> Int32Array:
    """List the cached blocks with the same parent as the missing block: all of them, or the latest."""
    if lack.parent is None:
        return np.zeros(0, np.int32)
    arrays = lack.group.pool.arrays
    among = np.arange(1, lack.group.pool.num_blocks, dtype=np.int32)
    if not case.is_thorough:
        among = arrays.records[lack.parent, SUCCESSOR].reshape(1)
    return _children(arrays, name_of(lack.group), among, lack.parent)


def _children(pool: PoolArrays, name: int, among: Int32Array, parent: int) -> Int32Array:
    """Return those of some blocks that are children of a block in its present life."""
    records = pool.records[among]
    is_child = (records[:, NAME] == name) & (records[:, PARENT] == parent)
    children: Int32Array = among[is_child & (records[:, PARENT_LIFE] == pool.records[parent, LIFE])]
    return children


def _cause_of_keys(case: Case, lack: Lack, same: Int32Array) -> MissCause:
    """Return which extra key differs from that of the same tokens that differ in the fewest keys."""
    own, table = encoding_of(case, lack.group, lack.place), case.state.extra_keys
    others = {int(extra) for extra in lack.group.pool.arrays.records[same, EXTRA]}
    fewest = min((differing_tags(own, table.encoding_of(extra)) for extra in sorted(others)), key=len)
    return next((cause for tag, cause in OTHER_KEYS.items() if tag in fewest), MissCause.OTHER_DIGEST)


# There is no trace of it


def _cause_without_trace(case: Case, lack: Lack) -> MissCause:
    """Return the cause for a block that left no name and no ghost, and has no other content in its place."""
    group = lack.group
    if not group.keeps_whole_prefix and any(other.keeps_whole_prefix for other in case.state.cached_groups):
        return _cause_of_gap(group)
    is_forgotten = ghosts.has_forgotten(group.pool.arrays, lack.digests[lack.place])
    return MissCause.UNKNOWN if is_forgotten else MissCause.NEVER_STORED


class Finding(NamedTuple):
    """Why a hit ends.

    Args:
        verdict: the cause; lack: the missing block, or None if no missing block ends the hit.
    """

    verdict: Verdict
    lack: Lack | None


def open_case(state: SpaceState, prompt: Prompt, hit: PrefixHit, *, is_thorough: bool) -> Case:
    """Make the case of a prompt: where hits of it could end."""
    alignment = max(1, int(state.cached_groups[0].arrays.parameters[HIT_ALIGNMENT]))
    most, bounded = ((tokens // alignment * alignment) for tokens in (len(prompt.tokens) - 1, prompt.num_hittable))
    return Case(state, prompt, hit, is_thorough, alignment, most, bounded)


def name_of(group: Group) -> int:
    """Return the number under which a group's blocks are named in their pool."""
    return int(group.arrays.parameters[NAME_IN_POOL])


_Run: TypeAlias = tuple[int, int, MissCause]
"""First token, end and cause of tokens that do not hit."""


def misses_of(case: Case, finding: Finding) -> tuple[Miss, ...]:
    """Return the cause for each token that does not hit, in runs."""
    end, num_tokens = case.hit.num_tokens, len(case.prompt.tokens)
    if finding.verdict.cause is MissCause.NOT_CACHING:
        return (Miss(0, num_tokens, MissCause.NOT_CACHING),)
    runs = [*_up_to_the_bound(case, finding), (max(end, case.bounded), case.most, MissCause.BOUNDED)]
    runs.append((max(end, case.most), num_tokens, MissCause.NOT_FULL))
    joined = []
    for cause, same in groupby((run for run in runs if run[0] < run[1]), key=lambda run: run[2]):
        pieces = list(same)
        joined.append(Miss(pieces[0][0], pieces[-1][1], cause))
    return tuple(joined)


def _up_to_the_bound(case: Case, finding: Finding) -> list[_Run]:
    """Return why tokens that could have hit did not: runs from the hit's end to the bound."""
    start, stop, cause = case.hit.num_tokens, case.bounded, finding.verdict.cause
    if start >= stop:
        return []
    if cause in {MissCause.BEING_COMPUTED, MissCause.LOADING}:
        return [(start, stop, cause)]
    lack = first_lack_of_chains(case, stop, finding.lack)
    if lack is None:  # all that is cached, or only windows and states
        group = case.state.cached_groups[0]
        whole = start, stop, cause
        return [whole] if group.keeps_whole_prefix else _by_block(case, group, whole, finding.lack)
    known = case.aligned(lack.start)
    if known > start:
        rest = known, stop, verdict_of(case, lack).cause
        return [(start, known, cause), *_by_block(case, lack.group, rest, lack)]
    return _by_block(case, lack.group, (start, stop, cause), lack)


def _by_block(case: Case, group: Group, whole: _Run, lack: Lack | None) -> list[_Run]:
    """Return what happened to each block, in runs.

    Args:
        case: the case; group: the group whose blocks are examined.
        whole: the tokens, and why the first block does not hit if it has no ghost; this cause also holds for the
            blocks behind it, up to one with a ghost.
        lack: a lack, maybe of another group; its digests are reused.
    """
    start, stop, cause = whole
    size, first = group.block_size, start // group.block_size
    fates = np.empty(stop // size - first, np.int32)
    known = lack.digests if lack is not None and lack.group.lane == group.lane else NO_DIGESTS
    find_fates(group.pool.arrays, name_of(group), digests_up_to(case, group, stop // size, known)[first:], fates)
    begins = _begins_of_runs(fates)
    runs: list[_Run] = []
    is_gone = False
    for index, fate in zip(begins, fates[begins].tolist(), strict=True):
        if fate > NEVER:
            cause, is_gone = cause_of_ghost(group, fate), True
        elif fate != NAMED and is_gone:
            cause, is_gone = MissCause.UNKNOWN if fate == FORGOTTEN else MissCause.NEVER_STORED, False
        runs.append((max(start, (first + index) * size), stop, cause))
    return [(begin, after[0], why) for (begin, _, why), after in pairwise([*runs, (stop, stop, cause)])]


def _begins_of_runs(fates: Int32Array) -> list[int]:
    """Return where runs of equal fates begin."""
    begins: list[int] = np.flatnonzero(np.append(True, fates[1:] != fates[:-1])[: len(fates)]).tolist()
    return begins


def explain(state: SpaceState, prompt: Prompt, hit: PrefixHit, *, is_thorough: bool = True) -> Explanation:
    """Explain a hit that was found just now.

    Args:
        state: the space.
        prompt: the prompt.
        hit: its hit.
        is_thorough: whether to compare all blocks that continue the hit, and to explain all tokens that do not hit;
            else only the latest continuation, and the first block. O(blocks of the pool + of the prompt), or O(1).
    """
    case = open_case(state, prompt, hit, is_thorough=is_thorough)
    finding = _why_it_ends(case)
    misses = misses_of(case, finding) if is_thorough else ()
    verdict, index = finding.verdict, None if finding.lack is None else finding.lack.group.index
    return Explanation(len(prompt.tokens), hit.num_tokens, verdict.cause, verdict.position, index, *verdict[2:], misses)


def explain_misses(state: SpaceState, hit: PrefixHit) -> tuple[Miss, ...]:
    """Return why the tokens of a prompt do not hit, comparing only the latest continuation. O(tokens)."""
    case = open_case(state, hit.prompt, hit, is_thorough=False)
    return misses_of(case, _why_it_ends(case))


def _why_it_ends(case: Case) -> Finding:
    """Return why the hit ended, and which block it lacks, if it lacks one."""
    end = case.hit.num_tokens
    cause = _cause_without_a_block(case)
    if cause is not None:
        return Finding(Verdict(cause, end), None)
    lack = first_lack(case, case.aligned(end) + case.alignment)
    if lack is None:
        return Finding(Verdict(MissCause.BEING_COMPUTED, end), None)
    return Finding(verdict_of(case, lack), lack)


def _cause_without_a_block(case: Case) -> MissCause | None:
    """Return why no longer hit was possible, whatever is cached; None if one was possible."""
    if not case.state.config.prefix_caching:
        return MissCause.NOT_CACHING
    if case.hit.num_tokens >= case.most:
        return MissCause.NOT_FULL
    if case.hit.num_tokens >= case.bounded:
        return MissCause.BOUNDED
    return None if case.hit.loading is None else MissCause.LOADING


def is_bare(state: SpaceState, hit: PrefixHit) -> bool:
    """Return whether the block behind a hit has no extra keys of its own, and no earlier epoch matters for it."""
    if hit.num_tokens:
        return not hit.prompt.keys.media
    return not state.weights.former and not hit.prompt.has_extra_keys(state.weights.identity)


def digests_up_to(case: Case, group: Group, num_blocks: int, known: Uint32Array = NO_DIGESTS) -> Uint32Array:
    """Return digests of a prompt's first blocks, uint32 ``[num_blocks, 8]``.

    Args:
        case: the case; group: the group of the blocks; num_blocks: how many.
        known: the first of these digests, as far as they are known.
    """
    if not len(known):
        known = _digests_of_hit(case, group)
    if len(known) < num_blocks:
        extra_ids = np.zeros(num_blocks, np.int32)
        known_ids = extra_ids_of(case.state, case.prompt, group, num_blocks)
        extra_ids[: len(known_ids)] = known_ids
        while len(known) < num_blocks:
            is_unknown = extra_ids[len(known)] == UNKNOWN_KEY
            known = _with_unknown_key(case, group, known) if is_unknown else _continued(case, group, known, extra_ids)
    return known[:num_blocks]


def _digests_of_hit(case: Case, group: Group) -> Uint32Array:
    """Return the hit blocks' digests if a group of this block size keeps whole prefixes; else none."""
    lane = case.state.lanes[group.lane]
    whole = next((other for other in lane if other.keeps_whole_prefix), None)
    if whole is None:
        return NO_DIGESTS
    digests: Uint32Array = whole.pool.arrays.digests[case.hit.block_ids[whole.index]]
    return digests


def _continued(case: Case, group: Group, known: Uint32Array, extra_ids: Int32Array) -> Uint32Array:
    """Continue a chain of digests, up to the first block with extra keys that no block carries."""
    first = len(known)
    stop = first + int(np.argmin(np.append(extra_ids[first:] >= 0, False)))
    digests = np.empty((stop, 8), np.uint32)
    digests[:first] = known
    digest_behind(case.prompt.tokens, group.block_size, first, extra_ids, case.state.extra_keys.arrays, digests)
    return digests


def _with_unknown_key(case: Case, group: Group, known: Uint32Array) -> Uint32Array:
    """Continue a chain of digests by a block with extra keys that have no id."""
    index, size = len(known), group.block_size
    parent = known[-1].astype(">u4").tobytes() if index else ROOT_DIGEST
    tokens = case.prompt.tokens[index * size : (index + 1) * size]
    digest = _in_words(hash_block_tokens(parent, tokens, encoding_of(case, group, index)))
    return np.concatenate([known, digest[np.newaxis]])


def digest_of_first(prompt: Prompt, weights_epoch: str, block_size: int) -> Uint32Array:
    """Digest of a prompt's first block under a given weights epoch, in words."""
    encoding = keys_of_blocks(prompt.keys, weights_epoch, block_size, 0, 1).get(0, b"")
    return _in_words(hash_block_tokens(ROOT_DIGEST, prompt.tokens[:block_size], encoding))


def _in_words(digest: bytes) -> Uint32Array:
    return np.frombuffer(digest, ">u4").astype(np.uint32)


def encoding_of(case: Case, group: Group, index: int) -> bytes:
    """Return the encoded extra keys of a logical block of the prompt."""
    keys, epoch = case.prompt.keys, case.state.weights.identity
    if not case.prompt.has_extra_keys(epoch):
        return b""
    return keys_of_blocks(keys, epoch, group.block_size, index, index + 1).get(index, b"")


LEAST_PAST: Final = 1024


def new_book(state: SpaceState) -> BookArrays:
    """Make empty records, for the rows of a space without sequences."""
    max_sequences = len(state.rows)
    book = BookArrays(
        current=np.zeros((max_sequences, NUM_FIELDS), np.int64),
        past=np.zeros((max(LEAST_PAST, max_sequences), NUM_FIELDS), np.int64),
        num_past=np.zeros(1, np.int64),
    )
    state.loops.examples[Like.BOOK] = book
    return book


def explanation_of(book: BookArrays, row: int, generation: int) -> Explanation:
    """Return why a sequence's hit ended when it was admitted. O(remembered sequences).

    Raises:
        SequenceError: it was never admitted (it is a fork, or does not exist), or it is forgotten.
    """
    current, past, _ = book
    if row < len(current) and current[row, GENERATION] == generation:
        return _as_explanation(current[row].tolist())
    places = np.flatnonzero((past[:, OF_ROW] == row) & (past[:, GENERATION] == generation))
    if generation < 1 or not len(places):
        raise SequenceError(
            f"nothing is recorded of generation {generation} of row {row}: it began as a fork, or is none of the "
            f"last {len(past)} sequences that were admitted and freed"
        )
    return _as_explanation(past[places[-1]].tolist())


def record_explanation(state: SpaceState, book: BookArrays, row: int, hit: PrefixHit) -> None:
    """Record why the hit of a prompt ends, before the prompt gets the row.

    If the chain of the one group that keeps whole prefixes ends with the hit, a compiled loop finds out: 0.7 us.
    """
    group = hit.ends_chain_of
    if group is None or hit.loading is not None or hit.tails or hit.num_replayed or not is_bare(state, hit):
        current, past, num_past = book
        if current[row, GENERATION]:  # the record of the row's last sequence moves into the ring
            past[int(num_past[0]) % len(past)] = current[row]
            num_past += 1
    elif state.loops[record_miss](
        group.pool.arrays,
        group.arrays,
        state.extra_keys.arrays,
        hit.prompt.tokens,
        hit.block_ids[group.index],
        hit.prompt.max_hit_tokens,
        row,
        state.serials,
        book,
    ):
        return
    explanation = explain(state, hit.prompt, hit, is_thorough=False)
    book.current[row] = _as_record(row, int(state.serials[row]), explanation)


def check_book(state: SpaceState, book: BookArrays) -> None:
    """Check that every record belongs to a sequence that existed, and that no sequence has two."""
    records = np.concatenate(book[:2])
    records = records[records[:, GENERATION] > 0]
    of_rows, generations = records[:, OF_ROW], records[:, GENERATION]
    assert (generations <= state.serials[of_rows]).all(), "explanations: of a sequence that is still to come"
    pairs = set(zip(of_rows.tolist(), generations.tolist(), strict=True))
    assert len(pairs) == len(records), "explanations: two of one sequence"
    assert (records[:, NUM_HIT] < records[:, NUM_TOKENS]).all(), "explanations: more hit than there was"
    assert (records[:, POSITION] >= 0).all(), "explanations: a position before the prompt"


def _as_record(row: int, generation: int, explanation: Explanation) -> list[int]:
    """Encode an explanation as a record."""
    record = [0] * NUM_FIELDS
    record[GENERATION], record[OF_ROW] = generation, row
    record[NUM_TOKENS], record[NUM_HIT] = explanation.num_tokens, explanation.num_hit_tokens
    record[CAUSE], record[POSITION] = number_of(explanation.cause), explanation.position
    record[GROUP] = 0 if explanation.group is None else explanation.group + 1
    record[HAS_TOKEN], record[TOKEN] = explanation.token_id is not None, explanation.token_id or 0
    record[AGE] = 0 if explanation.age is None else explanation.age + 1
    return record


def _as_explanation(record: list[int]) -> Explanation:
    """Decode a record."""
    return Explanation(
        num_tokens=record[NUM_TOKENS],
        num_hit_tokens=record[NUM_HIT],
        cause=ORDER[record[CAUSE]],
        position=record[POSITION],
        group=record[GROUP] - 1 if record[GROUP] else None,
        token_id=record[TOKEN] if record[HAS_TOKEN] else None,
        age=record[AGE] - 1 if record[AGE] else None,
    )


# Fates of a block without a ghost; for a ghost its cause is the fate.
NEVER: Final = 0
NAMED: Final = -1  # it is cached
FORGOTTEN: Final = -2  # it may have been cached
CAUSE_OF_GHOST: Final = {
    EVICTED: MissCause.EVICTED,
    SHED: MissCause.SUPERSEDED,
    OVERWRITTEN: MissCause.OVERWRITTEN,
    CALLED_OFF: MissCause.CALLED_OFF,
    WITHDRAWN: MissCause.WITHDRAWN,
    RESET: MissCause.RESET,
    OTHER_EPOCH: MissCause.OTHER_EPOCH,
    INVALIDATED: MissCause.INVALIDATED,
    DISMISSED: MissCause.FORGOTTEN,
}
NUMBERS_OF_GHOSTS: Final = tuple(number_of(CAUSE_OF_GHOST.get(cause, MissCause.UNKNOWN)) for cause in range(16))
# Fields of a record: an explanation as numbers, and the row.
GENERATION: Final = 0  # 0: there is none
OF_ROW: Final = 1
NUM_TOKENS: Final = 2
NUM_HIT: Final = 3
CAUSE: Final = 4
POSITION: Final = 5
GROUP: Final = 6  # from 1 on; 0: none
HAS_TOKEN: Final = 7
TOKEN: Final = 8
AGE: Final = 9  # from 1 on; 0: none
NUM_FIELDS: Final = 10
NOT_FULL: Final = number_of(MissCause.NOT_FULL)
BOUNDED: Final = number_of(MissCause.BOUNDED)
CHANGED: Final = number_of(MissCause.CHANGED_TOKENS)
NEVER_STORED: Final = number_of(MissCause.NEVER_STORED)
UNKNOWN: Final = number_of(MissCause.UNKNOWN)


@compiled
def digest_behind(
    tokens: Int32Array,
    block_size: int,
    first: int,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
) -> None:
    """Digest the logical blocks of a prompt from ``first`` on; those before have digests already.

    Args:
        extra_ids: int32 ``[n]``, ids of the extra keys of each block.
        digests: uint32 ``[n, 8]``.
    """
    for index in range(first, len(digests)):
        above = digests[index - 1] if index else ROOT_WORDS
        block_tokens = tokens[index * block_size : (index + 1) * block_size]
        digest_block(above, block_tokens, extra_keys, extra_ids[index], digests[index])


@compiled
def find_fates(pool: PoolArrays, name: int, digests: Uint32Array, out: Int32Array) -> None:
    """Find the fate of each block.

    Args:
        digests: uint32 ``[n, 8]``.
        out: int32 ``[n]``; receives causes of :mod:`pagedkv.blocks.record`, or the fates above.
    """
    for index in range(len(out)):
        place = find_ghost(pool, name, digests[index])
        if place >= 0:
            out[index] = ghost_cause(pool, place)
        elif find(pool, name, digests[index]) != NULL_BLOCK:
            out[index] = NAMED
        elif has_forgotten(pool, digests[index]):
            out[index] = FORGOTTEN
        else:
            out[index] = NEVER


@takes(Like.POOL, Like.GROUP, Like.EXTRA_KEYS, Like.IDS, Like.IDS, Like.NUMBER, Like.NUMBER, Like.IDS, Like.BOOK)
@compiled
def record_miss(
    pool: PoolArrays,
    group: GroupArrays,
    extra_keys: ExtraKeyArrays,
    tokens: Int32Array,
    hits: Int32Array,
    max_hit_tokens: int,
    row: int,
    serials: Int32Array,
    book: BookArrays,
) -> bool:
    """Record why a prompt's hit ends, given that it ends in the chain of the only group that keeps whole prefixes.

    The missing block has no extra keys of its own. Returns whether the record is complete; it is not if the missing
    block is named, or is cached under other keys.

    Args:
        tokens: int32 ``[n]``, the prompt.
        max_hit_tokens: how many of them may hit.
        hits: int32, the blocks that hit.
        serials: int32 ``[max_sequences]``, the generation of each row.
    """
    record = book.current[row]
    if record[GENERATION]:
        place = book.num_past[0] % len(book.past)
        for field in range(NUM_FIELDS):
            book.past[place, field] = record[field]
        book.num_past[0] += 1
    block_size, alignment = group.parameters[BLOCK_SIZE], group.parameters[HIT_ALIGNMENT]
    num_hits = len(hits)
    record[:] = 0
    record[GENERATION] = serials[row]
    record[OF_ROW] = row
    record[NUM_TOKENS] = len(tokens)
    record[NUM_HIT] = record[POSITION] = num_hits * block_size
    if num_hits * block_size >= (len(tokens) - 1) // alignment * alignment:
        record[CAUSE] = NOT_FULL
        return True
    if num_hits * block_size >= min(len(tokens) - 1, max_hit_tokens) // alignment * alignment:
        record[CAUSE] = BOUNDED
        return True
    record[GROUP] = group.parameters[NAME_IN_POOL]
    parent = hits[num_hits - 1] if num_hits else NULL_BLOCK
    above = pool.digests[parent] if num_hits else ROOT_WORDS
    wanted = tokens[num_hits * block_size : (num_hits + 1) * block_size]
    digest_block(above, wanted, extra_keys, 0, extra_keys.digest)
    return _record_fate(pool, group.parameters[NAME_IN_POOL], parent, wanted, extra_keys.digest, record)


@inlined
def _record_fate(
    pool: PoolArrays, name: int, parent: int, wanted: Int32Array, digest: Uint32Array, record: Int64Array
) -> bool:
    """Record the fate of a block; return whether the record is complete."""
    place = find_ghost(pool, name, digest)
    if place >= 0:
        record[CAUSE] = NUMBERS_OF_GHOSTS[ghost_cause(pool, place)]
        record[AGE] = 1 + ghost_age(pool, place)
        return True
    if find(pool, name, digest) != NULL_BLOCK:
        return False
    other = pool.records[parent, SUCCESSOR]
    if other != NULL_BLOCK and is_child_of(pool, name, other, parent):
        common = 0
        while common < len(wanted) and pool.tokens[other, common] == wanted[common]:
            common += 1
        if common == len(wanted):
            return False
        if pool.records[other, EXTRA] == 0 and record[POSITION] + common > 0:
            record[CAUSE] = CHANGED
            record[POSITION] += common
            record[HAS_TOKEN] = 1
            record[TOKEN] = pool.tokens[other, common]
            return True
    record[CAUSE] = UNKNOWN if has_forgotten(pool, digest) else NEVER_STORED
    return True
