"""A step's block tables: Triton's kernels, and a CPU's loops, against plain torch, on the plans of a real space."""

import random
from dataclasses import fields

import pytest
import torch

from pagedkv import (
    Allocation,
    BlockSpace,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    MediaSpan,
    RecurrentState,
    RequestKeys,
    SlidingWindow,
    SpaceConfig,
    StepPlan,
)
from pagedkv.device.block_tables import BlockTables, StepInputs
from pagedkv.device.kernels.selection import KernelChoice
from pagedkv.device.table_arrays import NUM_TOKENS, WIDTH, TableArrays
from tests.device.kernels.suite import KERNEL_DEVICE, byte_poison, needs_kernels

pytestmark = pytest.mark.interpreted
KINDS = ("auto", pytest.param("triton", marks=needs_kernels))
each_kind = pytest.mark.parametrize("kind", KINDS)
"""On a CPU "auto" are its compiled loops."""

CONFIG = SpaceConfig(
    (
        FullAttention(4),
        SlidingWindow(8, 2, num_sink_tokens=1),
        FullAttention(4, prefix_caching=False),
        ChunkedLocal(8, 4),
        RecurrentState(4, num_draft_states=5),
        RecurrentState(4, num_draft_states=3, pool="other", prefix_caching=False),
        CrossAttention(11, 3, pool="encoders"),
    ),
    num_blocks={"device": 900, "state": 90, "other": 40, "encoders": 50},
    max_sequences=7,
    max_tokens=60,
)
KEYS = RequestKeys(media=(MediaSpan(0, 1, b"a sound"),))
STALE = {"ring", "packet", "run_of_row", "run_firsts"}  # what earlier packets left there is not read


WRITTEN = ("packet", "run_of_row", "run_firsts", "places", "starts", "seq_lens", "offsets", "tables", "batch_tables")
"""What a step writes, or never reads: it may hold anything before."""
NO_TENANT = 1000  # no row


def poison(tables: BlockTables) -> None:
    """Fill what holds no valid values with random bytes, and mark places and slots as stale."""
    arrays = tables.arrays
    for seed, name in enumerate((*WRITTEN, "slots")):
        array: torch.Tensor = getattr(arrays, name)
        array.copy_(byte_poison(*array.shape, dtype=array.dtype, seed=seed))
    arrays.heads[:, NUM_TOKENS] = arrays.slots.shape[1]
    arrays.held_rows.fill_(NO_TENANT)
    arrays.held_extents[:] = arrays.geometry[:, WIDTH, None].int()


def both(config: SpaceConfig, kind: KernelChoice, *, packet_entries: int = 64) -> tuple[BlockTables, BlockTables]:
    """Tables by plain torch, and by other kernels."""
    device = KERNEL_DEVICE if kind == "triton" else torch.device("cpu")
    plain = BlockTables(config, max_batched_tokens=128, kernels="torch", packet_entries=packet_entries)
    fast = BlockTables(config, max_batched_tokens=128, kernels=kind, device=device, packet_entries=packet_entries)
    return plain, fast


def require_same(plain: TableArrays, fast: TableArrays) -> None:
    for field in fields(TableArrays):
        left, right = getattr(plain, field.name), getattr(fast, field.name)
        if isinstance(left, torch.Tensor) and field.name not in STALE:
            assert torch.equal(left, right.cpu()), field.name


def change(space: BlockSpace, rows: list[int], rng: random.Random) -> None:
    """Change a few rows at random: new ones, growth, forks, rows given up."""
    for _ in range(rng.randint(0, 3)):
        what = rng.choice(["allocate", "allocate", "append", "fork", "free"])
        if what == "allocate" and len(rows) < CONFIG.max_sequences:
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 30))]
            answer = space.allocate(prompt, keys=KEYS, num_encoder_tokens=rng.randint(0, 11))
            if isinstance(answer, Allocation):
                rows.append(answer.row)
        elif what == "append" and rows:
            row = rng.choice(rows)
            if space.num_tokens(row) < 50:
                space.append(row, [1, 0, 1], [3], num_draft=rng.randint(0, 3))
        elif what == "free" and rows:
            space.free(rows.pop(rng.randrange(len(rows))))


