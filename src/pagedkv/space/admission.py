"""Admitting a sequence: whether its prompt fits, what of it is cached, and allocating its first blocks.

The tables of a new row: the blocks of its prefix hit, then new ones for the rest. If the hit ends inside a block (its
*tail*: a state kept inside an interval, or a block that hits in part), the row goes on from a copy of that block. If
that is unreferenced and its pool has no room for a copy beside it, the row takes the block itself.

Of a prompt that ends in drafts the certain tokens are admitted, and then the drafts appended. Slots for them are
reserved with the certain tokens, so that appending finds them: all or nothing::

    [ hit | certain tokens, computed and published | drafts, computed | lookahead slots ]
      at most to the last certain token, whose logits verify the first draft
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.blocks import tenant_charges
from pagedkv.blocks.digests import set_digests
from pagedkv.blocks.life_cycle import acquire_all, reuse_all
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import AT_END, AT_JUNCTION, FREE, KEPT, LIFE, NULL_BLOCK, QUEUE, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import Allocation, Shortage
from pagedkv.contract.arrays import NO_BLOCKS, Int32Array, Uint32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import AllocStatus, Row, TokenIds
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space.crossing import allocate_encoder, as_encoder_tokens, num_encoder_blocks
from pagedkv.space.epochs import date_hit
from pagedkv.space.explaining import record_explanation
from pagedkv.space.growing import append, as_growth, note_reliance, slots_to_reserve, write_tokens
from pagedkv.space.hits import PrefixHit, Prompt, Tail, digests_of_prefix, prepare_prompt, require_beginning
from pagedkv.space.matching import match_prompt
from pagedkv.space.publishing import publish, tag_blocks
from pagedkv.space.replaying import begin_replay
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    FIRST_BLOCK,
    FROZEN,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_SINK_BLOCKS,
    NUM_TOKENS,
    SHEDS,
    TAIL,
    TAIL_LIFE,
    TENANT,
    GroupArrays,
    blocks_for,
    note_change,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.states import go_on_from, resume, surrender
from pagedkv.space.steps import StepLedger
from pagedkv.space.tenants import charge_hits, charge_to, keep_caps
from pagedkv.space.windows import keep_prompt


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
        num_reserved: slots for what grows beside it, which are to stay free.
        num_encoder_tokens: tokens of the encoder that it attends to.
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
    num_reserved: int = 0
    num_encoder_tokens: int = 0


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
            :func:`~pagedkv.space.hits.prepare_prompt`.
    """
    prompt = prepare_prompt(state, whole, keys, None, 0)
    require_beginning(prompt.tokens, tokens)
    if answer is None:
        return match_prompt(state, prompt)
    if isinstance(answer, PrefixHit) and not np.array_equal(answer.prompt.tokens, prompt.tokens):
        raise TokenError("match is the answer for another prompt than prompt")
    return answer


def split_drafts(
    state: SpaceState, tokens: Int32Array, num_draft: int, num_sequences: int
) -> tuple[Int32Array, Int32Array]:
    """Split a prompt into certain tokens and drafts.

    Raises:
        TokenError: no token would be certain, or a group is a recurrent state.
        ConfigurationError: several sequences share the prompt.
    """
    if state.is_recurrent:
        raise TokenError(
            "drafts cannot be allocated where a group is a recurrent state: allocate the certain tokens, then append "
            "the drafts, for which it needs num_draft_states"
        )
    if num_draft >= len(tokens):
        raise TokenError(f"num_draft = {num_draft} leaves none of {len(tokens)} tokens certain: one at least must be")
    if num_sequences > 1:
        raise ConfigurationError(
            f"num_draft = {num_draft} with num_sequences = {num_sequences}: fork first, then append drafts to each"
        )
    return tokens[:-num_draft], tokens[-num_draft:]


