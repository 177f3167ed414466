"""Admitting a sequence: whether its prompt fits, what of it is cached, and allocating its first blocks.

The tables of a new row: the blocks of its prefix hit, then new ones for the rest.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.digests import ROOT_WORDS, set_digests
from pagedkv.blocks.life_cycle import acquire_all, reuse_all
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import FREE, LIFE, NULL_BLOCK, QUEUE, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import Allocation, Shortage
from pagedkv.contract.arrays import NO_BLOCKS, Int32Array, Uint32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import AllocStatus, Row, TokenIds
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space.growing import note_reliance, slots_to_reserve, write_tokens
from pagedkv.space.matching import PrefixHit, Prompt, digests_of_prefix, match_prompt, prepare_prompt, require_beginning
from pagedkv.space.publishing import limit_publishing, publish, tag_blocks
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_SINK_BLOCKS,
    GroupArrays,
    begin_table,
    blocks_for,
    freeze,
    note_change,
    put_entry,
    set_column,
    set_tail,
    set_tokens,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger

__all__ = [
    "Admission",
    "admission_status",
    "allocate",
    "allocate_prompt",
    "allocate_row",
    "answer_for_whole",
    "as_policy",
    "free_blocks_needed",
    "make_fit",
]


class Admission(NamedTuple):
    """A request for admission.

    Args:
        prompt: the prompt, or its first chunk.
        num_lookahead: slots reserved beyond it, for each sequence.
        num_sequences: sequences that are to share it, all but one by forks.
        max_chunk: most tokens of it that one step computes.
        num_reached: leading tokens that an earlier life of the request had, according to its receipt.
        publishes: whether other sequences may hit what it computes; prompt_only: only its prompt, not what is appended.
        tenant: number of the tenant that is charged.
        prompt_length: tokens of the whole prompt, of which ``prompt`` may be a first part.
    """

    prompt: Prompt
    num_lookahead: int
    num_sequences: int
    max_chunk: int
    num_reached: int = 0
    publishes: bool = True
    prompt_only: bool = False
    tenant: int = 0
    prompt_length: int = 0


def as_policy(publish: object) -> tuple[bool, bool]:
    """Check the argument ``publish``: whether to publish anything, and only the prompt. Raises ConfigurationError."""
    if isinstance(publish, str) and publish == "prompt":
        return True, True
    if not isinstance(publish, bool | np.bool_):
        raise ConfigurationError(f'publish must be True or False, or "prompt", got {publish!r}')
    return bool(publish), False


def answer_for_whole(
    state: SpaceState, tokens: Int32Array, whole: TokenIds, keys: RequestKeys, answer: PrefixHit | None
) -> PrefixHit:
    """Match the whole prompt that begins with ``tokens``, unless ``answer`` is its match already.

    Raises:
        TokenError: the whole prompt does not begin with ``tokens``, or is not the prompt of ``answer``; see also
            :func:`~pagedkv.space.matching.prepare_prompt`.
    """
    prompt = prepare_prompt(state, whole, keys, None, 0)
    require_beginning(prompt.tokens, tokens)
    if answer is None:
        return match_prompt(state, prompt)
    if isinstance(answer, PrefixHit) and not np.array_equal(answer.prompt.tokens, prompt.tokens):
        raise TokenError("match is the answer for another prompt than prompt")
    return answer


def free_blocks_needed(state: SpaceState, admission: Admission, hit: PrefixHit | None) -> dict[str, int]:
    """Count, by pool, the free blocks that allocating takes: new blocks, and hits that are free now."""
    needed = dict.fromkeys(state.pools, 0)
    num_tokens, num_lookahead = len(admission.prompt.tokens), admission.num_lookahead
    for group in state.groups:
        count = group.num_slots_blocks(num_tokens, num_lookahead)
        if hit is not None:
            count += hit.num_free[group.index] - len(hit.block_ids[group.index])
        if admission.num_sequences > 1:
            count += _num_fork_blocks(group, admission)
        needed[group.pool.name] += count
    return needed


def _num_fork_blocks(group: Group, admission: Admission) -> int:
    """Count one group's blocks that a prompt's forks take for lookahead slots, copies included."""
    num_forks = admission.num_sequences - 1
    return num_forks * group.num_own_blocks(len(admission.prompt.tokens), admission.num_lookahead)


def peak_free_blocks_needed(state: SpaceState, admission: Admission, hit: PrefixHit | None) -> dict[str, int]:
    """Count, by pool, the most free blocks that a prompt holds at any one time during its prefill.

    The prefill goes by chunks of ``max_chunk`` tokens. They begin behind the hit. In groups outside prefix caching the
    first chunk begins at 0, and in replayed groups where the replay begins. Each step is acknowledged before the next
    chunk, so windows have slid. Forks follow the last chunk. Without a hit: what an empty pool must have.
    """
    num_tokens, num_lookahead = len(admission.prompt.tokens), admission.num_lookahead
    starts = np.arange(0 if hit is None else hit.num_tokens, num_tokens, admission.max_chunk)
    needed = {name: np.zeros(len(starts), np.int64) for name in state.pools}
    for group in state.groups:
        blocks = NO_BLOCKS if hit is None else hit.block_ids[group.index]
        waiting = (group.pool.arrays.records[blocks, QUEUE] == FREE) & (blocks != NULL_BLOCK)
        own_starts = np.append(_first_start(group, int(starts[0]), hit), starts[1:])
        needed[group.pool.name] += _taken_by_chunks(group, num_tokens, num_lookahead, own_starts, waiting)
        needed[group.pool.name][-1] += _num_fork_blocks(group, admission)
    return {name: int(by_chunk.max()) for name, by_chunk in needed.items()}


def _first_start(group: Group, start: int, hit: PrefixHit | None) -> int:
    """Return where the first chunk of a prompt begins in a group, if it begins at ``start`` in other groups."""
    if group.stays_out:
        return 0
    return start - hit.num_replayed if group.replays and hit is not None else start


def _taken_by_chunks(
    group: Group, num_tokens: int, num_lookahead: int, starts: npt.NDArray[np.int64], waiting: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Count the blocks that one group has taken at each chunk; ``waiting`` marks hit blocks that are free."""
    num_hits, num_sinks = len(waiting), int(group.arrays.parameters[NUM_SINK_BLOCKS])
    stops = -(-np.append(starts[1:], num_tokens) // group.block_size)
    stops[-1] = group.num_slots_blocks(num_tokens, num_lookahead)
    firsts = np.array([group.first_needed_token(start) // group.block_size for start in starts.tolist()])
    own = stops - np.maximum(firsts, num_hits) + np.maximum(0, np.minimum(num_sinks, firsts) - num_hits)
    num_waiting_below = np.concatenate([[0], np.cumsum(waiting)])
    below = np.minimum(firsts, num_hits)
    held = num_waiting_below[-1] - num_waiting_below[below]
    taken: npt.NDArray[np.int64] = own + held + num_waiting_below[np.minimum(below, num_sinks)]
    taken[0] = own[0] + num_waiting_below[-1]  # the first chunk takes the whole hit, also what it does not read
    return taken


def admission_status(state: SpaceState, admission: Admission, answer: PrefixHit | None) -> AllocStatus:
    """Return whether a prompt that ``num_sequences`` sequences share fits now, later or never. Changes nothing.

    The watermark limits admissions, so that running sequences can grow. It does not apply to a pool without any
    sequence: a sequence that fits an empty pool must be admitted at some time.
    """
    prompt, num_sequences, tenant = admission.prompt, admission.num_sequences, admission.tenant
    count_needed = free_blocks_needed if admission.max_chunk >= len(prompt.tokens) else peak_free_blocks_needed
    most = count_needed(state, admission, None)
    if num_sequences > state.config.max_sequences:
        return AllocStatus.NEVER
    is_possible = state.room.fits_empty_pools({tenant: most})
    has_rows = num_sequences <= len(state.vacant_rows)
    if is_possible and not has_rows:
        return AllocStatus.LATER
    hit = match_prompt(state, prompt, answer)
    needs = {tenant: count_needed(state, admission, hit)}
    if has_rows and state.room.fits_now(needs):
        return AllocStatus.OK
    if is_possible or state.room.fits_beside(needs, hit.blocks_by_pool()):
        return AllocStatus.LATER
    return AllocStatus.NEVER


def allocate(
    state: SpaceState, ledger: StepLedger, admission: Admission, answer: PrefixHit | None
) -> Allocation | Shortage:
    """Give a prompt a row and blocks, or return the shortage, also of its forks, with nothing changed."""
    hit = match_prompt(state, admission.prompt, answer)
    shortage = make_fit(state, admission, hit)
    if shortage is not None:
        return shortage
    with state.changing:
        row = allocate_prompt(state, ledger, admission, hit)
        return Allocation(row, hit.num_tokens, state.checkpoint_of(admission.prompt_length, hit.num_tokens))


def make_fit(state: SpaceState, admission: Admission, hit: PrefixHit) -> Shortage | None:
    """Return the shortage that refuses a prompt; None if it fits, and then every feature has prepared for it.

    Raises:
        TooManySequencesError: there are not enough vacant rows.
    """
    needed = free_blocks_needed(state, admission, hit)
    shortage = state.room.find_shortage({admission.tenant: needed})
    if shortage is not None:
        return shortage
    state.require_vacant_rows(admission.num_sequences)
    for feature in state.features:  # after all that may refuse: what they note is for the next allocation
        feature.fits(hit, needed, admission.tenant)
    return None


def allocate_prompt(state: SpaceState, ledger: StepLedger, admission: Admission, hit: PrefixHit) -> Row:
    """Give a prompt a row and blocks; the caller has checked that there are enough of both."""
    prompt, num_lookahead, hits = admission.prompt, admission.num_lookahead, hit.block_ids
    batch = state.take_rows(1)
    row = int(batch[0])
    for feature in state.features:
        feature.row_taken(batch, admission.tenant)
        feature.taking(admission.tenant)
    for observer in state.observers.admitting:
        observer.admitting(row, hit)
    _take_hit(state, ledger, batch, hit)
    for group, blocks in zip(state.groups, hits, strict=True):
        for feature in state.features:
            feature.allocating(group)
        state.loops[allocate_row](*group.view, row, blocks, prompt.tokens, num_lookahead)
    for feature in state.features:
        feature.allocated(ledger, row, hit)
    for feature in state.features:
        feature.taken(admission.tenant)
    set_column(state.rows, row, NUM_PLANNED, hit.num_tokens)
    _begin_publishing(state, ledger, batch, admission, hit)
    for feature in state.features if admission.publishes else ():  # else no later prompt can hit up to its end
        feature.prompt_known(row, admission.prompt_length, hit)
    for observer in state.observers.admitted:
        observer.admitted(row, hit, admission.num_reached)
    return Row(row)


def _begin_publishing(
    state: SpaceState, ledger: StepLedger, batch: Int32Array, admission: Admission, hit: PrefixHit
) -> None:
    """Continue the digest chains of a new row behind its hit, and publish what it completes, as far as it may."""
    row, prompt = int(batch[0]), admission.prompt
    if not admission.publishes:
        freeze(state.rows, row)
    if admission.prompt_only:
        limit_publishing(state, row, admission.prompt_length)
    if not state.config.prefix_caching:
        return
    for chains, lane in zip(state.chains, state.lanes, strict=True):
        chains[row] = _chain_behind(state, lane, prompt, hit) if hit.num_tokens else ROOT_WORDS
    if prompt.has_extra_keys(state.identity_epoch):
        _tag(state, row, prompt)
    for feature in state.features:
        feature.chains_begun(row, prompt, hit)
    if len(prompt.digests):
        _take_digests(state, row, prompt)
    publish(state, ledger, batch)


def _take_hit(state: SpaceState, ledger: StepLedger, batch: Int32Array, hit: PrefixHit) -> None:
    """Reference all of a hit for the row of a batch, before any new block is taken, which could evict some of it."""
    for feature in state.features:
        for group, blocks in zip(state.groups, hit.block_ids, strict=True):
            feature.reviving(group.pool, blocks)
    for group, blocks in zip(state.groups, hit.block_ids, strict=True):
        if len(blocks):
            state.loops[reuse_all](group.pool.arrays, blocks)
            note_reliance(state, ledger, group, batch, blocks)
    for feature in state.features:
        feature.hit_taken(ledger, batch, hit)


def _chain_behind(state: SpaceState, lane: tuple[Group, ...], prompt: Prompt, hit: PrefixHit) -> Uint32Array:
    """Return the digest with which the chain of a lane continues behind a hit: uint32 ``[8]``.

    It is the digest of the hit's last block, in any group of the lane that has this block. If all groups of a lane are
    chunked and the hit ends where a chunk begins, no group has it, and it is computed. A tail carries the digest of
    what comes before it.
    """
    for tail in hit.tails:
        if state.groups[tail.group].lane == lane[0].lane:
            return tail.parent
    num_blocks = hit.num_tokens // lane[0].block_size
    if num_blocks == 0:
        return ROOT_WORDS
    ends = [(group.pool, hit.block_ids[group.index][num_blocks - 1 :]) for group in lane]
    known = [pool.arrays.digests[end] for pool, end in ends if len(end) and end[0] != NULL_BLOCK]
    digests = known[0] if known else digests_of_prefix(state, prompt, lane[0].block_size, num_blocks)
    chain: Uint32Array = digests[-1]
    return chain


def _tag(state: SpaceState, row: int, prompt: Prompt) -> None:
    tag_blocks(state, row, prompt.keys)
    if prompt.keys.media:
        state.media_keys[row] = prompt.keys
        state.media_reach[row] = prompt.keys.media_reach


def _take_digests(state: SpaceState, row: int, prompt: Prompt) -> None:
    """Use the digests that the caller gave, for blocks that did not hit."""
    state.has_brought_digests = True
    for group in state.cached_groups:
        column = int(group.arrays.parameters[AT]) + NUM_DIGESTED
        first, stop = int(state.rows[row, column]), len(prompt.digests)
        set_digests(group.pool.arrays, group.arrays.table[row, first:stop], prompt.digests)
        set_column(state.rows, row, column, stop)
        state.chains[group.lane][row] = prompt.digests[-1]


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.NUMBER, Like.IDS, Like.IDS, Like.NUMBER)
@compiled
def allocate_row(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    hits: Int32Array,
    tokens: Int32Array,
    num_lookahead: int,
) -> None:
    """Fill a new row: the blocks of its prefix hit (already referenced), then new ones for the rest.

    Every group sets the row's number of tokens, to equal values.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    reserve = slots_to_reserve(group, num_lookahead)
    num_hits = len(hits)
    num_hit_tokens = num_hits * block_size
    for index in range(num_hits):
        put_entry(group.table, row, index, hits[index])
    wanted = blocks_for(len(tokens) + reserve, block_size)
    acquire_all(pool, group.table[row, num_hits:wanted])
    write_tokens(pool, group, row, num_hits, 0, tokens, num_hit_tokens, len(tokens) - num_hit_tokens)
    first = num_hits
    while first > 0 and hits[first - 1] != NULL_BLOCK:
        first -= 1
    begin_table(rows, row, at, wanted, first, num_hits)
    if num_hits > 0:
        set_tail(rows, row, at, hits[num_hits - 1], pool.records[hits[num_hits - 1], LIFE])
    set_tokens(rows, row, len(tokens), len(tokens))
    note_change(rows, row, at, 0, wanted)