@each_kind
@pytest.mark.parametrize("packet_entries", [32, 4096])
def test_any_steps_leave_the_same_tables(packet_entries: int, kind: KernelChoice) -> None:
    """Rows come and go, so that places of the batch change hands; some plans travel in several packets."""
    rng = random.Random(packet_entries)
    space, rows = BlockSpace(CONFIG), list[int]()
    plain, fast = both(CONFIG, kind, packet_entries=packet_entries)
    for tables in (plain, fast):
        poison(tables)
    for _ in range(12):
        change(space, rows, rng)
        plan = space.plan_step()
        for tables in (plain, fast):
            require_told(space, plan, tables.step(plan))
        require_same(plain.arrays, fast.arrays)
        space.acknowledge(plan.step_id)


def require_told(space: BlockSpace, plan: StepPlan, inputs: StepInputs) -> None:
    """The step's tables, ranges and slots are those that the space tells, with no poison behind them."""
    rows = plan.compute.rows.tolist()
    for group, spec in enumerate(CONFIG.groups):
        ranges = plan.compute_in(group)
        lengths = ranges.ends - ranges.starts
        table = inputs.block_tables[group].cpu()
        for place, row in enumerate(rows):
            ids = space.block_ids(row, group)
            seen = table[place, : len(ids)]
            assert all(mine in {0, told} for mine, told in zip(ids, seen.tolist(), strict=True)), (
                "0: passed by a window"
            )
            behind = table[place, len(ids) :].tolist()
            assert set(behind) <= set(range(space.config.blocks_by_pool()[spec.pool])), "poison behind a row"
        assert inputs.starts[group].tolist() == ranges.starts.tolist()
        assert inputs.seq_lens[group].tolist() == ranges.ends.tolist()
        assert inputs.query_start_loc[group].tolist() == [0, *lengths.cumsum().tolist()]
        expected = [] if spec.kind == "recurrent" else space.slot_mapping(plan, group).tolist()
        slots = inputs.slot_mappings[group].tolist()
        assert slots == expected + [-1] * (len(slots) - len(expected))


@each_kind
def test_refused_tokens_move_ranges_down_alike(kind: KernelChoice) -> None:
    config = SpaceConfig((FullAttention(2),), num_blocks=60, max_sequences=4, max_tokens=40)
    space = BlockSpace(config)
    rows = [space.allocate([first, 2, 3]).row for first in range(3)]
    plain, fast = both(config, kind)
    for refused in ((0, 0, 0), (1, 0, 2), (0, 1, 0), (0, 0, 0)):
        plan = space.plan_step()
        for tables in (plain, fast):
            tables.step(plan)
            where = tables.device
            told = torch.tensor(refused, dtype=torch.int32, device=where)
            tables.record_refused(plan.step_id, torch.tensor(rows, dtype=torch.int32, device=where), told)
        require_same(plain.arrays, fast.arrays)
        space.append(rows, None, [3, 3, 3])


class Overlapped:
    """One row of three tokens, in tables of both kinds."""

    def __init__(self, kind: KernelChoice) -> None:
        config = SpaceConfig((FullAttention(2),), num_blocks=60, max_sequences=4, max_tokens=40)
        self.space = BlockSpace(config)
        self.row = self.space.allocate([1, 2, 3]).row
        self.both = both(config, kind)

    def append_unknown(self, count: int) -> None:
        """Append tokens that are not known yet."""
        self.space.append([self.row], None, [count])

    def step(self, refused: int) -> int:
        """Carry a step out that refuses so many; where its range began."""
        plan, starts = self.space.plan_step(), set[int]()
        for tables in self.both:
            starts |= {*tables.step(plan).starts[0].tolist()}
            rows, told = (torch.tensor([each], dtype=torch.int32, device=tables.device) for each in (self.row, refused))
            tables.record_refused(plan.step_id, rows, told)
        require_same(*(tables.arrays for tables in self.both))
        self.space.acknowledge(plan.step_id)
        (start,) = starts
        return start