def append_drafts(state: SpaceState, ledger: StepLedger, row: Row, drafts: Int32Array, num_lookahead: int) -> None:
    """Append drafts to a row that has slots reserved for them and for the lookahead."""
    batch = np.array([row], np.int32)
    growth = as_growth(state, batch, [len(drafts)], num_lookahead, len(drafts))
    copies = append(state, ledger, growth, drafts)
    assert copies == [], f"row {row} lacked slots that were reserved for {len(drafts)} drafts"


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
        if admission.num_reserved:
            count += group.num_slots_blocks(0, admission.num_reserved)
        needed[group.pool.name] += count
    if state.cross_groups:
        for name, count in num_encoder_blocks(state, admission.num_encoder_tokens).items():
            needed[name] += count
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
        needed[group.pool.name] += group.num_slots_blocks(0, admission.num_reserved)
    for name, count in num_encoder_blocks(state, admission.num_encoder_tokens).items():
        needed[name] += count
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


def as_admissions(
    state: SpaceState,
    matches: Sequence[PrefixHit],
    tenants: Sequence[str | None] | None,
    num_lookahead: int,
    num_encoder_tokens: Sequence[int] | None,
) -> list[tuple[Admission, PrefixHit]]:
    """Check prompts that were matched, and their tenants.

    Raises:
        ConfigurationError: no answers of matches; not as many tenants, or an unknown one; not as many encoders.
        TokenError: a prompt and its lookahead, or an encoder, are longer than the tables.
    """
    if not isinstance(matches, Sequence) or not all(isinstance(hit, PrefixHit) for hit in matches):
        raise ConfigurationError(f"matches must be a list of what BlockSpace.match returned, got {matches!r}")
    names = [None] * len(matches) if tenants is None else tenants
    if isinstance(names, str) or not isinstance(names, Sequence) or len(names) != len(matches):
        raise ConfigurationError(f"tenants must name one tenant or None for each of {len(matches)} prompts: {names!r}")
    encoders = (0,) * len(matches) if num_encoder_tokens is None else num_encoder_tokens
    if isinstance(encoders, str | bytes) or not isinstance(encoders, Sequence) or len(encoders) != len(matches):
        raise ConfigurationError(
            f"num_encoder_tokens must have a number for each of {len(matches)} prompts, 0 for none: {encoders!r}"
        )
    admissions = []
    for hit, name, given in zip(matches, names, encoders, strict=True):
        prompt, tenant = hit.prompt, state.room.number_of(name)
        prepare_prompt(state, prompt.tokens, prompt.keys, None, num_lookahead)
        encoder = as_encoder_tokens(state, given, prompt.keys)
        wanted = Admission(prompt, num_lookahead, 1, len(prompt.tokens), tenant=tenant, num_encoder_tokens=encoder)
        admissions.append((wanted, hit))
    return admissions


def num_that_fit(state: SpaceState, admissions: list[tuple[Admission, PrefixHit]]) -> int:
    """Count the prompts, from the first on, that fit now one beside the other. Changes nothing.

    A free block that several of them hit is counted once, for the first. An empty pool has no watermark for the first
    alone.
    """
    needs: dict[int, dict[str, int]] = {}
    counted: dict[str, set[int]] = {name: set() for name in state.pools}
    for place, (admission, answer) in enumerate(admissions):
        hit = match_prompt(state, admission.prompt, answer)
        of_tenant = needs.setdefault(admission.tenant, dict.fromkeys(state.pools, 0))
        needed, shared = free_blocks_needed(state, admission, hit), hit.blocks_by_pool()
        for name, pool in state.pools.items():
            waiting = shared[name][pool.arrays.records[shared[name], QUEUE] == FREE].tolist()
            of_tenant[name] += needed[name] - len(counted[name].intersection(waiting))
            counted[name].update(waiting)
        if place == len(state.vacant_rows) or not state.room.fits_now(needs, is_first=place == 0):
            return place
    return len(admissions)


