"""The arrays of block tables on one device, and their sizes; a copy of the tables on the host.

All kernels, Triton's and the plain ones, take one value, :class:`TableArrays`. Data flows through it as follows::

    plan -> ring (pinned) -> packet (device) -> index of the packet -> tables by row, tables by batch place, slots
            host writes       pull               pull                  step

All addresses are fixed, so that both kernels can be captured in a CUDA graph: they read the number of the ring's next
buffer, and every size, from memory. ``NOW`` is the number of the packet that is being applied. Index entries have the
number of their packet, and entries with an earlier number are ignored, so that they need not be cleared.

A space has one table for each group, then a second one for each group with draft states, numbered as in the plans'
table writes.

:class:`HostTables` is a copy of the tables on the host, used only while swaps run concurrently with steps. Recording a
plan appends it to a list. Its entries are written into the copy when they are needed, or when many plans are recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, final

import numpy as np
import torch

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import keeps_state, most_positions, num_draft_states
from pagedkv.plan_buffer import (
    ARRAYS_OF_KIND,
    COMPUTE,
    DRAFT_STATES,
    ENDS,
    ENTRIES,
    HEADER_WORDS,
    LINE_WORDS,
    RUNS,
    STARTS,
    UNKNOWN,
    PlanLayout,
    padded,
)

# Columns of ``geometry``.
BASE: Final = 0  # word of the arena where the group's table begins
WIDTH: Final = 1  # entries of a row
BLOCK_SIZE: Final = 2  # tokens of an entry
HAS_SLOTS: Final = 3  # 0 for recurrent states
RUNS_LINE: Final = 4  # words of a packet where a part's line of the directory begins
ENTRIES_LINE: Final = 5
STARTS_LINE: Final = 6  # 0 if the group's ranges have the same starts as those of other groups
ENDS_LINE: Final = 7  # 0 if they have the same ends, which is all but cross-attention
NUM_COLUMNS: Final = 8
# Words of ``clock``.
PULLED: Final = 0  # number of applied packets: the next one is in buffer PULLED % num_buffers of the ring
NOW: Final = 1  # number of the packet that was pulled last, from 1 on
LAST_WORDS: Final = 2  # words of the packet that was applied last, as a guess for the next one
RANGES_AT: Final = 3  # word at which the ranges of that packet began, as a guess for the next one
NUM_RANGES: Final = 4  # number of these ranges
UNKNOWN_AT: Final = 5  # word at which the numbers of their unknown tokens began; 0: it had none
NUM_CLOCKS: Final = 8
# Columns of ``run_of_row``.
RUN_START: Final = 0  # logical block of its first entry
RUN_COUNT: Final = 1
RUN_FIRST: Final = 2  # index of its first entry among those of the group
NUM_RUN_COLUMNS: Final = 4
# Columns of ``heads``: sizes of a packet's parts for a group, and where in the packet they begin.
NUM_RUNS: Final = 0
RUNS_AT: Final = 1
NUM_ENTRIES: Final = 2
ENTRIES_AT: Final = 3
NUM_ROWS: Final = 4
ROWS_AT: Final = 5
NUM_TOKENS: Final = 6
PADDED_TO: Final = 7  # end of the slots after NUM_TOKENS that earlier steps have written
ARE_SINGLE: Final = 8  # 1 if each run has one entry: the entry's number is the run's
ARE_DECODES: Final = 9  # 1 if each range has one position: the token's number is the place's
UNKNOWNS_AT: Final = 10  # 0 if the packet has none
NUM_HEADS: Final = 12
NO_FIRST: Final = 2**31 - 1
"""First position with a state of its own, if there is none."""


@dataclass(frozen=True, slots=True)
class TableGeometry:
    """Sizes of the tables: first those of the groups, then the second tables of groups with draft states.

    Args:
        widths: entries of a row, for each table.
        block_sizes: tokens of an entry.
        has_slots: whether the table's blocks hold tokens in slots, rather than states.
        max_rows: rows, and places of a batch.
        max_tokens: tokens of a step: the slots are padded with -1 up to this.
        num_buffers, buffer_words: sizes of the ring.
        depth: number of a row's last steps whose refused tokens are recorded.
        layout: layout of the space's plans, with the directory's line of each part.
    """

    widths: tuple[int, ...]
    block_sizes: tuple[int, ...]
    has_slots: tuple[bool, ...]
    max_rows: int
    max_tokens: int
    num_buffers: int
    buffer_words: int
    depth: int
    layout: PlanLayout

    @property
    def num_tables(self) -> int:
        """Number of all tables."""
        return len(self.widths)

    def line(self, kind: int, owner: int = 0) -> int:
        """Return the word at which the directory's line of a part begins; 0 if plans have no such part."""
        line = self.layout.lines.get((kind, owner))
        return 0 if line is None else HEADER_WORDS + LINE_WORDS * line


