"""What holds of a block space at any time: its live sequences, its counts, and which sequences hold which block.

The models of the operations build on it. The space chooses which physical block is allocated. The model only requires
that an allocated block is unreferenced, that no step in flight touches it, and (through
:mod:`tests.space.memory_model`) that memory ends up right.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagedkv import BlockSpace, Load, PoolStatistics, SpaceConfig, SpaceStatistics, Ticket
from pagedkv.contract.answers import CacheEventKind, Shortage
from tests.space.memory_model import Device, Move, Place, Step, host
from tests.space.new_blocks_model import NewBlocksModel
from tests.space.receipts_model import ReceiptsModel
from tests.space.sequence_model import GroupRule, ModelSequence, Prefixes, Status
from tests.space.tenant_model import Needs, Tenant, TenantModel
from tests.space.waiting_model import Holder, WaitingModel

__all__ = ["LiveModel", "ModelKeptState", "ModelLoad", "Refusal", "num_holders"]


@dataclass(eq=False, slots=True)
class ModelLoad:
    """A prefix that is brought from elsewhere, and is under way.

    Args:
        answer: the space's.
        prefixes: number of the prefix that ends at each of its positions.
        places: every block that it holds, those of its hit included.
        last_step: the last step that touches its blocks for its sake: none.
        epochs: the oldest and the newest weights that contributed to what is brought.
    """

    answer: Load
    prefixes: list[int]
    places: set[Place]
    last_step: int = 0
    epochs: tuple[int, int] = (0, 0)


@dataclass(eq=False, slots=True)
class ModelKeptState:
    """A block for a state inside a chunk.

    Args:
        sequence: the sequence that computes it; position: tokens that the state covers.
        group: its group; block: the block.
        ticket: the space's reference, by which it is seen whether the block is still reserved.
        step_id: the step that computes it; 0 before it is planned.
        last_step: the last step for which the block waits after that: none.
    """

    sequence: ModelSequence
    position: int
    group: GroupRule
    block: int
    ticket: Ticket
    step_id: int = 0
    last_step: int = 0

    @property
    def place(self) -> Place:
        """The block, with its pool."""
        return self.group.pool, self.block


class Refusal(NamedTuple):
    """Whether an operation is refused: for sure, or perhaps, where it depends on which of several rows computes."""

    is_sure: bool
    is_possible: bool


class LiveModel:
    """The expected state of one block space.

    Attributes:
        sequences: live sequences by row.
        ran: steps that the device has run and that are not acknowledged; planned: steps still to run. In order.
        loads: prefixes that are brought from elsewhere.
        kept_states: blocks for states inside chunks.
        open_moves: what the open step's plan will copy or swap.
        statistics: the space's, after the last operation.
        epoch: of the weights, where epochs are counted.
        payer: the tenant that allocated blocks are charged to.
        absent: blocks whose memory was given back, by device pool.
        seen: how often interesting things happened.
    """

    def __init__(self, config: SpaceConfig, space: BlockSpace, seen: Counter[str]) -> None:
        """Expect an empty space."""
        self.config = config
        self.space = space
        self.seen = seen
        self.groups = [
            GroupRule(index, spec, caching=config.prefix_caching, max_tokens=config.max_tokens)
            for index, spec in enumerate(config.groups)
        ]
        blocks = config.blocks_by_pool()
        self.host_pools = {pool: count for pool, count in config.host_blocks_by_pool().items() if count}
        labelled = blocks | {host(pool): count for pool, count in self.host_pools.items()}
        self.num_usable = {label: count - 1 for label, count in labelled.items()}
        self.device = Device(self.groups, labelled)
        self.epoch = config.weights_epoch if isinstance(config.weights_epoch, int) else 0
        self.device.max_epoch_lag = config.max_epoch_lag
        self.new_blocks = NewBlocksModel(self.groups)
        self.prefixes = Prefixes()
        self.generation = 0
        self.sequences: dict[int, ModelSequence] = {}
        self.ran: list[Step] = []
        self.planned: list[Step] = []
        self.num_plans = 0
        self.open_moves: list[Move] = []
        self.loads: list[ModelLoad] = []
        self.kept_states: list[ModelKeptState] = []
        self.in_use: dict[str, set[int]] = {label: set() for label in labelled}
        self.named: dict[str, dict[tuple[int, int], bytes]] = {pool: {} for pool in blocks}
        self.absent: dict[str, set[int]] = {label: set() for label in labelled}
        self.waiting = WaitingModel(self.in_use, in_order=config.in_order)
        self.receipts = ReceiptsModel(blocks, map(host, self.host_pools)) if config.receipts else None
        self.tenants = TenantModel(config, seen)
        self.payer: Tenant = None
        self.statistics = space.statistics()

    # Looking

    @property
    def open_touched(self) -> set[Place]:
        """Blocks that the open step's plan will copy or swap."""
        return {place for move in self.open_moves for place in (move.source, move.target)}

    @property
    def open_written(self) -> set[Place]:
        """Blocks that the open step's plan will copy or swap something into."""
        return {move.target for move in self.open_moves}

    @property
    def num_settled(self) -> int:
        """The last step of which no earlier one, nor it, is in flight."""
        return self.in_flight[0].plan.step_id - 1 if self.in_flight else self.num_plans

    @property
    def in_flight(self) -> list[Step]:
        """Steps that are planned and not acknowledged, oldest first."""
        return self.ran + self.planned

    @property
    def running(self) -> list[ModelSequence]:
        """Sequences that can grow, oldest first."""
        return [sequence for sequence in self.sequences.values() if sequence.status is Status.RUNNING]

    @property
    def swapped(self) -> list[ModelSequence]:
        """Sequences in the host pools, oldest first."""
        return [sequence for sequence in self.sequences.values() if sequence.status is Status.SWAPPED]

    @property
    def num_vacant(self) -> int:
        """Rows that no sequence has."""
        return self.config.max_sequences - len(self.sequences)

    @property
    def is_recurrent(self) -> bool:
        """Whether a group keeps a state."""
        return any(group.is_state for group in self.groups)

    def pool_statistics(self, label: str) -> PoolStatistics:
        """The last snapshot of one pool."""
        for pool in self.statistics.pools:
            if pool.name == label:
                return pool
        return next(pool for pool in self.statistics.host_pools if host(pool.name) == label)

    def num_free(self, label: str) -> int:
        """Blocks that could be handed out after the last operation."""
        return self.pool_statistics(label).num_free

    def kept_free(self, pool: str) -> int:
        """Blocks that the watermark holds back, unless no block of the pool is in use."""
        usable = self.num_usable[pool] - len(self.absent[pool])
        return 0 if self.num_free(pool) == usable else int(self.config.watermark * usable)

    def lacks(self, needs: Needs, *, beside_watermark: bool = False) -> tuple[str, Tenant, int] | None:
        """Name the first pool with too few blocks for a tenant, the tenant, and what it may take; or None."""
        return self.tenants.lacks(
            needs, {pool: self.num_free(pool) - beside_watermark * self.kept_free(pool) for pool in self.named}
        )

    def read_tables(self, row: int) -> list[list[int]]:
        """Read a row's block ids from the space."""
        return [self.space.block_ids(row, group.index) for group in self.groups]

    def read_slots(self, row: int) -> list[list[int]]:
        """Read the blocks of a row's draft states from the space."""
        return [self.space.draft_block_ids(row, group.index) for group in self.groups]

    @property
    def keeps_draft_states(self) -> bool:
        """Whether a group keeps states of drafts."""
        return any(group.num_draft_states for group in self.groups)

    def label(self, group: GroupRule, sequence: ModelSequence) -> str:
        """Label of the pool in which a sequence's blocks of a group are."""
        return host(group.pool) if sequence.on_host else group.pool

    def places(self, sequence: ModelSequence) -> set[Place]:
        """Every block that a sequence holds."""
        return {
            (self.label(group, sequence), block)
            for group, table, slots in zip(self.groups, sequence.tables, sequence.slots, strict=True)
            for block in (*table, *slots)
            if block
        }

    def holders(self, group: GroupRule, sequence: ModelSequence, index: int) -> int:
        """How many sequences and loads hold the block that is logical block ``index`` of this one."""
        place = self.label(group, sequence), sequence.tables[group.index][index]
        num_loads = sum(place in load.places for load in self.loads)
        return num_loads + num_holders(self.sequences.values(), group, sequence, index)

    # What holds after every operation

    def check(self) -> None:
        """Compare the space with the model as far as counts go, and let it audit itself."""
        self.space.check()
        self.in_use = {label: set() for label in self.in_use}
        for sequence in self.sequences.values():
            for label, block in self.places(sequence):
                self.in_use[label].add(block)
        for load in self.loads:
            for label, block in load.places:
                self.in_use[label].add(block)
        held: dict[Holder, set[Place]] = {sequence: self.places(sequence) for sequence in self.sequences.values()}
        held.update((load, load.places) for load in self.loads)
        self.kept_states = [kept for kept in self.kept_states if kept.ticket in self.space._state.held]
        held.update((kept, {kept.place}) for kept in self.kept_states)
        for kept in self.kept_states:
            self.in_use[kept.group.pool].add(kept.block)
        self.waiting.follow(held, self.open_moves, self.num_plans + 1)
        self.tenants.follow(
            {pool: self.in_use[pool] | self.waiting.blocks(pool, self.num_settled) for pool in self.named}
        )
        self.statistics = self.space.statistics()
        self._check_statistics(self.statistics)
        if self.receipts:
            self.receipts.check(self.statistics.receipts, {row: self.space.receipt(row) for row in self.sequences})
        self.seen["eviction"] += any(pool.num_evictions for pool in self.statistics.pools)
        if self.config.events:
            self._follow_events()

    def _check_statistics(self, statistics: SpaceStatistics) -> None:
        self.tenants.check(statistics)
        assert statistics.num_running == len(self.running)
        assert statistics.num_swapped == len(self.swapped)
        assert statistics.num_tokens == sum(len(sequence.tokens) for sequence in self.running)
        assert statistics.num_steps_in_flight == len(self.in_flight)
        for pool in statistics.pools:
            self._check_pool(pool, pool.name)
        for pool in statistics.host_pools:
            self._check_pool(pool, host(pool.name))

    def _check_pool(self, pool: PoolStatistics, label: str) -> None:
        assert pool.num_blocks == self.num_usable[label]
        assert pool.num_in_use == len(self.in_use[label]), f"{label}: blocks in use are not those of the tables"
        assert pool.num_absent == len(self.absent[label])
        assert pool.num_free + pool.num_deferred + pool.num_in_use + pool.num_absent == pool.num_blocks
        assert pool.num_leased <= pool.num_cached <= min(pool.num_free, pool.num_named)
        waiting = self.waiting.blocks(label, self.num_settled)
        assert pool.num_deferred == len(waiting), (
            f"{label}: {pool.num_deferred} blocks wait for a step, but these have reason to: {sorted(waiting)}"
        )

    def _follow_events(self) -> None:
        """The names that follow from the events are exactly those of the space."""
        for events in self.space.drain_events():
            names = self.named[events.pool]
            changes = zip(events.kinds.tolist(), events.groups.tolist(), events.block_ids.tolist(), strict=True)
            for digest, (kind, group, block) in zip(events.digests, changes, strict=True):
                if kind == CacheEventKind.CLEARED:
                    names.clear()
                elif kind == CacheEventKind.STORED:
                    assert (group, digest.tobytes()) not in {(key[0], name) for key, name in names.items()}
                    names[group, block] = digest.tobytes()
                else:
                    assert names.pop((group, block)) == digest.tobytes()
            assert len(names) == self.pool_statistics(events.pool).num_named

    def require_unchanged(self, *, but_leases: bool = False) -> None:
        """Assert that nothing has changed since the last operation; ``but_leases``: or only what leases keep."""
        now, before = self.space.statistics(), self.statistics
        if but_leases:
            now, before = without_leases(now), without_leases(before)
        assert now == before, "a question, a shortage or an error changed the counts"
        for row, sequence in self.sequences.items():
            assert self.read_tables(row) == sequence.tables, f"a question, a shortage or an error changed row {row}"
            assert self.read_slots(row) == sequence.slots, f"a question, a shortage or an error changed row {row}"

    def require_shortage(self, shortage: Shortage, needs: Needs) -> None:
        """Assert that a shortage is real, has the number of blocks needed, and changed nothing."""
        lacking = self.lacks(needs)
        assert lacking is not None
        pool, tenant, num_permitted = lacking
        assert (shortage.pool, shortage.num_needed) == (pool, needs[tenant][pool])
        self._require_real(shortage, num_permitted)
        assert shortage.share is None or shortage.share.tenant == tenant

    def require_moving_shortage(self, shortage: Shortage, most: dict[str, int]) -> None:
        """The same for a swap, of which what the other side holds already takes no new block."""
        assert shortage.num_needed <= most[shortage.pool]
        self._require_real(shortage)

    def _require_real(self, shortage: Shortage, num_permitted: int | None = None) -> None:
        """Fewer blocks are free than needed, or fewer are left to a tenant: as many as ``num_permitted``, if given."""
        self.seen["shortage"] += 1
        assert shortage.num_free == self.num_free(shortage.pool)
        share = shortage.share
        if share is None:
            assert shortage.num_free < shortage.num_needed
        else:
            assert share.num_permitted < shortage.num_needed
            assert share.num_permitted <= self.tenants.permitted(share.pool, share.tenant, shortage.num_free)
            assert num_permitted is None or share.num_permitted == num_permitted
            self.seen["tenant's shortage"] += shortage.num_needed <= shortage.num_free
        self.require_unchanged()

    def hand_out(self, label: str, block: int) -> None:
        """A free block was allocated: it was unreferenced, and its old content is gone."""
        self.tenants.charge((label, block), self.payer)
        assert 0 < block <= self.num_usable[label]
        assert block not in self.absent[label], f"{label}: block {block} was handed out, and has no memory"
        assert block not in self.in_use[label], f"{label}: block {block} was handed out while in use"
        assert (label, block) not in self.open_touched, f"{label}: block {block} was handed out, the open plan moves it"
        for step in self.in_flight:
            assert (label, block) not in (step.swapped if self.config.in_order else step.touched), (
                f"{label}: block {block} was handed out, a step in flight uses it"
            )
        self.in_use[label].add(block)
        self.waiting.handed_out((label, block))
        if not self.config.in_order:  # else steps in flight may still use it: the plan that hands it out is yet to run
            self.device.forget((label, block))
        self.new_blocks.open.add((label, block))

    def free_runs(self, pool: str, run: int) -> set[int]:
        """Runs of a device pool, without the first, of which no block is in use, waits, or is absent."""
        taken = self.in_use[pool] | self.waiting.blocks(pool, self.num_settled) | self.absent[pool]
        num_runs = (self.num_usable[pool] + 1) // run
        return {number for number in range(1, num_runs) if taken.isdisjoint(range(number * run, (number + 1) * run))}

    def hit(self, label: str, block: int) -> None:
        """A block is shared that is in use, waits for a step, or is taken thereby."""
        if block not in self.in_use[label] and block not in self.waiting.blocks(label, self.num_settled):
            self.tenants.charge((label, block), self.payer)

    def take_over(self, label: str, block: int) -> None:
        """A free block begins a new life with the content that it has."""
        assert (label, block) not in self.open_touched, f"{label}: block {block} was taken over, the open plan moves it"
        self.in_use[label].add(block)
        self.waiting.handed_out((label, block))


def without_leases(statistics: SpaceStatistics) -> SpaceStatistics:
    """Leave out how many blocks leases keep."""
    return replace(statistics, pools=tuple(replace(pool, num_leased=0) for pool in statistics.pools))


def num_holders(sequences: Iterable[ModelSequence], group: GroupRule, sequence: ModelSequence, index: int) -> int:
    """How many of some sequences hold the block that is logical block ``index`` of one of them."""
    block = sequence.tables[group.index][index]
    return sum(
        index < len(other.tables[group.index]) and other.tables[group.index][index] == block
        for other in sequences
        if other.on_host == sequence.on_host
    )
