"""The plan of a step, immutable, and the page lists of attention kernels: the core's output for a device.

A :class:`StepPlan` lists all memory operations of one forward pass. Its parts are carried out in this order, each
complete before the next::

    1. swaps_out    device block -> host block      (first, since the forward pass may overwrite the device block)
    2. swaps_in     host block -> device block
    3. copies       device block -> device block    (no block is both a source and a destination)
    4. table_writes into the device's copy of the block tables
    5. compute      the forward pass writes positions [start, end) of each row into its slots; rows that share
                    a block may write the same keys and values to it twice (a fork before its prompt ran); groups
                    outside prefix caching may begin at other positions, and those of cross-attention have the
                    encoder's, see :meth:`StepPlan.compute_in`

An engine that must not read stale memory first zeroes ``new_blocks``, the blocks that this plan allocates without
content.

All arrays are read-only. Destinations are distinct, so that each part can be one parallel kernel. After step k has
run, the engine calls ``acknowledge(k)``; until then, no block of the plan is allocated to another row.

A plan is one contiguous buffer of int32 words, ``plan.buffer``, and its arrays are views of it::

    | header | directory of the parts | pool names | moves | table writes | compute | new blocks | ... |

The buffer is sent to a GPU or to other processes as it is, and :meth:`StepPlan.from_buffer` restores the plan there
without copying; :mod:`pagedkv.plan_buffer` draws every word.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import numpy as np

from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import StepId
from pagedkv.errors import PlanError
from pagedkv.plan_buffer import (
    ARRAYS_OF_KIND,
    COMPUTE,
    COPIES,
    DRAFT_STATES,
    ENDS,
    ENTRIES,
    NEW_BLOCKS,
    NUM_GROUPS,
    RUNS,
    STARTS,
    SWAPS_IN,
    SWAPS_OUT,
    UNKNOWN,
    Buffer,
    open_buffer,
    padded,
    read_directory,
    read_step_id,
)


@dataclass(frozen=True, slots=True, eq=False)
class BlockMoves:
    """Copies between blocks of equal shape in one pool: ``dst_ids[i]`` becomes ``src_ids[i]``.

    Args:
        pool: name of the device pool; swaps copy between it and its host pool.
        src_ids: int32 ``[n]``.
        dst_ids: int32 ``[n]``, all different.
    """

    pool: str
    src_ids: Int32Array
    dst_ids: Int32Array

    def __repr__(self) -> str:
        return f"BlockMoves({self.pool!r}, {len(self.src_ids):,} blocks)"


@dataclass(frozen=True, slots=True, eq=False)
class TableWrites:
    """New entries of one group's block table, as runs of consecutive logical blocks.

    Run i sets ``table[rows[i], starts[i] : starts[i] + counts[i]]`` to the next ``counts[i]`` of
    ``block_ids``. Entries of blocks before a window are not rewritten, since no kernel reads them.

    Args:
        group: index of the group. Indices from the number of groups on mean the second tables of the groups that keep
            draft states, in the order of these groups; the run then consists of slots of such a table
            (:class:`DraftStates`).
        rows: int32 ``[r]``.
        starts: int32 ``[r]``, logical block index of each run.
        counts: int32 ``[r]``, entries of each run.
        block_ids: int32 ``[sum(counts)]``.
    """

    group: int
    rows: Int32Array
    starts: Int32Array
    counts: Int32Array
    block_ids: Int32Array

    def __repr__(self) -> str:
        return f"TableWrites(group {self.group}: {len(self.rows):,} rows, {len(self.block_ids):,} entries)"


@dataclass(frozen=True, slots=True, eq=False)
class TokenRanges:
    """Positions that a step computes and writes: ``[starts[i], ends[i])`` of ``rows[i]``, rows ascending."""

    rows: Int32Array
    starts: Int32Array
    ends: Int32Array

    @property
    def num_tokens(self) -> int:
        """Number of positions of all rows. O(rows)."""
        return int(self.ends.sum(dtype=np.int64) - self.starts.sum(dtype=np.int64))

    def offsets(self) -> Int32Array:
        """Compute where each row's positions begin in the flat order of the step: int32 ``[rows + 1]``. O(rows).

        This is FlashInfer's ``qo_indptr`` and FlashAttention's ``cu_seqlens_q``; ``ends`` are the sequences' lengths.
        """
        offsets = np.zeros(len(self.rows) + 1, np.int32)
        np.cumsum(self.ends - self.starts, out=offsets[1:])
        return offsets

    def positions(self) -> Int32Array:
        """List every position, row by row: int32 ``[num_tokens]``. O(tokens)."""
        offsets = self.offsets()
        flat = np.arange(offsets[-1], dtype=np.int32)
        return flat + np.repeat(self.starts - offsets[:-1], np.diff(offsets))

    def __repr__(self) -> str:
        return f"TokenRanges({len(self.rows):,} rows, {self.num_tokens:,} tokens)"


@dataclass(frozen=True, slots=True, eq=False)
class UnknownTokens:
    """Ranges that are upper bounds, since their rows had unknown tokens when the step was planned.

    By the time this step runs, the steps before it may have refused some of these tokens. The device moves the start,
    the end and the slots of the row's range down by as many. Where ``steps_back`` is above 0, the range begins where
    the range of the row's last step ended on the device, less the tokens that were refused of that step, and never
    above the start that the plan gives: the row may have been rolled back since.

    Args:
        counts: int32 ``[ranges]``, trailing unknown tokens of the row, up to the end of the range; 0 if all are
            known. Some of them may lie before the start of the range.
        steps_back: int32 ``[ranges]``; step ``step_id - steps_back`` samples the first of them; 0 if this step does (a
            draft). If that step is over, the value may name any other step: then only whether it is 0 counts.
    """

    counts: Int32Array
    steps_back: Int32Array

    def __repr__(self) -> str:
        return f"UnknownTokens({int(self.counts.sum()):,} in {int((self.counts > 0).sum()):,} rows)"


@dataclass(frozen=True, slots=True, eq=False)
class DraftStates:
    """Positions with a state of their own, since they may be refused, in groups that keep draft states.

    The state after position ``p`` of a row is in slot ``p % num_draft_states`` of the group's second table if ``p >=
    firsts[i]``, else in the block of ``p`` in its first table. A step that computes ``[s, e)`` reads the state of
    position ``s - 1`` from that place, and writes to that place the state of every position from ``max(s, firsts[i])``
    on. Below ``firsts[i]`` it writes, as any step does, the state of the last position and of every checkpoint. Here
    ``s`` and ``e`` are those on the device, moved down by the number of refused tokens; ``firsts`` do not move.

    Args:
        firsts: int32 ``[ranges]``, the first position of each range's row that has a state of its own, at most the
            range's end.
    """

    firsts: Int32Array

    def __repr__(self) -> str:
        return f"DraftStates({len(self.firsts):,} rows)"


@dataclass(frozen=True, slots=True, eq=False)
class NewBlocks:
    """Blocks that a plan allocates without content: taken from the free blocks since the plan before, none by a hit.

    Their content is stale. They include reserved blocks, but not the destinations of copies and swaps, nor blocks
    that :meth:`~pagedkv.space.block_space.BlockSpace.mark_computed` declared as filled.

    Args:
        pool: name of the device pool.
        block_ids: int32 ``[n]``, all different.
    """

    pool: str
    block_ids: Int32Array

    def __repr__(self) -> str:
        return f"NewBlocks({self.pool!r}, {len(self.block_ids):,} blocks)"


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The parts of a plan, as views of its buffer."""

    swaps_out: tuple[BlockMoves, ...]
    swaps_in: tuple[BlockMoves, ...]
    copies: tuple[BlockMoves, ...]
    table_writes: tuple[TableWrites, ...]
    compute: TokenRanges
    new_blocks: tuple[NewBlocks, ...]
    compute_outside: Mapping[int, TokenRanges]
    crossing: frozenset[int]
    unknown: UnknownTokens | None
    draft_states: DraftStates | None