def allocate(
    state: SpaceState, ledger: StepLedger, admission: Admission, answer: PrefixHit | None
) -> Allocation | Shortage:
    """Give a prompt a row and blocks, or return the shortage, also of its forks, with nothing changed.

    Raises:
        TooManySequencesError: there are not enough vacant rows.
    """
    hit = match_prompt(state, admission.prompt, answer)
    shortage = state.room.find_shortage({admission.tenant: free_blocks_needed(state, admission, hit)})
    if shortage is not None:
        return shortage
    state.require_vacant_rows(admission.num_sequences)
    with state.changing:
        row = allocate_prompt(state, ledger, admission, hit)
        whole = admission.prompt_length
        checkpoint = 0 if state.checkpoints is None else state.checkpoint_of(whole, hit.num_tokens)
        return Allocation(row, hit.num_tokens, checkpoint)


def allocate_prompt(  # noqa: C901, PLR0912 - what only some spaces have is called where it happens
    state: SpaceState, ledger: StepLedger, admission: Admission, hit: PrefixHit
) -> Row:
    """Give a prompt a row and blocks; the caller has checked that there are enough of both."""
    prompt, num_lookahead, tenant = admission.prompt, admission.num_lookahead, admission.tenant
    taken_over = _tails_to_take_over(state, admission, hit) if hit.tails else ()
    batch = state.take_rows(1)
    row = int(batch[0])
    if state.has_tenants:
        state.rows[row, TENANT] = tenant
        charge_to(state, tenant)
    if state.explanations is not None:
        record_explanation(state, state.explanations, row, hit)
    for tell in state.observers.admitting:
        tell(row, hit)
    _take_hit(state, ledger, batch, hit)
    for group, blocks in zip(state.groups, hit.block_ids, strict=True):
        for tail in taken_over:
            if tail.group == group.index:
                surrender(group.pool.arrays, tail.block)  # it is the next block that the group takes
        state.loops[allocate_row](*group.view, row, blocks, prompt.tokens, num_lookahead)
    if hit.tails:
        _go_on_from_tails(state, ledger, row, hit)
    if admission.num_encoder_tokens:
        allocate_encoder(state, row, admission.num_encoder_tokens)
    if state.has_tenants:
        keep_caps(state, tenant)
    state.rows[row, NUM_PLANNED] = hit.num_tokens
    _begin_publishing(state, ledger, batch, admission, hit)
    if state.shedding_groups and admission.publishes:  # else no later prompt can hit up to its end
        keep_prompt(state, row, admission.prompt_length, hit)
    if state.checkpoints is not None and admission.publishes:
        state.checkpoints.wanted[row] = state.checkpoint_of(admission.prompt_length, hit.num_tokens)
    if state.receipts is not None:
        state.receipts.admitted(row, hit.num_tokens, hit.num_whole_tokens, admission.num_reached)
    for tell in state.observers.admitted:
        tell(row, hit, admission.num_reached)
    return Row(row)


def _go_on_from_tails(state: SpaceState, ledger: StepLedger, row: int, hit: PrefixHit) -> None:
    """Let a new row go on from the tails of its hit: the plan copies those that it has not taken over."""
    if state.checkpoints is not None:
        go_on_from(state, row, hit.tails)
    for tail in hit.tails:
        group = state.groups[tail.group]
        own = int(group.arrays.table[row, tail.logical_index])
        if resume(*group.view, row, tail.logical_index, tail.block):
            ledger.add_copies(group.pool.name, np.array([[tail.block, own]], np.int32))