@dataclass(frozen=True, slots=True, eq=False)
class TableArrays:
    """The arrays of a step's kernels; G tables, R rows, which is also the most places of a batch, T tokens.

    Args:
        ring: int32 ``[num_buffers, buffer_words]``, pinned host memory: staged packets.
        packet: int32 ``[buffer_words]``: the packet that was pulled last.
        clock: int64 ``[NUM_CLOCKS]``.
        geometry: int64 ``[G, NUM_COLUMNS]``.
        compute_line, unknown_line, draft_line: words of the directory's lines; 0 if plans have no such part.
        tables: int32, all tables in one array, each ``[R, width]``: block ids by row.
        batch_tables: the same shape, by place in the batch.
        run_of_row: int32 ``[G, R, 4]``: the run that the packet writes to a row.
        run_stamps: int64 ``[G, R]``: number of that packet.
        run_firsts: int32 ``[G, R + 1]``: entries before each run.
        places: int32 ``[R]``: place of a row in the batch.
        place_stamps: int64 ``[R]``: number of the packet that set it.
        extents: int32 ``[G, R]``: entries of each row written so far, by any sequence.
        changed: int64 ``[G, R]``: number of the last packet that wrote to the row while it was not in the batch.
        held_rows: int32 ``[G, R]``: the row at a place of ``batch_tables``; -1: none.
        held_extents: int32 ``[G, R]``: number of its entries there.
        held_stamps: int64 ``[G, R]``: number of the last packet that these entries include.
        starts, seq_lens: int32 ``[G, R]``: range of each place, moved down by refused tokens (not an encoder's); 0
            after the batch.
        offsets: int32 ``[G, R + 1]``: tokens before each place, in the flat order.
        heads: int32 ``[G, NUM_HEADS]``: sizes and places of the packet's parts for a table.
        firsts: int32 ``[R]``: the first position of each place with a state in a slot of the second tables; NO_FIRST
            without any.
        sample_steps: int64 ``[R, depth]``: the last steps that computed a row.
        sample_ends, sample_refused: int32 ``[R, depth]``: ends of these steps' ranges, and their refused tokens.
        sample_counts: int32 ``[R]``: number of all steps that computed a row.
        slots: int64 ``[G, T]``: slot of each token; -1 after the last token, and for groups of states.
    """

    ring: torch.Tensor
    packet: torch.Tensor
    clock: torch.Tensor
    geometry: torch.Tensor
    compute_line: int
    unknown_line: int
    draft_line: int
    tables: torch.Tensor
    batch_tables: torch.Tensor
    run_of_row: torch.Tensor
    run_stamps: torch.Tensor
    run_firsts: torch.Tensor
    places: torch.Tensor
    place_stamps: torch.Tensor
    extents: torch.Tensor
    changed: torch.Tensor
    held_rows: torch.Tensor
    held_extents: torch.Tensor
    held_stamps: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    offsets: torch.Tensor
    heads: torch.Tensor
    firsts: torch.Tensor
    sample_steps: torch.Tensor
    sample_ends: torch.Tensor
    sample_refused: torch.Tensor
    sample_counts: torch.Tensor
    slots: torch.Tensor

    @property
    def num_tables(self) -> int:
        """Number of all tables."""
        return self.geometry.shape[0]

    @property
    def max_rows(self) -> int:
        """Number of rows, and of places of a batch."""
        return self.places.shape[0]