@final
class StepPlan:
    """All memory operations of one step; the module's docstring gives their order. Immutable.

    A plan is its buffer: plans are equal if their buffers are. The parts are parsed on first access, which takes 8 us
    for the five of a decode step, so that a process which only forwards the buffer does not spend them.

    Attributes:
        step_id: number of the step.
        buffer: int32 ``[words]``, the whole plan (:mod:`pagedkv.plan_buffer`); read-only, bytes-like.
    """

    __slots__ = ("_known_parts", "_pool_names", "buffer", "step_id")

    def __init__(self, step_id: StepId, buffer: Int32Array, pool_names: tuple[str, ...]) -> None:
        """View a buffer that is known to be the plan of that step; :meth:`from_buffer` opens unchecked ones."""
        self.step_id = step_id
        self.buffer = buffer
        self._pool_names = pool_names
        self._known_parts: _Parts | None = None

    @classmethod
    def from_buffer(cls, buffer: Buffer) -> "StepPlan":
        """Restore a plan from its buffer, without copying; changes nothing.

        Args:
            buffer: ``plan.buffer``, or its bytes from another process: bytes, bytearray, memoryview or array,
                contiguous. The plan's arrays are read-only views of it, so it must not be written meanwhile.

        Raises:
            PlanError: the buffer is cut short, of another version, was spoilt on its way (its checksum is another one),
                or contradicts itself.
            MissingExtraError: the writer of the plan had the package xxhash, and here it is not installed.

        Cost: a few passes over the words.
        """
        words, pool_names = open_buffer(buffer)
        return cls(StepId(read_step_id(words)), words, pool_names)

    @property
    def swaps_out(self) -> tuple[BlockMoves, ...]:
        """Copies from device blocks to host blocks, one entry for each pool that has any."""
        return self._parts().swaps_out

    @property
    def swaps_in(self) -> tuple[BlockMoves, ...]:
        """Copies from host blocks to device blocks, one entry for each pool that has any."""
        return self._parts().swaps_in

    @property
    def copies(self) -> tuple[BlockMoves, ...]:
        """Copies between device blocks, one entry for each pool that has any."""
        return self._parts().copies

    @property
    def table_writes(self) -> tuple[TableWrites, ...]:
        """New entries of the block tables, one entry for each table that has any."""
        return self._parts().table_writes

    @property
    def compute(self) -> TokenRanges:
        """Positions that the forward pass computes."""
        return self._parts().compute

    def compute_in(self, group: int) -> TokenRanges:
        """Positions to be written in one group, for the same rows as :attr:`compute`, and with the same ends.

        In a group outside prefix caching, ranges may have other starts: an earlier one where the other groups hit, and
        the range's end where this group has nothing to compute. A window that is replayed
        (:class:`~pagedkv.Replay`) also has starts of its own; the blocks before such a start, which its first
        positions would attend to, are gone and 0 in the table.

        In a group of cross-attention (:attr:`crossing`) the positions are those of the encoder's tokens, and the range
        ends with them: it has all of them if the step is to write them, else none.

        Args:
            group: index of the group; a group without starts of its own has the ranges of :attr:`compute`.

        Raises:
            PlanError: the plan has no such group.
        """
        number = as_count(group, "group", most=int(self.buffer[NUM_GROUPS]) - 1, error=PlanError)
        return self.compute_outside.get(number, self.compute)

    @property
    def compute_outside(self) -> Mapping[int, TokenRanges]:
        """The ranges that :meth:`compute_in` returns for each group with starts of its own, by its index."""
        return self._parts().compute_outside

    @property
    def crossing(self) -> frozenset[int]:
        """The groups of cross-attention: their ranges are positions of encoders' tokens."""
        return self._parts().crossing

    @property
    def unknown(self) -> UnknownTokens | None:
        """The ranges of :attr:`compute` that end in unknown tokens; None if there are none."""
        return self._parts().unknown

    @property
    def draft_states(self) -> DraftStates | None:
        """The positions of :attr:`compute` that have a state of their own; None if there are none."""
        return self._parts().draft_states

    @property
    def new_blocks(self) -> tuple[NewBlocks, ...]:
        """Blocks that are allocated without content, one entry for each pool that has any."""
        return self._parts().new_blocks

    def __repr__(self) -> str:
        moved = [sum(len(part.src_ids) for part in parts) for parts in (self.copies, self.swaps_out, self.swaps_in)]
        written, new = (sum(len(part.block_ids) for part in parts) for parts in (self.table_writes, self.new_blocks))
        return (
            f"StepPlan(step {self.step_id}: {len(self.compute.rows):,} rows compute "
            f"{self.compute.num_tokens:,} tokens, {written:,} table writes, {new:,} new blocks, "
            f"{moved[0]:,} copies, {moved[1]:,} swaps out, {moved[2]:,} in)"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepPlan) and np.array_equal(self.buffer, other.buffer)

    def __hash__(self) -> int:
        return hash(self.buffer.tobytes())

    def __reduce__(self) -> tuple[Callable[[bytes], "StepPlan"], tuple[bytes]]:
        """Pickle the buffer, from which unpickling restores the plan."""
        return StepPlan.from_buffer, (self.buffer.tobytes(),)

    def _parts(self) -> _Parts:
        if self._known_parts is None:
            self._known_parts = _parts_of(self.buffer, self._pool_names)
        return self._known_parts