def _begin_publishing(
    state: SpaceState, ledger: StepLedger, batch: Int32Array, admission: Admission, hit: PrefixHit
) -> None:
    """Continue the digest chains of a new row behind its hit, and publish what it completes, as far as it may."""
    row, prompt = int(batch[0]), admission.prompt
    if not admission.publishes:
        state.rows[row, FROZEN] = 1
    if admission.prompt_only:
        state.limits_publishing = True
        state.publish_limits[row] = admission.prompt_length
    if not state.config.prefix_caching:
        return
    for chains, lane, root in zip(state.chains, state.lanes, state.roots, strict=True):
        chains[row] = _chain_behind(state, lane, prompt, hit) if hit.num_tokens else root
    if prompt.has_extra_keys(state.weights.identity):
        _tag(state, row, prompt)
    if state.replaying_groups:
        begin_replay(state, row, prompt, hit)
    if len(prompt.digests):
        _take_digests(state, row, prompt)
    publish(state, ledger, batch)


def _take_hit(state: SpaceState, ledger: StepLedger, batch: Int32Array, hit: PrefixHit) -> None:
    """Reference all of a hit for the row of a batch, before any new block is taken, which could evict some of it."""
    if state.has_tenants:
        charge_hits(state, hit.block_ids)
    for group, blocks in zip(state.groups, hit.block_ids, strict=True):
        if len(blocks):
            state.loops[reuse_all](group.pool.arrays, blocks)
            note_reliance(state, ledger, group, batch, blocks)
    if state.counts_epochs:
        date_hit(state, batch, hit)
    for tail in hit.tails:  # referenced until the row has its blocks
        group, blocks = state.groups[tail.group], np.array([tail.block], np.int32)
        if state.has_tenants:
            tenant_charges.charge_hits(group.pool.arrays, blocks)
        state.loops[reuse_all](group.pool.arrays, blocks)
        if group.arrays.parameters[SHEDS]:  # a prompt ended with that state, or inside that block
            why = AT_END if group in state.state_groups else AT_JUNCTION
            group.pool.arrays.records[tail.block, KEPT] |= why
        note_reliance(state, ledger, group, batch, blocks)


def _tails_to_take_over(state: SpaceState, admission: Admission, hit: PrefixHit) -> tuple[Tail, ...]:
    """Choose the unreferenced tails in pools that have no room for a copy beside them: the row takes these blocks."""
    is_tight = {
        name: count + hit.num_free_tails[name] > state.room.spare(state.pools[name], admission.tenant)
        for name, count in free_blocks_needed(state, admission, hit).items()
    }
    pools = [state.groups[tail.group].pool for tail in hit.tails]
    return tuple(
        tail
        for tail, pool in zip(hit.tails, pools, strict=True)
        if is_tight[pool.name] and pool.arrays.records[tail.block, QUEUE] == FREE
    )


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
        return state.roots[lane[0].lane]
    ends = [(group.pool, hit.block_ids[group.index][num_blocks - 1 :]) for group in lane]
    known = [pool.arrays.digests[end] for pool, end in ends if len(end) and end[0] != NULL_BLOCK]
    digests = known[0] if known else digests_of_prefix(state, prompt, lane[0], num_blocks)
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
        state.rows[row, column] = stop
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
        group.table[row, index] = hits[index]
    wanted = blocks_for(len(tokens) + reserve, block_size)
    acquire_all(pool, group.table[row, num_hits:wanted])
    write_tokens(pool, group, row, num_hits, 0, tokens, num_hit_tokens, len(tokens) - num_hit_tokens)
    first = num_hits
    while first > 0 and hits[first - 1] != NULL_BLOCK:
        first -= 1
    rows[row, at + NUM_BLOCKS] = wanted
    rows[row, at + FIRST_BLOCK] = first
    rows[row, at + NUM_DIGESTED] = num_hits
    rows[row, at + NUM_PUBLISHED] = num_hits
    if num_hits > 0:
        rows[row, at + TAIL] = hits[num_hits - 1]
        rows[row, at + TAIL_LIFE] = pool.records[hits[num_hits - 1], LIFE]
    rows[row, NUM_TOKENS] = len(tokens)
    rows[row, NUM_ACCEPTED] = len(tokens)
    note_change(rows, row, at, 0, wanted)