def make_arrays(sizes: TableGeometry, device: torch.device) -> TableArrays:
    """Allocate empty tables: every entry the null block, every slot -1."""
    count, rows = sizes.num_tables, sizes.max_rows
    bases, arena = [], 0
    for width in sizes.widths:
        bases.append(arena)
        arena += rows * width

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def nothing(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, -1, dtype=dtype, device=device)

    ring = torch.zeros(sizes.num_buffers, sizes.buffer_words, dtype=torch.int32, pin_memory=device.type == "cuda")
    return TableArrays(
        ring=ring,
        packet=zeros(sizes.buffer_words),
        clock=zeros(NUM_CLOCKS, dtype=torch.int64),
        geometry=torch.tensor(_geometry_rows(sizes, bases), dtype=torch.int64, device=device),
        compute_line=sizes.line(COMPUTE),
        unknown_line=sizes.line(UNKNOWN),
        draft_line=sizes.line(DRAFT_STATES),
        tables=zeros(arena),
        batch_tables=zeros(arena),
        run_of_row=zeros(count, rows, NUM_RUN_COLUMNS),
        run_stamps=zeros(count, rows, dtype=torch.int64),
        run_firsts=zeros(count, rows + 1),
        places=zeros(rows),
        place_stamps=zeros(rows, dtype=torch.int64),
        extents=zeros(count, rows),
        changed=zeros(count, rows, dtype=torch.int64),
        held_rows=nothing(count, rows),
        held_extents=zeros(count, rows),
        held_stamps=zeros(count, rows, dtype=torch.int64),
        starts=zeros(count, rows),
        seq_lens=zeros(count, rows),
        offsets=zeros(count, rows + 1),
        heads=zeros(count, NUM_HEADS),
        firsts=torch.full((rows,), NO_FIRST, dtype=torch.int32, device=device),
        sample_steps=nothing(rows, sizes.depth, dtype=torch.int64),
        sample_ends=zeros(rows, sizes.depth),
        sample_refused=zeros(rows, sizes.depth),
        sample_counts=zeros(rows),
        slots=nothing(count, sizes.max_tokens, dtype=torch.int64),
    )


def _geometry_rows(sizes: TableGeometry, bases: Sequence[int]) -> list[list[int]]:
    return [
        [
            bases[group],
            sizes.widths[group],
            sizes.block_sizes[group],
            int(sizes.has_slots[group]),
            sizes.line(RUNS, group),
            sizes.line(ENTRIES, group),
            sizes.line(STARTS, group),
            sizes.line(ENDS, group),
        ]
        for group in range(sizes.num_tables)
    ]


