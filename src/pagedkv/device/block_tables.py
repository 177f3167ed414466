"""Block tables of all groups on a device, by row, and in the batch order of a step; and how plans reach them.

A plan goes through this file from top to bottom::

    PlanChecks     whether it is one of this space, and fits these tables
    PacketRing     its words in pinned memory, for the device to read
    StepGraph      the kernels that apply it, as one launch
    StepInputs     what the kernels of attention read
    BlockTables    the tables: calls all of these

Tables are written either by plans or by calls, never by both. By plans: :meth:`BlockTables.step` executes the parts of
a :class:`~pagedkv.contract.plan.StepPlan` about tables, batch order and slots. By calls, as in other systems:
``append_block_ids``, ``apply_staged_writes``, ``gather_block_tables``, ``compute_slot_mappings``.

The memory of blocks, and the moves of a plan, are not handled here. The batch order of a plan is that of its ranges:
rows ascending.

A plan is checked before any part of it is executed, so that a refused plan has written nothing.
``StepPlan.from_buffer`` has checked that a plan's buffer is consistent. The checks here make only a few passes over its
words, since they run between two GPU steps.

Packets of table entries go through pinned buffers that the host fills and a GPU reads. A buffer is rewritten only when
its event shows that the kernel that read it has ended. The GPU counts its packets itself (``clock``), so a captured
graph needs no argument to locate the next packet. Hence the host must launch each packet exactly once, before it stages
the next one.

How many tokens steps have refused, by row, is kept on the device: later ranges move down by these numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.contract.arguments import as_count, as_flag, require_instance
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import StepId
from pagedkv.device.kernels.selection import KernelChoice, kernels_for
from pagedkv.device.shapes import PageNumbers
from pagedkv.device.staged_writes import (
    Run,
    StagedWrites,
    as_batch_rows,
    as_block_ids,
    as_padding,
    require_ids,
    require_room,
    runs_of,
    without_writes,
)
from pagedkv.device.table_arrays import (
    BLOCK_SIZE,
    NUM_TOKENS,
    PADDED_TO,
    SpaceTables,
    TableArrays,
    TableGeometry,
    make_arrays,
    views_of_arena,
)
from pagedkv.device.table_forms import (
    StateRanges,
    StateTable,
    page_list,
    page_table,
    state_blocks,
    state_tables,
    state_writes,
)
from pagedkv.device.tensors import as_device, require_numbers, require_pinned, require_tensor
from pagedkv.errors import ConfigurationError, PlanError, StepError, TensorError
from pagedkv.plan_buffer import (
    CHECKSUM_HIGH,
    CHECKSUM_KIND,
    CHECKSUM_LOW,
    COMPUTE,
    ENDS,
    ENTRIES,
    HEADER_WORDS,
    LENGTH,
    LINE_WORDS,
    NUM_PARTS,
    NUM_WORDS,
    OFFSET,
    RUNS,
    STARTS,
    STEP_HIGH,
    STEP_LOW,
    VERSION,
    padded,
    read_fingerprint,
)

_Part: TypeAlias = tuple[int, int]
"""First word of a part of the plan, and the length of its arrays."""


@final
class PlanChecks:
    """Checks of the plans of one space.

    Args:
        sizes: sizes of the tables.
        num_blocks: for each table, blocks of its pool; ids must be smaller.
        names: name of each table in errors.
    """

    def __init__(self, sizes: TableGeometry, num_blocks: Sequence[int], names: Sequence[str]) -> None:
        self._sizes = sizes
        self._num_blocks = tuple(num_blocks)
        self._names = tuple(names)
        template = sizes.layout.template
        self._fixed = _fixed_words(sizes)
        self._fixed_words = template[self._fixed].tobytes()
        kinds = [(kind, group) for group in range(sizes.num_tables) for kind in (RUNS, ENTRIES)]
        lines = [sizes.layout.lines[part] for part in (*kinds, (COMPUTE, 0))]
        self._places = np.array([HEADER_WORDS + LINE_WORDS * line + OFFSET for line in lines]).repeat(2)
        self._places[1::2] += LENGTH - OFFSET
        starts = [(group, sizes.line(STARTS, group)) for group in range(sizes.num_tables)]
        self._own_ranges = [(group, line, sizes.line(ENDS, group)) for group, line in starts if line]

    def require_plan(self, words: Int32Array) -> tuple[int, int]:
        """Check a plan's words; return the numbers of rows and of positions that it computes.

        Raises:
            PlanError: a plan of another space, rows or entries beyond the tables, blocks beyond their pool, or a row
                that is computed twice.
            TensorError: more positions than there are slots.
        """
        if len(words) < len(self._sizes.layout.template) or words.take(self._fixed).tobytes() != self._fixed_words:
            self._refuse_layout(words)
        part_words = words.take(self._places).tolist()
        *writes, compute = zip(part_words[::2], part_words[1::2], strict=True)
        if compute[1] == 0 or not self._fits(words, writes, compute):
            for group in range(self._sizes.num_tables):
                runs, entries = writes[2 * group : 2 * group + 2]
                if runs[1]:
                    self._require_runs(group, words, runs, entries)
        return self._require_ranges(words, compute)

    def _fits(self, words: Int32Array, writes: Sequence[_Part], compute: _Part) -> bool:
        """Return whether every group's entries fit, by the largest number of each array, in one pass.

        They may fit although it returns False, since the last start and the largest count may belong to different runs.
        (NumPy takes three times as long if the bounds are a list.)
        """
        bounds: list[int] = []
        limits = []
        for group, ((offset, num_runs), (entries_at, _)) in enumerate(zip(writes[::2], writes[1::2], strict=True)):
            if num_runs:
                stride = padded(num_runs)
                bounds += (offset, offset + stride, offset + 2 * stride, entries_at)
                limits.append((self._sizes.widths[group], self._num_blocks[group]))
        if not bounds:
            return True
        bounds.append(compute[0])
        most = np.maximum.reduceat(words, np.array(bounds, np.intp)).tolist()
        for (width, num_blocks), row, start, count, block in zip(
            limits, most[::4], most[1::4], most[2::4], most[3::4], strict=False
        ):
            if row >= self._sizes.max_rows or start + count > width or block >= num_blocks:
                return False
        return True

    def _refuse_layout(self, words: Int32Array) -> None:
        require_fingerprint(words, self._sizes.layout.fingerprint)
        expected = self._sizes.layout
        raise PlanError(
            f"the plan is of another space: version {words[VERSION]}, {words[NUM_PARTS]} parts, {words[NUM_WORDS]} "
            f"words; the tables have version {expected.template[VERSION]}, {expected.template[NUM_PARTS]} parts, pools "
            f"{list(expected.pool_names)}"
        )

    def _require_runs(self, group: int, words: Int32Array, runs: _Part, entries: _Part) -> None:
        offset, num_runs = runs
        part = words[offset : offset + 3 * padded(num_runs)].reshape(3, -1)
        block_ids = words[entries[0] : entries[0] + entries[1]]
        most_row, most_start, most_count = part.max(axis=1).tolist()
        most_row_of_tables, width = self._sizes.max_rows, self._sizes.widths[group]
        if most_row >= most_row_of_tables:
            raise PlanError(
                f"the plan writes row {most_row} of {self._names[group]}, but the tables have {most_row_of_tables}"
            )
        if most_start + most_count > width:  # perhaps of different runs
            rows, ends = part[0], part[1] + part[2]
            place = int(ends.argmax())
            if ends[place] > width:
                raise PlanError(
                    f"row {rows[place]} of {self._names[group]} would have {ends[place]} entries, but its table has "
                    f"room for {width}: build the tables with the space's max_tokens"
                )
        if block_ids.max() >= self._num_blocks[group]:
            raise PlanError(
                f"the plan names block {block_ids.max()} in {self._names[group]}, but its pool has "
                f"{self._num_blocks[group]}"
            )

    def _require_ranges(self, words: Int32Array, compute: _Part) -> tuple[int, int]:
        offset, num_rows = compute
        if num_rows == 0:
            return 0, 0
        stride = padded(num_rows)
        rows = words[offset : offset + num_rows]
        starts = words[offset + stride : offset + stride + num_rows]
        ends = words[offset + 2 * stride : offset + 2 * stride + num_rows]
        if int(rows[-1]) >= self._sizes.max_rows:
            raise PlanError(f"the plan computes row {rows[-1]}, but the tables have {self._sizes.max_rows}")
        is_back = rows[1:] <= rows[:-1]
        if np.count_nonzero(is_back):
            place = int(is_back.argmax())
            raise PlanError(f"a batch has each row once, ascending; row {rows[place + 1]} follows row {rows[place]}")
        num_tokens = int(np.add.reduce(ends - starts, dtype=np.int64))
        if num_tokens > self._sizes.max_tokens:
            raise TensorError(
                f"the plan computes {num_tokens} positions, but there are slots for {self._sizes.max_tokens}: raise "
                "max_batched_tokens"
            )
        for group, starts_line, ends_line in self._own_ranges:
            self._require_own_ranges(words, group, starts_line, (ends_line, ends))
        return num_rows, num_tokens

    def _require_own_ranges(
        self, words: Int32Array, group: int, starts_line: int, ends: tuple[int, Int32Array]
    ) -> None:
        """Check that there are slots for the positions of a group with starts of its own, and perhaps ends."""
        ends_line, common = ends
        offset, length = words[starts_line + OFFSET : starts_line + LENGTH + 1].tolist()
        stops = words[words[ends_line + OFFSET] :][:length] if ends_line else common
        num_positions = int(np.maximum(stops - words[offset : offset + length], 0).sum(dtype=np.int64))
        if num_positions > self._sizes.max_tokens:
            raise TensorError(
                f"the plan writes {num_positions} positions in {self._names[group]}, but there are slots for "
                f"{self._sizes.max_tokens}: raise max_batched_tokens"
            )


def require_fingerprint(words: Int32Array, expected: bytes) -> None:
    """Raise PlanError for a plan of a space with another configuration."""
    found = read_fingerprint(words)
    if found != expected:
        raise PlanError(
            f"the plan is of another space: its configuration has the fingerprint {found.hex()}, that of storage and "
            f"tables {expected.hex()}; build all three from one SpaceConfig"
        )


def _fixed_words(sizes: TableGeometry) -> npt.NDArray[np.intp]:
    """Return the places of the words that all plans of a space share: layout and names, no step, size or checksum."""
    template = sizes.layout.template
    is_fixed = np.ones(len(template), bool)
    is_fixed[[NUM_WORDS, STEP_LOW, STEP_HIGH, CHECKSUM_KIND, CHECKSUM_LOW, CHECKSUM_HIGH]] = False
    end = HEADER_WORDS + LINE_WORDS * int(template[NUM_PARTS])
    is_fixed[HEADER_WORDS + LINE_WORDS + OFFSET : end : LINE_WORDS] = False
    is_fixed[HEADER_WORDS + LINE_WORDS + LENGTH : end : LINE_WORDS] = False
    return np.flatnonzero(is_fixed)


@final
class PacketRing:
    """Buffers for packets from the host to a device.

    Args:
        buffers: int32 ``[num_buffers, words]``, in pinned memory if the device is a GPU.
        device: the device that reads them.

    Attributes:
        num_words: words of a buffer.
        is_staged: whether a packet is staged and not fenced.

    Raises:
        TensorError: the device is a GPU, and the buffers are not pinned.
    """

    def __init__(self, buffers: torch.Tensor, device: torch.device) -> None:
        if device.type == "cuda":
            require_pinned(buffers, "the ring of packets")
        self.num_words = buffers.shape[1]
        self._views = [buffer.numpy() for buffer in buffers]
        self._stream_of = device if device.type == "cuda" else None
        self._events: list[torch.cuda.Event | None] = [None] * len(buffers)
        self._place = 0  # of the packet that is staged, or is staged next
        self.is_staged = False

    def stage(self, words: Int32Array) -> None:
        """Write a packet to the next buffer, once the device has read the buffer's earlier packet.

        Raises:
            StepError: the previous packet was not launched, or not fenced.

        Cost: O(words). While the device has not read the packets of any buffer, the host waits.
        """
        if self.is_staged:
            raise StepError("a packet is already staged: launch and fence it before the next one")
        event = self._events[self._place]
        if event is not None:
            event.synchronize()
        np.copyto(self._views[self._place][: len(words)], words)
        self.is_staged = True

    def fence(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Record that the launch of the staged packet is in a stream; None: in the current one.

        Raises:
            StepError: nothing is staged.
        """
        if not self.is_staged:
            raise StepError("there is no staged packet to fence: stage and launch one first")
        if self._stream_of is not None:
            event = self._events[self._place] or torch.cuda.Event()
            event.record(stream or torch.cuda.current_stream(self._stream_of))
            self._events[self._place] = event
        self._place = (self._place + 1) % len(self._views)
        self.is_staged = False


