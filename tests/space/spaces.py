"""Small block spaces for tests: how they are built, driven by a line each, and shown not to have changed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from pagedkv import (
    Allocation,
    BlockSpace,
    FullAttention,
    GroupSpec,
    RequestKeys,
    SpaceConfig,
    StepPlan,
    TenantLimits,
    hash_request_tokens,
)
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.record import KEPT, NUM_EVENTS, SPARE
from pagedkv.contract.keys import NO_KEYS
from pagedkv.contract.plan import BlockMoves
from pagedkv.contract.spec import TokenIds
from pagedkv.space.rows import MARK

__all__ = [
    "acknowledge",
    "allocate",
    "cache",
    "computed_by",
    "copies_of",
    "found",
    "held",
    "hit",
    "named",
    "new_space",
    "only_pool",
    "pairs",
    "place",
    "prefill",
    "run_step",
    "same_numbers",
    "starts_of",
    "tokens",
    "unchanged",
]


class Settings(TypedDict, total=False):
    """What a test may set of a :class:`SpaceConfig`."""

    num_blocks: int | Mapping[str, int]
    num_host_blocks: int | Mapping[str, int]
    max_sequences: int
    max_tokens: int
    watermark: float
    prefix_caching: bool
    shed_windows: bool
    retention_interval: int
    min_partial_hit: int
    in_order: bool
    events: bool
    receipts: bool
    explain: bool
    ghosts_per_block: int
    eviction: str
    leases: bool
    tenants: Mapping[str, TenantLimits] | None
    weights_epoch: str | int
    max_epoch_lag: int


def new_space(*groups: GroupSpec, **settings: Unpack[Settings]) -> BlockSpace:
    """Build a space: full attention with blocks of 4 tokens, 100 of them usable, no watermark, by default."""
    settings.setdefault("num_blocks", 101)
    settings.setdefault("max_sequences", 16)
    settings.setdefault("max_tokens", 1000)
    settings.setdefault("watermark", 0.0)
    return BlockSpace(SpaceConfig(groups or (FullAttention(4),), **settings))


def tokens(length: int, first: int = 0) -> npt.NDArray[np.int32]:
    """Make tokens ``first, first + 1, ...``: prompts with different ``first`` share no block."""
    return np.arange(first, first + length, dtype=np.int32)


def allocate(space: BlockSpace, token_ids: TokenIds, keys: RequestKeys = NO_KEYS, num_lookahead: int = 0) -> int:
    """Allocate a sequence that fits; return its row."""
    allocation = space.allocate(token_ids, keys=keys, num_lookahead=num_lookahead)
    assert isinstance(allocation, Allocation)
    return allocation.row


def run_step(space: BlockSpace) -> StepPlan:
    """Plan a step, and acknowledge it at once."""
    plan = space.plan_step()
    space.acknowledge(plan.step_id)
    return plan


def acknowledge(space: BlockSpace, *plans: StepPlan) -> None:
    """Acknowledge planned steps, in this order."""
    for plan in plans:
        space.acknowledge(plan.step_id)


def prefill(space: BlockSpace, token_ids: TokenIds, keys: RequestKeys = NO_KEYS) -> int:
    """Allocate a sequence that fits, and compute it; return its row."""
    row = allocate(space, token_ids, keys)
    run_step(space)
    return row


def cache(space: BlockSpace, token_ids: TokenIds, keys: RequestKeys = NO_KEYS) -> None:
    """Serve a sequence from beginning to end, so that only its cached blocks are left."""
    space.free(prefill(space, token_ids, keys))


def hit(space: BlockSpace, token_ids: TokenIds, keys: RequestKeys = NO_KEYS) -> int:
    """Return how many tokens of a prompt are cached."""
    return space.match(token_ids, keys=keys).num_tokens


def held(space: BlockSpace, row: int, group: int = 0) -> list[int]:
    """Blocks that a row holds, the null block left out."""
    return [block for block in space.block_ids(row, group) if block]


def named(space: BlockSpace, prompt: npt.NDArray[np.int32], group: int = 1) -> dict[int, int]:
    """Return the logical blocks of a prompt that have a name in a group, and their block ids."""
    digests = hash_request_tokens(prompt, space.config.groups[group].block_size)
    stored = [space.stored_block(digest, group) for digest in digests]
    return {index: block.block_id for index, block in enumerate(stored) if block is not None}


def found(space: BlockSpace, prompt: npt.NDArray[np.int32], group: int = 1) -> list[int]:
    """Return the logical blocks of a prompt that have a name in a group and are not spare."""
    records = space._state.groups[group].pool.arrays.records
    return [index for index, block in named(space, prompt, group).items() if records[block, KEPT] != SPARE]


def only_pool(space: BlockSpace) -> BlockPool:
    """The device pool of a space that has one."""
    (pool,) = space._state.pools.values()
    return pool


@contextmanager
def unchanged(space: BlockSpace) -> Iterator[None]:
    """Assert that nothing observable changes inside: not one number of any array, and no planned move."""
    before, statistics = _numbers_of(space), space.statistics()
    yield
    after = _numbers_of(space)
    assert space.statistics() == statistics
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=f"{name} changed")
    space.check()


def same_numbers(left: BlockSpace, right: BlockSpace) -> bool:
    """Return whether two spaces have the same numbers everywhere."""
    mine, others = _numbers_of(left), _numbers_of(right)
    return mine.keys() == others.keys() and all(np.array_equal(mine[name], others[name]) for name in mine)


def _numbers_of(space: BlockSpace) -> dict[str, npt.NDArray[np.integer]]:
    """Copy everything a space consists of, but for the marks that checking a batch leaves on its rows."""
    state, opened = space._state, space._ledger._open
    numbers: dict[str, npt.NDArray[np.integer]] = {"rows": np.delete(state.rows, MARK, axis=1)}
    numbers["known tokens"] = state.num_known.copy()
    numbers["tickets"] = np.array([ticket.number for ticket in state.held], np.int32)
    numbers["publish limits"] = state.publish_limits.copy()
    numbers["clock"] = np.array([int(1000 * state.now_s)])
    numbers["frozen loads"] = np.array([loading.is_frozen for loading in state.loads.values()], np.bool_)
    if not isinstance(state.weights.epoch, str):
        numbers["epoch"] = np.array(state.weights.epoch)
    numbers["vacant rows"] = np.array(state.vacant_rows)
    numbers["extra keys"] = np.array(len(state.extra_keys))
    if state.receipts is not None:
        book = state.receipts
        numbers |= {"receipts": book.counts.copy(), "what waits": book.waiting.copy(), "totals": book.totals.copy()}
    if state.explanations is not None:
        told = state.explanations
        numbers |= {"explanations": told.current.copy(), "past ones": told.past.copy(), "all": told.num_past.copy()}
    if state.checkpoints is not None:
        numbers["checkpoints wanted"] = state.checkpoints.wanted.copy()
        notes = [(block, note.length, note.life) for (_, block), note in state.checkpoints._notes.items()]
        numbers["checkpoints kept"] = np.array(notes, np.int64)
    numbers["epochs"] = state.oldest_epochs.copy()
    numbers |= {f"ends {group}": ends.copy() for group, ends in state.ends.items()}
    for index, chains in enumerate(state.chains):
        numbers[f"digest chains {index}"] = chains.copy()
    numbers |= {f"table {table.index}": table.arrays.table.copy() for table in state.tables}
    for place, pool in enumerate(state.all_pools):
        for name, array in pool.arrays._asdict().items():
            num_kept = int(pool.arrays.counts[NUM_EVENTS]) if name == "event_log" else len(array)
            numbers[f"pool {place} {name}"] = array[:num_kept].copy()
    for kind, moves in (("copies", opened.copies), ("out", opened.swaps_out), ("in", opened.swaps_in)):
        pairs = [pair for by_pool in moves.values() for pair in by_pool.items()]
        numbers[f"planned {kind}"] = np.array(pairs, np.int64)
    return numbers


def place(space: BlockSpace, block: int) -> str:
    return only_pool(space).block(block).place


def pairs(moves: object) -> list[tuple[int, int]]:
    """The moves as (source, destination)."""
    assert isinstance(moves, tuple)
    return [
        pair
        for move in moves
        if isinstance(move, BlockMoves)
        for pair in zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True)
    ]


def copies_of(plan: StepPlan) -> list[tuple[int, int]]:
    """The plan's copies, (source, destination)."""
    return [pair for moves in plan.copies for pair in zip(moves.src_ids.tolist(), moves.dst_ids.tolist(), strict=True)]


def computed_by(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """The positions that the plan computes, by row."""
    compute = plan.compute
    ranges = zip(compute.starts.tolist(), compute.ends.tolist(), strict=True)
    return dict(zip(compute.rows.tolist(), ranges, strict=True))


def starts_of(plan: StepPlan) -> tuple[list[int], list[int]]:
    """Where the rows of a plan begin, in either group."""
    return plan.compute.starts.tolist(), plan.compute_in(1).starts.tolist()
