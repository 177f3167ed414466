"""Admitting a sequence: does its prompt fit, what of it is cached, and its first blocks."""

from pagedkv.core.blocks import FREE, NULL_BLOCK, QUEUE, Int32Array
from pagedkv.core.digests import ROOT_WORDS
from pagedkv.core.pool import BlockPool
from pagedkv.core.rows import AT, NUM_ACCEPTED, NUM_DIGESTED, NUM_PLANNED, NUM_TOKENS, RUNNING
from pagedkv.plan import Allocation, Shortage
from pagedkv.space.naming import publish, tag_blocks
from pagedkv.space.prompts import Prompt, match_prompt
from pagedkv.space.sharing import note_reliance, take_rows
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.spec import AllocStatus, Row

__all__ = ["admission_status", "allocate"]


def blocks_needed(state: SpaceState, num_tokens: int, num_lookahead: int) -> dict[str, int]:
    """Count, by pool, the blocks of a sequence without any hit."""
    needed = dict.fromkeys(state.pools, 0)
    for group in state.groups:
        needed[group.pool.name] += group.num_slots_blocks(num_tokens, num_lookahead)
    return needed


def free_blocks_needed(
    state: SpaceState, num_tokens: int, num_lookahead: int, hits: list[Int32Array]
) -> dict[str, int]:
    """Count, by pool, what allocating takes out of the free queue: new blocks, and hits that are free now."""
    needed = blocks_needed(state, num_tokens, num_lookahead)
    for group, blocks in zip(state.groups, hits, strict=True):
        if len(blocks):
            waiting = (group.pool.arrays.records[blocks, QUEUE] == FREE) & (blocks != NULL_BLOCK)
            needed[group.pool.name] += int(waiting.sum()) - len(blocks)
    return needed


def find_shortage(state: SpaceState, needed: dict[str, int]) -> Shortage | None:
    """Tell the first pool with too few free blocks, if any."""
    for name, count in needed.items():
        if count > state.pools[name].num_free:
            return Shortage(name, count, state.pools[name].num_free)
    return None


def admission_status(state: SpaceState, prompt: Prompt, num_lookahead: int, num_sequences: int) -> AllocStatus:
    """Tell whether a prompt, shared by so many sequences, fits now, later or never. Changes nothing.

    The watermark holds back admissions, so that running sequences can grow; it does not apply while a pool
    serves nobody, since a sequence that fits an empty pool must be admitted at some time.
    """
    most = blocks_needed(state, len(prompt.tokens), num_lookahead)
    if num_sequences > state.config.max_sequences:
        return AllocStatus.NEVER
    fits_an_empty_pool = all(count <= state.pools[name].num_usable for name, count in most.items())
    otherwise = AllocStatus.LATER if fits_an_empty_pool else AllocStatus.NEVER
    if num_sequences > len(state.vacant_rows):
        return otherwise
    needed = free_blocks_needed(state, len(prompt.tokens), num_lookahead, match_prompt(state, prompt))
    for name, count in needed.items():
        if count > state.pools[name].num_free - kept_free(state, state.pools[name]):
            return otherwise
    return AllocStatus.OK


def kept_free(state: SpaceState, pool: BlockPool) -> int:
    """Blocks that admissions leave free: the watermark, unless the pool serves nobody."""
    if pool.num_free == pool.num_usable:
        return 0
    return int(state.config.watermark * pool.num_usable)


def allocate(state: SpaceState, ledger: StepLedger, prompt: Prompt, num_lookahead: int) -> Allocation | Shortage:
    """Give a prompt a row and its blocks, or return the shortage with nothing changed."""
    hits = match_prompt(state, prompt)
    num_tokens = len(prompt.tokens)
    shortage = find_shortage(state, free_blocks_needed(state, num_tokens, num_lookahead, hits))
    if shortage is not None:
        return shortage
    batch = take_rows(state, 1)
    row = int(batch[0])
    state.reserve_events(1, num_tokens + num_lookahead)
    num_hit_tokens = len(hits[0]) * state.groups[0].block_size
    state.loops.clear_rows(state.rows, batch, RUNNING)
    for group, blocks in zip(state.groups, hits, strict=True):
        state.loops.reuse_all(group.pool.arrays, blocks)  # all hits before any new block, which might evict one
        note_reliance(state, ledger, group, batch, blocks)
    for group, blocks in zip(state.groups, hits, strict=True):
        state.loops.seat(group.pool.arrays, group.arrays, state.rows, row, blocks, prompt.tokens, num_lookahead)
    state.rows[row, NUM_TOKENS] = num_tokens
    state.rows[row, NUM_ACCEPTED] = num_tokens
    state.rows[row, NUM_PLANNED] = num_hit_tokens
    if state.config.prefix_caching:
        _start_chains(state, row, hits)
        if prompt.has_extra_keys(state.weights_epoch):
            _tag(state, row, prompt)
        _take_digests(state, row, prompt)
        publish(state, ledger, batch)
    return Allocation(Row(row), num_hit_tokens)


def _start_chains(state: SpaceState, row: int, hits: list[Int32Array]) -> None:
    """Continue the digest chain of each lane behind the hit, whose last block is always there."""
    for chains, lane in zip(state.chains, state.lanes, strict=True):
        blocks = hits[lane[0].index]
        chains[row] = lane[0].pool.arrays.digests[blocks[-1]] if len(blocks) else ROOT_WORDS


def _tag(state: SpaceState, row: int, prompt: Prompt) -> None:
    tag_blocks(state, row, prompt.keys)
    if prompt.keys.media:
        state.media_keys[row] = prompt.keys
        state.media_reach[row] = prompt.keys.media_reach


def _take_digests(state: SpaceState, row: int, prompt: Prompt) -> None:
    """Use the digests that the caller brought for the blocks that did not hit."""
    if len(prompt.digests) == 0:
        return
    for group in state.groups:
        column = int(group.arrays.parameters[AT]) + NUM_DIGESTED
        first, stop = int(state.rows[row, column]), len(prompt.digests)
        group.pool.arrays.digests[group.arrays.table[row, first:stop]] = prompt.digests[first:]
        state.rows[row, column] = stop
        state.chains[group.lane][row] = prompt.digests[-1]