@each_kind
def test_refused_tokens_do_not_move_an_encoder(kind: KernelChoice) -> None:
    """Its entries are all known, whatever becomes of the tokens of its row; a later step has a second encoder."""
    groups = FullAttention(2), CrossAttention(9, 2)
    space = BlockSpace(SpaceConfig(groups, num_blocks=60, max_sequences=4, max_tokens=40))
    keys = RequestKeys(media=(MediaSpan(0, 1, b"a sound"),))
    first = space.allocate([1, 2, 3], keys=keys, num_encoder_tokens=9).row
    both_tables = both(space.config, kind)
    expected = [([0], [9]), ([9], [9]), ([9, 0], [9, 5]), ([9, 5], [9, 5])]
    for step, (starts, ends) in enumerate(expected):
        plan = space.plan_step()
        for tables in both_tables:
            inputs = tables.step(plan)
            assert (inputs.starts[1].tolist(), inputs.seq_lens[1].tolist()) == (starts, ends)
            slots = inputs.slot_mappings[1].tolist()
            assert [slot for slot in slots if slot >= 0] == space.slot_mapping(plan, 1).tolist()
            rows, refused = (
                torch.tensor([each], dtype=torch.int32, device=tables.device) for each in (first, step % 3)
            )
            tables.record_refused(plan.step_id, rows, refused)
        require_same(*(tables.arrays for tables in both_tables))
        space.append([first], None, [3])
        if step == 1:
            space.allocate([7], keys=keys, num_encoder_tokens=5)
        elif step > 1:
            space.append([1], [8])


@each_kind
def test_what_was_refused_behind_a_rollback_moves_nothing(kind: KernelChoice) -> None:
    overlapped = Overlapped(kind)
    assert overlapped.step(0) == 0
    overlapped.append_unknown(4)
    assert overlapped.step(2) == 3
    overlapped.space.truncate([overlapped.row], [3])
    overlapped.append_unknown(2)
    assert overlapped.step(1) == 3
    overlapped.append_unknown(2)
    assert overlapped.step(0) == 4


@each_kind
def test_what_several_steps_refused_and_nobody_filled_in_adds_up(kind: KernelChoice) -> None:
    """The plan may name any step that is over for the one that samples the first unknown token."""
    overlapped = Overlapped(kind)
    assert overlapped.step(0) == 0
    overlapped.append_unknown(3)
    assert overlapped.step(1) == 3
    overlapped.append_unknown(2)
    assert overlapped.step(1) == 5
    overlapped.append_unknown(1)
    assert overlapped.step(0) == 6
    overlapped.append_unknown(1)
    assert overlapped.step(0) == 7


@each_kind
@pytest.mark.parametrize("num_places", [3, 5])
def test_rows_are_gathered_and_positions_mapped_alike(num_places: int, kind: KernelChoice) -> None:
    plain, fast = both(CONFIG, kind)
    for tables in (plain, fast):
        for row in range(CONFIG.max_sequences):
            tables.append_block_ids(row, [list(range(row, 2 * row + 1))] * 5 + [[row], [row + 1]], overwrite=True)
        tables.apply_staged_writes()
        where = tables.device
        rows = torch.tensor([6, -1, 2], dtype=torch.int32, device=where)
        tables.gather_block_tables(rows, num_places)
        offsets = torch.tensor([0, 3, 5, 9], dtype=torch.int32, device=where)
        positions = torch.tensor([0, 4, 13, 0, 1, 2, 3, 200, 4], device=where)
        tables.compute_slot_mappings(rows, offsets, positions, 20, torch.tensor([0, 0, 1], dtype=torch.int32).to(where))
    require_same(plain.arrays, fast.arrays)