@final
class StepGraph:
    """Executes the next packet of the ring on a GPU.

    Addresses are fixed and sizes are read from memory, so the graph is captured once, at the first launch.

    Args:
        kernels: the module of the kernels.
        sizes: sizes of the tables.
        arrays: arrays of the kernels.
        device: the device.
    """

    def __init__(self, kernels: ModuleType, sizes: TableGeometry, arrays: TableArrays, device: torch.device) -> None:
        self._kernels = kernels
        self._sizes = sizes
        self._arrays = arrays
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def replay(self) -> None:
        """Launch all kernels by the graph."""
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self._device):
            self._compile()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._kernels.pull_packet(self._arrays)
                self._kernels.step_tables(self._arrays)
        return graph

    def _compile(self) -> None:
        """Run the kernels once on scratch tables with an empty packet, since they must not compile in a capture."""
        scratch = make_arrays(self._sizes, self._device)
        scratch.ring[0, : len(self._sizes.layout.template)] = torch.from_numpy(self._sizes.layout.template)
        self._kernels.pull_packet(scratch)
        self._kernels.step_tables(scratch)
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepInputs:
    """Tables, slots and ranges of one step.

    A *place* is a row's rank among the rows that the step computes. The flat order has the positions of these rows one
    after another, place by place::

        place           0         1               2
        rows            4         7               9             numbers of the space
        flat order    | 12      | 0  1  2  3    | 8  9  |       positions
                        0         1  1  1  1      2  2          places

    Views are made on demand, since each takes two microseconds and a graph needs none.

    Args:
        step_id: the step.
        num_rows: used places of the batch.
        num_tokens: positions, including those refused later.
    """

    step_id: StepId
    num_rows: int
    num_tokens: int
    _arrays: TableArrays
    _batch_tables: tuple[torch.Tensor, ...]
    _state_tables: Mapping[int, StateTable]

    def __repr__(self) -> str:
        """Show only the sizes, since all steps share the arrays."""
        sizes = f"{self.num_rows} rows, {self.num_tokens} tokens, {len(self._batch_tables)} block tables"
        return f"StepInputs(step {self.step_id}: {sizes})"

    @property
    def rows(self) -> torch.Tensor:
        """The space's row at each place: int32 ``[num_rows]``."""
        return self._arrays.held_rows[0, : self.num_rows]

    def places(self, group: int = 0) -> torch.Tensor:
        """Return the place of each token in the flat order, then -1: int64 ``[max_batched_tokens]``.

        Args:
            group: the group that defines the order. The order differs between groups if a window is replayed, or if a
                group is outside prefix caching.

        Cost: O(max_batched_tokens x log rows), a few tensor operations. Raises ConfigurationError for an unknown group.
        """
        index = self._index_of(group)
        tokens = torch.arange(self._arrays.slots.shape[1], device=self._arrays.slots.device)
        places = torch.searchsorted(self.query_start_loc[index, 1:].long(), tokens, right=True)
        return torch.where(places < self.num_rows, places, -1)

    def positions(self, group: int = 0) -> torch.Tensor:
        """Return each token's position in its sequence, in the flat order, then -1: int64 ``[max_batched_tokens]``.

        Rotary embeddings use the first ``num_tokens`` entries. Refused tokens are accounted for on the device.
        Arguments, cost and errors are as of :meth:`places`.
        """
        index = self._index_of(group)
        places = self.places(index)
        if not self.num_rows:
            return places
        tokens = torch.arange(len(places), device=places.device)
        within = tokens - self.query_start_loc[index, places.clamp(min=0)]
        return torch.where(places >= 0, self.starts[index, places.clamp(min=0)] + within, -1)

    def _index_of(self, group: int) -> int:
        return as_count(group, "group", most=len(self._batch_tables) - 1)

    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]:
        """For each group int32 ``[num_rows, width]``: block ids by place.

        Entries before a window, and after a row's last token, are null blocks, reserved blocks, or former entries:
        valid ids of blocks that other rows may use now. Kernels read up to ``seq_lens``. For kernels that read whole
        rows, and mask afterwards, use :meth:`padded_block_table`.
        """
        return tuple(table[: self.num_rows] for table in self._batch_tables)

    def padded_block_table(self, group: int) -> torch.Tensor:
        """Copy a group's block table, with null blocks after each row's last token: int32 ``[num_rows, width]``.

        It refers to no stale block, so masked products with weight zero are zero, not NaN. Cost: O(rows x width).
        Raises ConfigurationError for an unknown group.
        """
        index = self._index_of(group)
        table = self._batch_tables[index][: self.num_rows]
        num_tokens = torch.arange(table.shape[1], device=table.device) * self._arrays.geometry[index, BLOCK_SIZE]
        return torch.where(num_tokens < self.seq_lens[index][:, None], table, 0)

    @property
    def slot_mappings(self) -> torch.Tensor:
        """Slot of each position in the flat order, then -1: int64 ``[groups, max_batched_tokens]``."""
        return self._arrays.slots[: len(self._batch_tables)]

    @property
    def starts(self) -> torch.Tensor:
        """First position of each place: int32 ``[groups, num_rows]``."""
        return self._arrays.starts[: len(self._batch_tables), : self.num_rows]

    @property
    def seq_lens(self) -> torch.Tensor:
        """End of each place's positions, which is its length: int32 ``[groups, num_rows]``."""
        return self._arrays.seq_lens[: len(self._batch_tables), : self.num_rows]

    @property
    def query_start_loc(self) -> torch.Tensor:
        """Positions before each place in the flat order: int32 ``[groups, num_rows + 1]``."""
        return self._arrays.offsets[: len(self._batch_tables), : self.num_rows + 1]

    def state_blocks(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block from which each place reads a recurrent group's state, and the block of its final state.

        The final state is that at the end of the place's range. Draft states, and tokens refused by then, are accounted
        for on the device.

        Returns:
            int32 ``[num_rows]`` each; a place starting at 0 reads the null block.

        Raises:
            ConfigurationError: the group keeps no states.
        """
        table, ranges = self._states(group)
        return state_blocks(table, ranges)

    def state_writes(self, group: int) -> torch.Tensor:
        """Return, for each position in the flat order, the block to which the state after it is written.

        States of every draft, of every checkpoint, and of the last other position are written, so that one kernel can
        write them all.

        Returns:
            int32 ``[max_batched_tokens]``; the null block, to which no state is written, for other positions and after
            the last.

        Raises:
            ConfigurationError: the group keeps no states.
        """
        table, ranges = self._states(group)
        return state_writes(table, ranges, self.query_start_loc[group], self._arrays.slots.shape[1])

    def states_behind(self, group: int, places: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the blocks of the states after some positions, for steps that are computed in parts.

        Args:
            group: a group with states.
            places: int64 ``[n]``, places of the batch.
            positions: int64 ``[n]``, -1 before a sequence's first. Of the positions before a place's range, and of
                those in it that are not drafts, only the last one and checkpoints are allowed, since only their states
                are stored.

        Returns:
            int32 ``[n]``; the null block before a sequence's first.

        Raises:
            ConfigurationError: the group keeps no states. TensorError: tensors of another type, shape or device.
        """
        table, ranges = self._states(group)
        device = self._arrays.places.device
        for what, tensor in (("places", places), ("positions", positions)):
            require_tensor(tensor, what, dtype=torch.int64, shape=(None,), device=device)
        require_numbers(places, "places", self.num_rows)
        if len(places) != len(positions):
            raise TensorError(f"{len(places)} places need as many positions, got {len(positions)}")
        block = table.block_after(places, positions.clamp(min=0), ranges.firsts[places])
        return torch.where(positions >= 0, block, 0)

    def _states(self, group: int) -> tuple[StateTable, StateRanges]:
        if as_count(group, "group") not in self._state_tables:
            raise ConfigurationError(
                f"group {group} has no states: groups with states are {sorted(self._state_tables)}"
            )
        firsts = self._arrays.firsts[: self.num_rows]
        return self._state_tables[group], StateRanges(self.starts[group], self.seq_lens[group], firsts)


NUM_BUFFERS: Final = 4
DEPTH: Final = 8
"""Number of a row's last steps whose refused tokens are recorded; more than can be in flight."""
PACKET_ENTRIES: Final = 65_536
"""Most entries of a packet: 16,384 for each of four groups, that is a million tokens in blocks of 64."""
LEAST_ENTRIES: Final = 32


@final
class BlockTables:
    """Block tables of all groups of a space, in one arena.

    Args:
        config: the space's configuration: groups, ``max_sequences`` rows, ``max_tokens`` per row.
        max_batched_tokens: most positions of a step; slots are padded with -1 up to this number.
        device: the device of the tables.
        kernels: "auto", "triton" or "torch" (:func:`~pagedkv.device.kernels.selection.kernels_for`).
        packet_entries: table entries that fit into a packet; the entries of a larger plan are sent ahead of it.

    Attributes:
        config: the space's configuration.
        num_groups: number of groups.
        widths: entries of a row in each group.
        max_rows: number of rows.
        arrays: all arrays that the kernels read and write.

    Raises:
        ConfigurationError, DeviceUnavailableError: an argument is not valid.
    """

    def __init__(
        self,
        config: SpaceConfig,
        *,
        max_batched_tokens: int = 8192,
        device: "torch.device | str" = "cpu",
        kernels: KernelChoice = "auto",
        packet_entries: int = PACKET_ENTRIES,
    ) -> None:
        require_instance(config, SpaceConfig, "config")
        self.config = config
        self.device = as_device(device)
        self.max_rows = config.max_sequences
        self.max_batched_tokens = as_count(max_batched_tokens, "max_batched_tokens", least=1)
        self._kernels = kernels_for(self.device, kernels)
        tables = SpaceTables.of(config)
        self.num_groups, self.block_sizes, self.widths = tables.num_groups, tables.block_sizes, tables.widths
        self._sizes = tables.geometry(
            config,
            max_tokens=self.max_batched_tokens,
            num_buffers=NUM_BUFFERS,
            depth=DEPTH,
            packet_entries=as_count(packet_entries, "packet_entries", least=LEAST_ENTRIES),
        )
        self._num_blocks_of_pool = tables.num_blocks
        self._checks = PlanChecks(self._sizes, tables.num_blocks, tables.names)
        self.arrays = make_arrays(self._sizes, self.device)
        self._ring = PacketRing(self.arrays.ring, self.device)
        self._tables, batch_tables = views_of_arena(self.arrays, self._sizes.widths, self.max_rows)
        self._batch_tables = batch_tables[: self.num_groups]
        self._state_tables = state_tables(config, tables, batch_tables)
        self._staged = StagedWrites(tables.layout, self._sizes.num_tables)
        self._num_blocks: Int32Array = np.zeros((self.num_groups, self.max_rows), np.int32)
        self._last_step = StepId(0)
        self._is_called = False
        is_graphed = self.device.type == "cuda"
        self._graph = StepGraph(self._kernels, self._sizes, self.arrays, self.device) if is_graphed else None

    # Plans

    def step(self, plan: StepPlan) -> StepInputs:
        """Apply a plan to tables, batch order and slots, in the current stream.

        Raises:
            StepError: the plan's step is not after the last one, or the tables are driven by calls.
            PlanError, TensorError: as :meth:`stage`; nothing was written.

        Cost: on the host a few passes over the plan's words and one graph launch; on the device O(entries + positions +
        rows), and the whole table of each row that is new at its place.
        """
        inputs = self.stage(plan)
        self.launch()
        self.fence()
        return inputs

    def stage(self, plan: StepPlan) -> StepInputs:
        """Write a plan to the ring, for :meth:`launch`. The launch may be part of the caller's CUDA graph.

        Args:
            plan: the next plan, after the last one, of the space that these tables belong to.

        Returns:
            views of the step's inputs, valid once the launch has run.

        Raises:
            StepError: as :meth:`step`, or the packet before was not launched and fenced.
            PlanError: a plan of a space with another configuration, entries beyond the tables, blocks beyond their
                pool, a row twice.
            TensorError: more positions than ``max_batched_tokens``.
        """
        self.require_next(plan)
        num_rows, num_tokens = self._checks.require_plan(plan.buffer)
        words = plan.buffer
        if len(words) > self._ring.num_words:
            words = self._without_entries(plan)
        self._ring.stage(words)
        self._last_step = plan.step_id
        return self._inputs(plan.step_id, num_rows, num_tokens)

    def require_next(self, plan: StepPlan) -> None:
        """Raise PlanError for anything but a plan, and StepError for one that is not after the last."""
        if not isinstance(plan, StepPlan):
            raise PlanError(f"a step is a StepPlan (StepPlan.from_buffer restores one), got {type(plan).__name__}")
        if self._is_called:
            raise StepError("these tables are driven by calls (append_block_ids): plans need tables of their own")
        if plan.step_id <= self._last_step:
            raise StepError(f"step {plan.step_id} cannot be executed after step {self._last_step}: steps must ascend")

    def launch(self) -> None:
        """Apply the staged packet on the device. On a GPU the kernels are captured, or replayed from their own graph.

        Raises:
            StepError: nothing is staged, outside a capture.
        """
        is_captured = self._graph is not None and torch.cuda.is_current_stream_capturing()
        if not (self._ring.is_staged or is_captured):
            raise StepError("nothing is staged: stage a plan before each launch")
        if self._graph is None or is_captured:
            self._kernels.pull_packet(self.arrays)
            self._kernels.step_tables(self.arrays)
        else:
            self._graph.replay()

    def fence(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Record that the launch, or a graph with it, is in a stream; None: the current. Raises StepError."""
        self._ring.fence(stream)

    def inputs_of_all(self, num_rows: int, num_tokens: int) -> StepInputs:
        """View the inputs of whichever step is launched last, for a graph that is replayed for any step.

        Places that a step does not use have empty ranges, and tokens after its last one have slot -1.

        Args:
            num_rows: places of the view.
            num_tokens: tokens of the view.

        Raises TensorError: more places or tokens than there are.
        """
        most = self.max_batched_tokens
        num_tokens = as_count(num_tokens, "num_tokens", most=most, error=TensorError)
        return self._inputs(StepId(0), self._num_places(num_rows), num_tokens)

    def record_refused(self, step_id: int, rows: torch.Tensor, counts: torch.Tensor) -> None:
        """Record how many tokens of some rows a step has refused, so that later ranges move down by these numbers.

        Call it after the step's sampling, in the stream of the steps; it reads nothing back from the device.

        Args:
            step_id: the step.
            rows: int32 or int64 ``[n]``, on the device.
            counts: int32 ``[n]``, refused tokens of each row.

        Raises:
            TensorError: tensors of another type, shape or device.
        """
        as_count(step_id, "step_id", most=2**63 - 1, error=TensorError)
        taken, arrays = (torch.int32, torch.int64), self.arrays
        require_tensor(rows, "rows", dtype=taken, shape=(None,), device=self.device)
        require_tensor(counts, "counts", dtype=taken, shape=(len(rows),), device=self.device)
        require_numbers(rows, "rows", len(arrays.sample_steps))
        index = rows.long()
        is_this = arrays.sample_steps[index] == step_id
        arrays.sample_refused[index] = torch.where(is_this, counts.int()[:, None], arrays.sample_refused[index])

    def forget_steps(self, first_step_id: int) -> None:
        """Drop the refused tokens recorded for steps from this one on, which were aborted."""
        is_gone = self.arrays.sample_steps >= as_count(first_step_id, "step_id", most=2**63 - 1, error=StepError)
        self.arrays.sample_steps.masked_fill_(is_gone, -1)
        self.arrays.sample_refused.masked_fill_(is_gone, 0)

    # Calls

    def append_block_ids(self, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool) -> None:  # noqa: FBT001 - as in other systems
        """Stage blocks to be written after a row's blocks, or in place of them.

        Args:
            req_index: the row.
            new_block_ids: block ids for each group; a list may be empty.
            overwrite: whether the blocks replace the row's present ones.

        Raises:
            TensorError: no such row, not one list a group, ids outside their pool, or more than a row has room for.
            StepError: the tables are driven by plans.
        """
        row = self._row(req_index)
        begins_anew = as_flag(overwrite, "overwrite", TensorError)
        require_instance(new_block_ids, Sequence, "new_block_ids", TensorError)
        if len(new_block_ids) != self.num_groups:
            raise TensorError(f"{self.num_groups} groups need as many lists of block ids, got {len(new_block_ids)}")
        runs = []
        for group, given in enumerate(new_block_ids):
            start = 0 if begins_anew else int(self._num_blocks[group, row])
            block_ids = as_block_ids(given, group)
            require_room(row, group, start + len(block_ids), self.widths[group])
            require_ids(block_ids, group, self._num_blocks_of_pool[group])
            runs.append(Run(row, start, block_ids.astype(np.int32)))
        for group, run in enumerate(runs):
            self._num_blocks[group, row] = run.start + len(run.block_ids)
            if begins_anew or len(run.block_ids):
                self._staged.add(group, run)

    def apply_staged_writes(self) -> None:
        """Write all staged blocks, of all groups at once, in the current stream."""
        self._require_calls()
        self._apply_staged()

    def num_blocks(self, group: int, row: int) -> int:
        """Count the blocks of a row that were appended by calls. Raises TensorError or ConfigurationError."""
        return int(self._num_blocks[as_count(group, "group", most=self.num_groups - 1), self._row(row)])

    def gather_block_tables(
        self, idx_mapping: torch.Tensor, num_reqs_padded: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Copy rows of the tables into batch order.

        Args:
            idx_mapping: int32 ``[n]``, the row of each place; -1 for an empty place.
            num_reqs_padded: number of places; those after the rows get null blocks.

        Returns:
            for each group int32 ``[num_reqs_padded, width]``, the same tensors every time.

        Raises:
            TensorError: another type, shape or device; fewer places than rows, or more than there are. The values of
                rows are checked only on a CPU.
        """
        rows = self._batch(idx_mapping)
        num_places = len(rows) if num_reqs_padded is None else as_padding(num_reqs_padded)
        if not len(rows) <= num_places <= self.max_rows:
            raise TensorError(f"{len(rows)} rows need from {len(rows)} to {self.max_rows} places, got {num_places}")
        self._kernels.gather_rows(self.arrays, rows, num_places)
        return tuple(table[:num_places] for table in self._batch_tables)

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int | None = None,
        num_refused: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the slot of each position.

        Args:
            idx_mapping: int32 ``[n]``, the row of each place; -1 for a dummy, whose positions have no slots.
            query_start_loc: int32 ``[n + 1]``, positions before each place.
            positions: int64 ``[tokens]``.
            num_tokens_padded: slots to return; None: as many as positions.
            num_refused: int32 ``[n]``, by how much each place's positions move down; None: 0. For counts that only the
                device has.

        Returns:
            int64 ``[groups, num_tokens_padded]``, a view of the same tensor every time; -1 after the positions, up to
            ``max_batched_tokens``, and in groups of states.

        Raises:
            TensorError: another type, shape or device, or too many positions.
        """
        rows = self._batch(idx_mapping)
        where = {"device": self.device}
        require_tensor(query_start_loc, "query_start_loc", dtype=torch.int32, shape=(len(rows) + 1,), **where)
        require_tensor(positions, "positions", dtype=torch.int64, shape=(None,), **where)
        wanted = len(positions) if num_tokens_padded is None else as_padding(num_tokens_padded)
        if not len(positions) <= wanted <= self.max_batched_tokens:
            raise TensorError(
                f"{len(positions)} positions need from {len(positions)} to {self.max_batched_tokens} slots, "
                f"got {wanted}"
            )
        refused = torch.zeros_like(rows) if num_refused is None else num_refused
        require_tensor(refused, "num_refused", dtype=torch.int32, shape=(len(rows),), **where)
        self._kernels.map_slots(self.arrays, rows, query_start_loc, positions, refused)
        return self.arrays.slots[: self.num_groups, :wanted]

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return tables of null blocks, for runs without requests: the tensors of real steps. Raises TensorError."""
        rows = torch.full((self._num_places(num_reqs),), -1, dtype=torch.int32, device=self.device)
        return self.gather_block_tables(rows)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Return slots of -1, for runs without requests: the tensor of real steps. Raises TensorError."""
        if not 0 <= as_padding(num_tokens) <= self.max_batched_tokens:
            raise TensorError(f"there are slots for {self.max_batched_tokens} tokens, not for {num_tokens}")
        self.arrays.slots.fill_(-1)
        return self.arrays.slots[: self.num_groups, :num_tokens]

    def move_row(self, source: int, destination: int) -> None:
        """Move a row to another row's place; the old row gets null blocks. Raises TensorError or StepError."""
        self._exchange((source, destination), (destination,), (source,))
        self.clear_row(source)

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows. Raises TensorError or StepError."""
        self._exchange((first, second), (first, second), (second, first))

    def clear_row(self, row: int) -> None:
        """Fill a row with null blocks, and set its length to 0. Raises TensorError or StepError."""
        index = self._row(row)
        self._apply_staged()
        for group in range(self.num_groups):
            self._tables[group][index].zero_()
        self.arrays.extents[:, index] = 0
        self._num_blocks[:, index] = 0

    # Inputs of kernels with other block sizes

    def page_tables(self, group: int, numbers: PageNumbers, num_rows: int) -> torch.Tensor:
        """Return a group's blocks as pages of a kernel's size: int32 ``[num_rows, width * numbers.per_block]``.

        Args:
            numbers: from :meth:`KVStorage.pages <pagedkv.device.storage.KVStorage.pages>`.
            num_rows: places of the batch.

        Raises:
            TensorError: more places than there are. ConfigurationError: no such group.
        """
        table = self.batch_table(group)
        require_instance(numbers, PageNumbers, "numbers", TensorError)
        return page_table(table[: self._num_places(num_rows)], numbers)

    def page_lists(
        self, group: int, num_rows: int, max_pages: int, numbers: PageNumbers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """List the pages of the last step's batch as FlashInfer takes them, without reading a size from the device.

        Args:
            num_rows: places of the batch.
            max_pages: most pages of all places.
            numbers: page numbers for a kernel's own block size; None: pages are blocks.

        Returns:
            indptr int32 ``[num_rows + 1]``, indices int32 ``[max_pages]`` (0 after the pages), last_page_len int32
            ``[num_rows]``.

        Raises:
            TensorError: more places than there are. ConfigurationError: no such group.
        """
        index = as_count(group, "group", most=self.num_groups - 1)
        numbers = PageNumbers(self.block_sizes[index], 1, 1, 1, 1) if numbers is None else numbers
        require_instance(numbers, PageNumbers, "numbers", TensorError)
        as_count(max_pages, "max_pages", error=TensorError)
        lengths = self.arrays.seq_lens[index, : self._num_places(num_rows)]
        return page_list(self._batch_tables[index], lengths, max_pages, numbers)

    def state_blocks(self, group: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`StepInputs.state_blocks` of the last step, for as many places as a graph is captured for.

        Raises:
            TensorError: more places than there are. ConfigurationError: the group keeps no states.
        """
        return self._inputs(StepId(0), self._num_places(num_rows), 0).state_blocks(group)

    def state_writes(self, group: int, num_rows: int) -> torch.Tensor:
        """:meth:`StepInputs.state_writes` for as many places. Raises as :meth:`state_blocks`."""
        return self._inputs(StepId(0), self._num_places(num_rows), 0).state_writes(group)

    def table(self, group: int) -> torch.Tensor:
        """View a group's table by row: int32 ``[max_rows, width]``. Raises ConfigurationError."""
        return self._tables[as_count(group, "group", most=self.num_groups - 1)]

    def batch_table(self, group: int) -> torch.Tensor:
        """View a group's table by place of the batch: int32 ``[max_rows, width]``. Raises ConfigurationError."""
        return self._batch_tables[as_count(group, "group", most=self.num_groups - 1)]

    # Inside

    def _inputs(self, step_id: StepId, num_rows: int, num_tokens: int) -> StepInputs:
        return StepInputs(step_id, num_rows, num_tokens, self.arrays, self._batch_tables, self._state_tables)

    def _without_entries(self, plan: StepPlan) -> Int32Array:
        """Write a large plan's entries ahead, in packets of their own; return the plan without them."""
        for writes in plan.table_writes:
            for run in runs_of(writes):
                self._staged.add(writes.group, run)
        self._apply_staged(plan.step_id)
        return without_writes(plan.buffer, self._sizes.layout)

    def _apply_staged(self, step_id: int = 0) -> None:
        for words in self._staged.packets(self._ring.num_words, step_id):
            self._ring.stage(words)
            self._kernels.pull_packet(self.arrays)
            self._kernels.step_tables(self.arrays, writes_only=True)
            # No slot was written, so those of the step before still have to be padded.
            self.arrays.heads[:, NUM_TOKENS] = self.arrays.heads[:, PADDED_TO]
            self._ring.fence()

    def _exchange(self, rows: Sequence[int], to: Sequence[int], of: Sequence[int]) -> None:
        for row in rows:
            self._row(row)
        if len(set(rows)) < len(rows):
            raise TensorError(f"row {rows[0]} is named twice")
        self._apply_staged()
        to_index, of_index = list(to), list(of)
        for table in self._tables:
            table[to_index] = table[of_index]
        self.arrays.extents[:, to_index] = self.arrays.extents[:, of_index]
        self._num_blocks[:, to_index] = self._num_blocks[:, of_index]

    def _require_calls(self) -> None:
        if self._last_step > 0:
            raise StepError("these tables are driven by plans, which would overwrite the entries of calls")
        self._is_called = True

    def _row(self, row: int) -> int:
        self._require_calls()
        return as_count(row, "row", most=self.max_rows - 1, error=TensorError)

    def _batch(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        return as_batch_rows(idx_mapping, self.max_rows, self.device)

    def _num_places(self, num_rows: int) -> int:
        return as_count(num_rows, "places of the batch", most=self.max_rows, error=TensorError)
