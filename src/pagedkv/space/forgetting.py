"""Forgetting content: removing a prompt, or its part from a position on, and all that continues it, from the caches.

For content that will not, or must not, be hit again: a user's data, or a branch that a search has dropped. It leaves
the prefix index on the device and on the host, in every group. Rows that hold any of it keep their blocks and run on;
they publish nothing from now on, so that it does not come back. Loads of it that are under way are not published.

If a full-attention group of equal block size is there, its links give the blocks that continue the prompt. Else only
the prompt's own blocks are forgotten. Blocks that continue them cannot be hit without such a group, unless a window
holds all that is read.

An engine that sleeps, or lends its memory to training, releases the device's memory: all content there is lost. Host
memory stays as it is, and swapped-out sequences can be swapped in once there is device memory again.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.prefix_index import find
from pagedkv.blocks.record import (
    DISMISSED,
    INVALIDATED,
    LIFE,
    NAME,
    NULL_BLOCK,
    NUM_SENTINELS,
    PARENT,
    PARENT_LIFE,
    REF_COUNT,
)
from pagedkv.contract.answers import InvalidatedMemory
from pagedkv.contract.arrays import DIGEST_NBYTES
from pagedkv.contract.spec import Row
from pagedkv.errors import StepError
from pagedkv.space.hits import Prompt, digests_of_prefix
from pagedkv.space.loading import freeze_loads, tickets_out
from pagedkv.space.matching import match_prompt
from pagedkv.space.rows import (
    AT,
    FROZEN,
    LOST,
    LOST_ON_HOST,
    NUM_DIGESTED,
    RUNNING,
    STATUS,
    SWAPPED,
    VACANT,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.space.withdrawing import TAINTED, spread_taint


def forget(state: SpaceState, prompt: Prompt, start: int) -> int:
    """Drop the cached blocks of a prompt from position ``start`` on from the index; return how many blocks."""
    if not state.config.prefix_caching:
        return 0
    with state.changing:
        gone = [_digests_behind(state, lane, prompt, start) for lane in state.lanes]
        num_dropped = sum(_drop(pool, gone, state) for pool in state.all_pools)
        num_dropped += _drop_tails(state, prompt, start)
        for row in np.flatnonzero(state.rows[:, STATUS] != VACANT).tolist():
            if any(_holds(state, group, row, gone[group.lane]) for group in state.cached_groups):
                state.rows[row, FROZEN] = 1
        for loading in state.loads.values():
            known = zip(loading.digests, gone, strict=True)
            loading.is_frozen |= any(not digests.isdisjoint(_as_bytes(own)) for own, digests in known)
    return num_dropped


def start_of_branch(state: SpaceState, prompt: Prompt) -> int:
    """Return the position in a prompt behind which no row uses it, and no other content continues it.

    Without a group whose links tell what continues a block, it is the prompt's length.
    """
    starts = [
        _num_shared(state, group, prompt) * group.block_size
        for group in state.cached_groups
        if group.keeps_whole_prefix
    ]
    return max(starts, default=len(prompt.tokens))


def _num_shared(state: SpaceState, group: Group, prompt: Prompt) -> int:
    """Count the leading blocks of a prompt up to the last that a row uses, or that another block continues."""
    arrays, name, size = group.pool.arrays, group.index + 1, group.block_size
    records = arrays.records[:-NUM_SENTINELS]
    own: list[int] = []
    for digest in digests_of_prefix(state, prompt, group, len(prompt.tokens) // size):
        block = find(arrays, name, digest)
        if block == NULL_BLOCK:
            break
        own.append(block)
    place = np.full(len(records), -1)
    place[own] = np.arange(len(own))
    named = np.flatnonzero(records[:, NAME] == name)
    followers = named[records[records[named, PARENT], LIFE] == records[named, PARENT_LIFE]]
    parents = place[records[followers, PARENT]]
    continued = parents[(parents >= 0) & (place[followers] != parents + 1)]
    used = np.flatnonzero(records[own, REF_COUNT] > 0)
    return 1 + max((int(each) for each in (*continued, *used)), default=-1)


def _digests_behind(state: SpaceState, lane: tuple[Group, ...], prompt: Prompt, start: int) -> set[bytes]:
    """Digests of the prompt's blocks whose names reach beyond a position, and of all blocks known to continue them."""
    first = lane[0]
    own = digests_of_prefix(state, prompt, first, len(prompt.tokens) // first.block_size)[first.num_sealed(start) :]
    gone = set(_as_bytes(own))
    for group in lane:
        if group.keeps_whole_prefix:
            arrays, name = group.pool.arrays, group.index + 1
            marks = np.zeros(group.pool.num_blocks, np.uint8)
            for digest in own:
                marks[find(arrays, name, digest)] = TAINTED
            marks[NULL_BLOCK] = 0
            spread_taint(arrays, name, marks)
            gone.update(_as_bytes(arrays.digests[np.flatnonzero(marks == TAINTED)]))
    return gone


def _drop(pool: BlockPool, gone: list[set[bytes]], state: SpaceState) -> int:
    blocks = pool.prefix_index.named_blocks().tolist()
    names = [state.groups[(pool.block(block).group or 0)].lane for block in blocks]
    digests = _as_bytes(pool.arrays.digests[blocks])
    found = [block for block, lane, digest in zip(blocks, names, digests, strict=True) if digest in gone[lane]]
    for block in found:
        drop_name(pool.arrays, block, DISMISSED)
    return len(found)


def _drop_tails(state: SpaceState, prompt: Prompt, start: int) -> int:
    """Unname states that are kept inside intervals and that the prompt hits behind a position; return how many."""
    num_dropped = 0
    while True:
        hit = match_prompt(state, prompt)
        tails = [tail for tail in hit.tails if state.groups[tail.group] in state.state_groups]
        if not tails or hit.num_tokens <= start:
            return num_dropped
        for tail in tails:
            drop_name(state.groups[tail.group].pool.arrays, tail.block, DISMISSED)
            num_dropped += 1


def _holds(state: SpaceState, group: Group, row: int, gone: set[bytes]) -> bool:
    """Return whether a row holds forgotten content."""
    is_on_host = state.rows[row, STATUS] in {SWAPPED, LOST_ON_HOST}
    pool = group.host_pool if is_on_host and group.host_pool is not None else group.pool
    table = group.arrays.table[row, : int(state.rows[row, int(group.arrays.parameters[AT]) + NUM_DIGESTED])]
    return not gone.isdisjoint(_as_bytes(pool.arrays.digests[table[table != NULL_BLOCK]]))


def _as_bytes(digests: npt.NDArray[np.uint32]) -> list[bytes]:
    raw = np.ascontiguousarray(digests).tobytes()
    return [raw[first : first + DIGEST_NBYTES] for first in range(0, len(raw), DIGEST_NBYTES)]


def invalidate_memory(state: SpaceState, ledger: StepLedger) -> InvalidatedMemory:
    """Drop all device blocks from the prefix index, and lose the running rows.

    Raises:
        StepError: steps are in flight, or the open plan moves blocks; nothing was changed.
    """
    if ledger.in_flight:
        ids = [step.plan.step_id for step in ledger.in_flight]
        raise StepError(f"memory cannot be given back while steps {ids} are in flight: acknowledge or abort them")
    if ledger.has_moves:
        raise StepError("memory cannot be given back while the open plan copies or swaps blocks: plan the step first")
    with state.changing:
        for pool in state.pools.values():
            pool.clear_names(INVALIDATED)
        ledger.forget_duplicates()
        running = np.flatnonzero(state.rows[:, STATUS] == RUNNING)
        state.rows[running, STATUS] = LOST
        return InvalidatedMemory(tuple(map(Row, running.tolist())), tickets_out(state), freeze_loads(state))