def _parts_of(words: Int32Array, pool_names: tuple[str, ...]) -> _Parts:
    moves: dict[int, list[BlockMoves]] = {SWAPS_OUT: [], SWAPS_IN: [], COPIES: []}
    table_writes: list[TableWrites] = []
    new_blocks: list[NewBlocks] = []
    bounds: dict[int, dict[int, Int32Array]] = {STARTS: {}, ENDS: {}}
    by_kind: dict[int, list[Int32Array]] = {}
    for kind, owner, offset, length in read_directory(words):
        if kind == COMPUTE:
            compute = TokenRanges(*_arrays(words, offset, length, 3))
        elif kind in bounds:
            bounds[kind][owner] = words[offset : offset + length]
        elif length == 0:
            continue
        elif kind == RUNS:
            rows, starts, counts = _arrays(words, offset, length, 3)
        elif kind == ENTRIES:
            table_writes.append(TableWrites(owner, rows, starts, counts, words[offset : offset + length]))
        elif kind in {UNKNOWN, DRAFT_STATES}:
            by_kind[kind] = _arrays(words, offset, length, ARRAYS_OF_KIND[kind])
        elif kind == NEW_BLOCKS:
            new_blocks.append(NewBlocks(pool_names[owner], words[offset : offset + length]))
        elif kind in moves:
            moves[kind].append(BlockMoves(pool_names[owner], *_arrays(words, offset, length, 2)))
    outside = {
        group: TokenRanges(compute.rows, starts, bounds[ENDS].get(group, compute.ends))
        for group, starts in bounds[STARTS].items()
    }
    return _Parts(
        tuple(moves[SWAPS_OUT]),
        tuple(moves[SWAPS_IN]),
        tuple(moves[COPIES]),
        tuple(table_writes),
        compute,
        tuple(new_blocks),
        MappingProxyType(outside),
        frozenset(bounds[ENDS]),
        UnknownTokens(*by_kind[UNKNOWN]) if UNKNOWN in by_kind else None,
        DraftStates(*by_kind[DRAFT_STATES]) if DRAFT_STATES in by_kind else None,
    )


def _arrays(words: Int32Array, offset: int, length: int, num_arrays: int) -> list[Int32Array]:
    starts = [offset + place * padded(length) for place in range(num_arrays)]
    return [words[start : start + length] for start in starts]


@dataclass(frozen=True, slots=True, eq=False)
class PageLists:
    """The pages of several rows in one list, as FlashInfer takes them (compressed sparse rows).

    Row i has the pages ``indices[indptr[i] : indptr[i + 1]]``, which hold its positions from ``starts[i]`` on.

    Args:
        indptr: int32 ``[rows + 1]``.
        indices: int32 ``[pages]``, block ids; never the null block.
        last_page_len: int32 ``[rows]``, tokens in the last page of each row; 0 for a row without pages.
        starts: int32 ``[rows]``, position of the first page's first token: 0 until a window drops blocks.
    """

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array
    starts: Int32Array

    def __repr__(self) -> str:
        return f"PageLists({len(self.starts):,} rows, {len(self.indices):,} pages)"