def views_of_arena(
    arrays: TableArrays, widths: Sequence[int], max_rows: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """View each group's table by row, and by place of the batch: int32 ``[max_rows, width]`` each."""
    shapes = list(zip(arrays.geometry[:, BASE].tolist(), widths, strict=True))
    tables, batch_tables = (
        tuple(arena[base : base + max_rows * width].view(max_rows, width) for base, width in shapes)
        for arena in (arrays.tables, arrays.batch_tables)
    )
    return tables, batch_tables


PARTS_OF_ROWS: Final = (RUNS, COMPUTE, UNKNOWN, STARTS, DRAFT_STATES, ENDS)


def buffer_words(layout: PlanLayout, sizes: TableGeometry, num_entries: int) -> int:
    """Return the words of a packet with all parts about rows and this many entries, each with a new block."""
    ranges = sum(ARRAYS_OF_KIND[kind] for kind, _ in layout.lines if kind in PARTS_OF_ROWS)
    return len(layout.template) + ranges * padded(sizes.max_rows) + 2 * padded(num_entries)


@dataclass(frozen=True, slots=True)
class SpaceTables:
    """The tables of one space.

    Args:
        num_groups: number of groups, each with a table of its own.
        block_sizes: tokens of an entry, for each group.
        widths: entries of a row, for each group.
        slots_of: for each group with draft states, the table of its slots and their number.
        num_blocks: for each table, blocks of the pool that its entries refer to.
        names: name of each table in errors.
        layout: layout of the space's plans.
    """

    num_groups: int
    block_sizes: tuple[int, ...]
    widths: tuple[int, ...]
    slots_of: Mapping[int, tuple[int, int]]
    num_blocks: tuple[int, ...]
    names: tuple[str, ...]
    layout: PlanLayout

    @classmethod
    def of(cls, config: SpaceConfig) -> "SpaceTables":
        """Return the tables that plans of a configuration write."""
        groups, by_pool = config.groups, config.blocks_by_pool()
        drafting = config.drafting
        owners = [*range(len(groups)), *drafting]
        sizes = tuple(_entry_tokens(config, index) for index in range(len(groups)))
        slots_of = {
            index: (table, num_draft_states(groups[index])) for table, index in enumerate(drafting, len(groups))
        }
        return cls(
            num_groups=len(groups),
            block_sizes=sizes,
            widths=tuple(
                -(-most_positions(group, config.max_tokens) // size) for group, size in zip(groups, sizes, strict=True)
            ),
            slots_of=MappingProxyType(slots_of),
            num_blocks=tuple(by_pool[groups[owner].pool] for owner in owners),
            names=(
                *(f"group {index}" for index in range(len(groups))),
                *(f"the draft states of group {index}" for index in drafting),
            ),
            layout=PlanLayout(config),
        )

    def geometry(
        self, config: SpaceConfig, *, max_tokens: int, num_buffers: int, depth: int, packet_entries: int
    ) -> TableGeometry:
        """Return the sizes of all tables, and of packets with ``packet_entries`` entries."""
        has_slots = [not keeps_state(group) for group in config.groups]
        seconds = self.slots_of.values()
        sizes = TableGeometry(
            widths=(*self.widths, *(num_slots for _, num_slots in seconds)),
            block_sizes=(*self.block_sizes, *(1 for _ in seconds)),
            has_slots=(*has_slots, *(False for _ in seconds)),
            max_rows=config.max_sequences,
            max_tokens=max_tokens,
            num_buffers=num_buffers,
            buffer_words=0,
            depth=depth,
            layout=self.layout,
        )
        return replace(sizes, buffer_words=buffer_words(self.layout, sizes, packet_entries))


def _entry_tokens(config: SpaceConfig, index: int) -> int:
    """Tokens of a table's entry; a state without checkpoints has one entry for the whole sequence."""
    group = config.groups[index]
    if keeps_state(group) and not (config.prefix_caching and group.prefix_caching):
        return config.max_tokens
    return group.block_size


MOST_WAITING: Final = 256


@final
class HostTables:
    """All tables, by row.

    Args:
        tables: the tables of the space.
        max_rows: number of rows.
    """

    def __init__(self, tables: SpaceTables, max_rows: int) -> None:
        widths = (*tables.widths, *(num_slots for _, num_slots in tables.slots_of.values()))
        self._tables: list[Int32Array] = [np.zeros((max_rows, width), np.int32) for width in widths]
        self._block_sizes = tables.block_sizes
        self._slots_of = {group: table for group, (table, _) in tables.slots_of.items()}
        self._waiting: list[StepPlan] = []

    def note(self, plan: StepPlan) -> None:
        """Record a plan that is executed."""
        self._waiting.append(plan)
        if len(self._waiting) > MOST_WAITING:
            self._apply()

    def written_by(self, plan: StepPlan, group: int) -> Int32Array:
        """List the blocks of a group that a plan's forward pass writes, or may write if tokens are unknown.

        The plan must be recorded. Cost: O(ranges + blocks), and O(entries) of the plans not yet written to the tables.
        """
        self._apply()
        ranges, size = plan.compute_in(group), self._block_sizes[group]
        num_unknown = 0 if plan.unknown is None or group in plan.crossing else plan.unknown.counts
        begins = np.maximum(ranges.starts - num_unknown, 0)
        first = begins // size
        counts = np.where(begins < ranges.ends, (ranges.ends + size - 1) // size - first, 0)
        rows = np.repeat(ranges.rows, counts)
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        written: Int32Array = self._tables[group][rows, index]
        if group in self._slots_of and plan.draft_states is not None:
            written = np.concatenate([written, self._tables[self._slots_of[group]][ranges.rows].ravel()])
        return written

    def _apply(self) -> None:
        for plan in self._waiting:
            for writes in plan.table_writes:
                rows = np.repeat(writes.rows, writes.counts)
                before = np.cumsum(writes.counts) - writes.counts
                index = np.arange(len(rows)) - np.repeat(before - writes.starts, writes.counts)
                self._tables[writes.group][rows, index] = writes.block_ids
        self._waiting.clear()
