"""The state of a block space: pools, groups, rows and digest chains, built from a configuration.

Owns construction and the few look-ups that every operation needs. Groups of equal block size, whose names cover equally
many tokens ahead, share a *lane*, with one digest chain for each row, computed once for all of them.

Whether there are enough free blocks for an operation is asked here, too. The needs of an operation are given by tenant
and pool (:data:`Needs`). A space without tenants has a :class:`Room`, in which all blocks are for
:data:`~pagedkv.blocks.record.NO_TENANT`. A space with tenants has a room of its own in its place, which counts each
one's share (:mod:`pagedkv.space.tenants`).

So are batches of rows checked: every row exists and has the right status, or an error names the row and its status.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.digests import ExtraKeyTable
from pagedkv.blocks.eviction.registry import policy_named
from pagedkv.blocks.eviction.tlru import TLRU, set_tail
from pagedkv.blocks.free_queue import free_leased
from pagedkv.blocks.loops import Loops
from pagedkv.blocks.record import (
    FREE,
    LIFE,
    NAME,
    NO_TENANT,
    NUM_DEFERRED_LISTS,
    NUM_FREE,
    OPEN_STEP,
    QUEUE,
    SETTLED_STEP,
    UNDATED,
    PoolArrays,
    PoolFeatures,
    renumber,
)
from pagedkv.contract.answers import Load, Receipt, Shortage, TenantShare, Ticket
from pagedkv.contract.arguments import LARGEST_SIZE, as_count, as_counts
from pagedkv.contract.arrays import Int32Array, Int64Array, Uint32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import (
    GroupSpec,
    StepId,
    is_cross,
    keeps_state,
    most_checkpoints,
    num_ahead,
    num_draft_states,
)
from pagedkv.errors import (
    ConfigurationError,
    FreedSequenceError,
    LostSequenceError,
    SequenceError,
    StepError,
    SwappedOutError,
    TokenError,
    TooManySequencesError,
    UnknownSequenceError,
)
from pagedkv.plan_buffer import PlanLayout
from pagedkv.space.receipts import ReceiptBook
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    COVERED,
    FULL,
    KIND,
    LAST_STEP,
    LOST,
    LOST_ON_HOST,
    MOST_AHEAD,
    NUM_DRAFT_STATES,
    NUM_ENDS,
    NUM_PLANNED,
    NUM_POSITIONS,
    NUM_TOKENS,
    PLANNED,
    RUNNING,
    SHEDS,
    SPAN,
    STATUS,
    SWAPPED,
    VACANT,
    GroupArrays,
    GroupView,
    clear_rows,
    first_needed_token,
    first_unfilled,
    first_unfit_row,
    new_draft_arrays,
    new_group_arrays,
    new_rows,
    root_of,
)

NO_LANE: Final = -1
STEPS_BEFORE_RENUMBERING: Final = 2**30
MOST_FORMER_EPOCHS: Final = 4  # for explanations
NO_EPOCHS: Final[tuple[str, ...]] = ()


@dataclass(slots=True)
class Loading:
    """The record of a load that is under way (:mod:`pagedkv.space.loading`).

    Args:
        parents: for each group the block before the loaded blocks, or the null block.
        digests: for each lane the digests of all blocks of the prefix, uint32 ``[n, 8]``.
        tickets: the tickets that hold its blocks, one a pool.
        is_frozen: whether its content must not be published, since the cache was reset or the memory given back.
        oldest_epoch: the oldest epoch that contributed to it, if epochs are counted.
    """

    parents: list[int]
    digests: list[Uint32Array]
    tickets: list[Ticket]
    is_frozen: bool = False
    oldest_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """One group of layers: its rule, its table, and the pools it draws from.

    Args:
        index: position in the configuration.
        spec: the group's rule, from the configuration.
        arrays: table and parameters.
        pool: the device pool of its blocks.
        host_pool: the pool for its swapped-out blocks, or None.
        lane: index of the digest chain that it shares with groups of the same block size and as many tokens ahead; -1
            outside prefix caching.
        planned: the column of the rows with the number of positions that are planned in this group; positions: the
            one with the number of all, which are tokens of the row, or of its encoder.
        block_size: tokens a block (for a recurrent state without prefix caching: all tokens).
        keeps_whole_prefix: whether the rule never drops a block (full attention).
        view: the first arguments of compiled loops over its rows: ``loop(*group.view, ...)``.
        num_ahead: tokens behind a block that its name covers.
    """

    index: int
    spec: GroupSpec
    arrays: GroupArrays
    pool: BlockPool
    host_pool: BlockPool | None
    lane: int
    planned: int
    positions: int
    block_size: int
    keeps_whole_prefix: bool
    view: GroupView
    num_ahead: int

    @property
    def stays_out(self) -> bool:
        """Whether this group is outside prefix caching while the space has it."""
        return self.lane == NO_LANE

    @property
    def has_own_start(self) -> bool:
        """Whether plans may begin a row's range elsewhere than in other groups: outside caching, or with replay."""
        return self.planned != NUM_PLANNED

    @property
    def replays(self) -> bool:
        """Whether windows that are gone can be replayed (computed again)."""
        return self.has_own_start and not self.stays_out

    def first_needed_token(self, query: int) -> int:
        """First position, sinks apart, that the computation of position ``query`` and all later ones reads."""
        kind, span = (int(self.arrays.parameters[column]) for column in (KIND, SPAN))
        return first_needed_token(kind, span, query)

    def num_sealed(self, num_tokens: int) -> int:
        """Count the full blocks of so many tokens whose names these determine."""
        return max(0, num_tokens - self.num_ahead) // self.block_size

    def num_slots_blocks(self, num_tokens: int, num_lookahead: int) -> int:
        """Count the blocks for this many tokens and reserved slots (a recurrent state reserves none)."""
        if num_lookahead and keeps_state(self.spec):
            num_lookahead = 0
        return -(-(num_tokens + num_lookahead) // self.block_size)

    def num_own_blocks(self, num_tokens: int, num_lookahead: int) -> int:
        """Count the blocks that a fork takes to reserve slots: a copy of the partly filled block, and new ones."""
        if num_lookahead == 0 or keeps_state(self.spec):
            return 0
        return -(-(num_tokens + num_lookahead) // self.block_size) - num_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class DraftTable:
    """The second table of a group: the blocks of its draft states (:mod:`pagedkv.space.drafting`).

    Args:
        index: its number in plans, behind those of the groups.
        group: the group.
        arrays: table and parameters.
    """

    index: int
    group: Group
    arrays: GroupArrays

    @property
    def pool(self) -> BlockPool:
        """The device pool of its blocks: the group's pool."""
        return self.group.pool


class NamedLife(NamedTuple):
    """A named block in one of its lives: of which pool, and in which life."""

    pool: str
    block: int
    life: int


class TailNote(NamedTuple):
    """The record of a named tail (:mod:`pagedkv.space.states`).

    Args:
        group: index of the group; parent: digest of the whole intervals before it, as bytes of its words.
        length: its tokens.
        life: life of the block when it was named.
        is_end: whether a sequence ended there, rather than a prompt.
        before: of an end, the states at the end of its prompt.
    """

    group: int
    parent: bytes
    length: int
    life: int
    is_end: bool = False
    before: tuple[NamedLife, ...] = ()


@dataclass(eq=False, slots=True)
class KeptInside:
    """A block for a state inside a chunk (:mod:`pagedkv.space.keeping`).

    Args:
        row, serial: the row that computes it, and which sequence that serves.
        position: tokens that the state covers.
        group: index of the group; block: the block.
        parent: uint32 ``[8]``, digest of the whole intervals before it; None if they were still to be appended.
        ticket: the space's reference to the block.
        step: the step that computes it, once that is planned.
    """

    row: int
    serial: int
    position: int
    group: int
    block: int
    parent: Uint32Array | None
    ticket: Ticket
    step: StepId | None = None


class Checkpoints:
    """The states that are kept inside intervals, and the positions up to which running prompts need one.

    Attributes:
        alignment: hits end at multiples of this in all groups but states.
        wanted: int32 ``[max_sequences]``, up to where the last state of each row's prompt is to be kept; 0: nowhere.
        prompt_ends: by row, the states kept at the end of its prompt.
        continued: by row that goes on from another sequence's end: the blocks of that end, and the states at the end of
            the prompt before it. The row's own end supersedes them.
        begun: by row that goes on from tails, the digests before these, by group and logical block.
        inside: the blocks for states inside chunks of the open step, and of steps in flight.
        ends: by row, the last position that was named in the open step.
    """

    def __init__(self, config: SpaceConfig) -> None:
        """Start without any record."""
        sizes = [group.block_size for group in config.groups if group.prefix_caching and not keeps_state(group)]
        self.alignment = math.lcm(*sizes)
        self.wanted = np.zeros(config.max_sequences, np.int32)
        self.prompt_ends: dict[int, list[NamedLife]] = {}
        self.continued: dict[int, list[NamedLife]] = {}
        self.begun: dict[int, dict[tuple[int, int], Uint32Array]] = {}
        self.inside: list[KeptInside] = []
        self.ends: dict[int, int] = {}
        self._notes: dict[tuple[str, int], TailNote] = {}
        self._blocks: dict[tuple[int, bytes], dict[int, set[int]]] = {}

    @property
    def tickets(self) -> set[Ticket]:
        """The tickets of states inside chunks, which callers do not have."""
        return {kept.ticket for kept in self.inside}

    def __bool__(self) -> bool:
        """Whether anything was ever kept."""
        return bool(self._notes)

    def clear(self, batch: Int32Array) -> None:
        """Forget what was noted of rows. O(rows)."""
        self.wanted[batch] = 0
        for row in batch.tolist() if self.prompt_ends or self.continued or self.begun or self.ends else ():
            self.prompt_ends.pop(row, None)
            self.begun.pop(row, None)
            self.ends.pop(row, None)
            self.continued.pop(row, None)

    def note(self, pool: str, block: int, note: TailNote) -> None:
        """Record a block that was named. O(1)."""
        self._forget(pool, block)
        self._notes[pool, block] = note
        self._blocks.setdefault((note.group, note.parent), {}).setdefault(note.length, set()).add(block)

    def _forget(self, pool: str, block: int) -> None:
        note = self._notes.pop((pool, block), None)
        if note is None:
            return
        lengths = self._blocks[note.group, note.parent]
        lengths[note.length].remove(block)
        if not lengths[note.length]:
            del lengths[note.length]
        if not lengths:
            del self._blocks[note.group, note.parent]

    def note_of(self, pool: str, arrays: PoolArrays, block: int) -> TailNote | None:
        """Return the tail that a block is named for, or None."""
        note = self._notes.get((pool, block))
        is_alive = note is not None and arrays.records[block, NAME] and arrays.records[block, LIFE] == note.life
        return note if is_alive else None

    def lengths(self, group: int, parent: Uint32Array) -> Iterator[int]:
        """Lengths of the tails that were kept behind a parent; the tails may be gone."""
        return iter(self._blocks.get((group, parent.tobytes()), ()))

    def noted_blocks(self, pool: str) -> Iterator[int]:
        """Blocks of a pool that have a record."""
        return (block for name, block in self._notes if name == pool)


Tell: TypeAlias = Callable[..., None]


class Observers:
    """Whom operations tell what they do: at each moment the methods to call, in the order of registration.

    :mod:`pagedkv.space.observer` has the moments, with what is told at each. ``check`` is called by audits.
    """

    check: tuple[Tell, ...] = ()
    admitting: tuple[Tell, ...] = ()
    admitted: tuple[Tell, ...] = ()
    forked: tuple[Tell, ...] = ()
    grown: tuple[Tell, ...] = ()
    refused: tuple[Tell, ...] = ()
    truncating: tuple[Tell, ...] = ()
    declaring: tuple[Tell, ...] = ()
    planned: tuple[Tell, ...] = ()
    acknowledging: tuple[Tell, ...] = ()
    acknowledged: tuple[Tell, ...] = ()
    aborted: tuple[Tell, ...] = ()
    leaving: tuple[Tell, ...] = ()
    freed: tuple[Tell, ...] = ()
    swapped_out: tuple[Tell, ...] = ()
    returned: tuple[Tell, ...] = ()
    load_begun: tuple[Tell, ...] = ()
    load_ended: tuple[Tell, ...] = ()
    advanced: tuple[Tell, ...] = ()
    withdrawn: tuple[Tell, ...] = ()


class BookArrays(NamedTuple):
    """The recorded explanations (:mod:`pagedkv.space.explaining`).

    Args:
        current: int64 ``[max_sequences, NUM_FIELDS]``, of each row's latest admitted sequence.
        past: int64 ``[most, NUM_FIELDS]``, a ring of earlier ones.
        num_past: int64 ``[1]``, number of all records ever put into the ring.
    """

    current: Int64Array
    past: Int64Array
    num_past: Int64Array


class Scratch:
    """Memory that an operation writes before it reads it, and constants, so that no operation allocates.

    Attributes:
        rows, starts, accepted, touched: int32 ``[max_sequences]``; copies: int32 ``[max_sequences, 2]``.
        writes: int32 ``[tables, 2]``.
        refused: int32 ``[max_sequences]``, zeros between operations.
        ones: int32 ``[max_sequences]``, ones.
    """

    __slots__ = "accepted", "copies", "ones", "refused", "rows", "starts", "touched", "writes"

    def __init__(self, max_sequences: int, num_tables: int) -> None:
        self.rows, self.starts, self.accepted, self.touched = np.empty((4, max_sequences), np.int32)
        self.copies = np.empty((max_sequences, 2), np.int32)
        self.writes = np.zeros((num_tables, 2), np.int32)
        self.refused = np.zeros(max_sequences, np.int32)
        self.ones = np.ones(max_sequences, np.int32)


class Weights:
    """The version of the model's weights.

    Attributes:
        epoch: text, or a number where epochs are counted.
        identity: the part of it that belongs to every first block's identity; none if it is a number.
        former: the last few text epochs before it, latest first.
    """

    __slots__ = "epoch", "former", "identity"

    def __init__(self, epoch: "str | int") -> None:
        self.epoch, self.former = epoch, NO_EPOCHS
        self.identity = epoch if isinstance(epoch, str) else ""

    def begin(self, epoch: str) -> None:
        """Record that the model has other weights."""
        if epoch != self.epoch:
            others = [each for each in self.former if each not in {epoch, self.identity}]
            self.former = (self.identity, *others[: MOST_FORMER_EPOCHS - 1])
        self.epoch = self.identity = epoch


class Change:
    """The one place where the space's version grows and an operation is marked as under way.

    Entered once all checks are done, so that a refusal changes neither. An exception from outside (an interrupt, memory
    that ran out) leaves the mark, and the next operation tells (``InterruptedSpaceError``).
    """

    __slots__ = "_num_versions", "_state"

    def __init__(self, state: "SpaceState", num_versions: int) -> None:
        self._state, self._num_versions = state, num_versions

    def __enter__(self) -> None:
        self._state.is_changing = True
        self._state.version += self._num_versions

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._state.is_changing = False


class SpaceState:
    """All arrays of one block space.

    Attributes:
        changing: ``with state.changing:`` around all that an operation changes. draining: the same where no match can
            change. is_changing: set within them; still set at the next operation if one was interrupted.
        pools: device pools by name; host_pools: host pools by the same names; all_pools: both.
        pool_counts: the counts of the device pools.
        groups: the groups, in the configuration's order; cached_groups: those in prefix caching (all, if the space has
            none); outsiders: those outside it; replaying_groups: those whose windows can be replayed; cross_groups:
            those of cross-attention, which are not among ``groups``; all_groups: both; own_starts: outsiders,
            replaying_groups and cross_groups. planned_columns: int32, the rows' columns with the planned tokens of any
            of ``groups``. lanes: the groups of each digest chain. ahead_groups: those whose names cover tokens ahead;
            beyond_hits: tokens that a prompt must have behind a hit, beside the one that is always computed.
            shedding_groups: those whose windows leave cached only what later prompts can hit. state_groups: those that
            keep states for prefixes to hit. sliding_groups: those that do not keep whole prefixes.
        ends: for each shedding group, by its index, int32 ``[max_sequences, NUM_ENDS]``, the positions before which
            blocks stay cached (:mod:`pagedkv.space.windows`); empty for other sliding groups.
        checkpoints: the states kept inside intervals, if the space has state_groups.
        hits_inside: whether hits may end inside blocks. has_tenants: whether tenants are distinguished.
        oldest_epochs: int32 ``[max_sequences]``, the oldest epoch that contributed to what each row holds, if
            counts_epochs: epochs are counted.
        draft_tables: the second tables of groups that keep draft states; tables: those of all groups, then these.
            num_draft_states: most open tokens of a row, if a group is a recurrent state.
        rows: int32 ``[max_sequences, columns]`` (see :mod:`pagedkv.space.rows`).
        chains: per lane uint32 ``[max_sequences, 8]``: digest of each row's last digested block. roots: per lane uint32
            ``[8]``, the digest before a first block.
        vacant_rows: rows to be handed out, from the end: the row vacated last is warm in the processor's caches.
        serials: int32 ``[max_sequences]``, grows with every sequence that gets a row, so that old plans are recognized.
        relies_on: int32 ``[max_sequences]``, last step in which another row computes content that this row shares; if
            that step is aborted, this row is lost.
        num_known: int32 ``[max_sequences]``, known tokens of rows that have, or had, unknown ones; 0 for all others
            (:mod:`pagedkv.space.filling`). is_overlapped: whether any row ever had unknown tokens.
        lane_columns: int32 ``[lanes, 2]``, first column and block size of the first group of each lane.
        held: the blocks, int32 ``[n]``, of every ticket that is not released; num_tickets: tickets ever given out.
        loads: the loads that are under way; num_loads: loads ever begun.
        media_keys: keys of the rows whose prompts have media.
        media_reach: int32 ``[max_sequences]``, where the last medium of a row ends.
        is_recurrent: whether a group keeps a recurrent state, which only one sequence at a time may advance.
        plan_layout: what all plans of this space have in common.
        num_steps_before: the public number of a step minus its number in the blocks' records.
        weights: the version of the model's weights. scratch: memory of operations.
        publish_limits: int32 ``[max_sequences]``, tokens of each row that may be published; limits_publishing: whether
            there ever was a limit. has_brought_digests: whether callers ever brought digests of their own.
        version: grows with every operation that changes the space; an answer of an earlier version is out of date.
        now_s: the caller's clock, in seconds, as last set.
        only_chain: the only group with prefix caching, if it keeps whole prefixes: then one walk matches a prompt.
        room: whether there are enough free blocks, for which tenant (:mod:`pagedkv.space.state`).
        receipts: what each row has taken, if the space keeps receipts. explanations: why hits ended, if recorded.
        observers: the observers of the space, by moment, in the order in which they are called.
        most_blocks_beside: the most blocks that a growing row takes for draft states, beside those of the tables.
    """

    def __init__(self, config: SpaceConfig) -> None:
        """Build empty pools and tables. O(blocks)."""
        self.config = config
        self.changing, self.draining, self.is_changing = Change(self, 1), Change(self, 0), False
        self.observers = Observers()
        self.version, self.now_s = 0, 0.0
        self.room = Room(self)
        self.pools = self._new_pools(config.blocks_by_pool())
        self.host_pools = self._new_pools(config.host_blocks_by_pool(), is_host=True)
        self.all_pools = (*self.pools.values(), *self.host_pools.values())
        self.pool_counts = [pool.arrays.counts for pool in self.pools.values()]
        self._clock = self.pool_counts[0]  # all pools count the same steps
        self.rows = new_rows(
            config.max_sequences,
            len(config.groups) + len(config.drafting),
            num_replaying=len(config.replaying),
            has_tenants=config.tenants is not None,
        )
        self.vacant_rows = list(range(config.max_sequences))[::-1]
        self.held: dict[Ticket, Int32Array] = {}
        self.loads: dict[Load, Loading] = {}
        self.num_tickets = self.num_loads = 0
        self.media_keys: dict[int, RequestKeys] = {}
        self.media_reach = np.zeros(config.max_sequences, np.int32)
        self.weights = Weights(config.weights_epoch)
        self.publish_limits = np.full(config.max_sequences, LARGEST_SIZE, np.int32)
        self.limits_publishing = self.is_overlapped = self.has_brought_digests = False
        self.all_groups = self._new_groups()
        self.groups = tuple(group for group in self.all_groups if not is_cross(group.spec))
        self.draft_tables = self._new_draft_tables()
        self.tables: tuple[Group | DraftTable, ...] = (*self.all_groups, *self.draft_tables)
        self.num_draft_states = min((num_draft_states(spec) for spec in config.groups if keeps_state(spec)), default=0)
        self.cached_groups = tuple(group for group in self.groups if not group.stays_out)
        self.outsiders = tuple(group for group in self.groups if group.stays_out)
        self.own_starts = tuple(self.all_groups[index] for index in config.own_starts)
        self.replaying_groups = tuple(self.groups[index] for index in config.replaying)
        self.shedding_groups = tuple(group for group in self.groups if group.arrays.parameters[SHEDS])
        self.state_groups = tuple(group for group in self.cached_groups if _keeps_checkpoints(config, group.spec))
        self.planned_columns = np.array(list(dict.fromkeys(group.planned for group in self.groups)), np.int32)
        self.ahead_groups = tuple(group for group in self.cached_groups if group.num_ahead)
        cached = self.cached_groups[0]
        is_one_chain = len(self.cached_groups) == 1 and cached.keeps_whole_prefix and config.prefix_caching
        self.only_chain = cached if is_one_chain and not self.ahead_groups else None
        self.extra_keys = ExtraKeyTable(max(group.block_size + group.num_ahead for group in self.groups))
        self.lanes = self._lanes()
        first = self.groups[0]
        self.loops = Loops(first.pool.arrays, first.arrays, self.rows, self.extra_keys.arrays)
        self.chains: list[Uint32Array] = [np.zeros((config.max_sequences, 8), np.uint32) for _ in self.lanes]
        self.is_recurrent = any(keeps_state(group.spec) for group in self.groups)
        self.serials, self.relies_on, self.num_known = np.zeros((3, config.max_sequences), np.int32)
        self.lane_columns = np.array(
            [(lane[0].arrays.parameters[AT], lane[0].block_size) for lane in self.lanes], np.int32
        )
        self._make_optional()
        self.scratch = Scratch(config.max_sequences, len(self.tables))
        self.plan_layout = PlanLayout(config)
        self.num_steps_before = self.num_batches = 0
        # A sweep visits every block. It is done so rarely that each new key pays for 16 of them.
        self.keys_before_sweep = max(1024, sum(pool.num_blocks for pool in self.all_pools) // 16)

    def _make_optional(self) -> None:
        """Make what only some spaces keep, beside the records of rows."""
        config = self.config
        self.roots = [root_of(lane[0].arrays) for lane in self.lanes]
        self.beyond_hits = max(0, int(self.cached_groups[0].arrays.parameters[MOST_AHEAD]) - 1)
        self.cross_groups = self.all_groups[len(self.groups) :]
        self.sliding_groups = tuple(group for group in self.groups if not group.keeps_whole_prefix)
        self.ends = {
            group.index: np.zeros((config.max_sequences * bool(group in self.shedding_groups), NUM_ENDS), np.int32)
            for group in self.sliding_groups
        }
        tables = [(table.pool.name, table.arrays) for table in self.tables]
        names = tuple(self.pools), tuple(self.host_pools)
        self.receipts = ReceiptBook(self.rows, self.serials, tables, *names) if config.receipts else None
        self.explanations: BookArrays | None = None
        self.checkpoints = Checkpoints(config) if self.state_groups else None
        self.hits_inside = config.prefix_caching and config.min_partial_hit > 0
        self.has_tenants, self.counts_epochs = config.tenants is not None, config.counts_epochs
        self.oldest_epochs = np.full(config.max_sequences, UNDATED, np.int32)
        for pool in self.all_pools if self.counts_epochs else ():
            pool.arrays.epochs[:1] = int(config.weights_epoch)
        self.most_blocks_beside = sum(int(it.arrays.parameters[NUM_DRAFT_STATES]) for it in self.draft_tables)

    def _new_pools(self, num_blocks: dict[str, int], *, is_host: bool = False) -> dict[str, BlockPool]:
        """Build pools with these numbers of blocks; host pools have no feature but epochs."""
        config = self.config
        policy = policy_named(config.eviction)
        pools = {}
        for name, count in num_blocks.items():
            if count == 0:
                continue
            mine = [group for group in config.groups if group.pool == name]
            pools[name] = BlockPool(
                name,
                count,
                max(group.block_size + num_ahead(group) for group in mine),
                caching=config.prefix_caching,
                policy=policy,
                in_order=config.in_order,
                features=self._features(name, 0 if is_host else count),
            )
            if policy is TLRU and config.prefix_caching:
                set_tail(pools[name].arrays, config.tail_tokens // max(group.block_size for group in mine))
        return pools

    def _features(self, name: str, num_blocks: int) -> PoolFeatures:
        """Return the features of a device pool with this many blocks; 0 stands for a host pool."""
        config = self.config
        is_device = num_blocks > 0
        bounds = tuple(
            (index, most)
            for index, spec in enumerate(config.groups, 1)
            if spec.pool == name and (most := most_checkpoints(spec)) is not None
        )
        return PoolFeatures(
            ghosts=config.ghosts_per_block * num_blocks if config.explain else 0,
            epochs=config.counts_epochs,
            leases=config.leases and is_device,
            siblings=config.prefix_caching and config.min_partial_hit > 0 and is_device,
            bounds=bounds if config.prefix_caching and is_device else (),
            limits=() if config.tenants is None or not is_device else config.limits_by_pool()[name],
            events=config.max_events if config.events and is_device else 0,
            parents=config.events,
            num_in_sets=self._num_in_sets(name),
            others_have=config.has_features,
        )

    def _num_in_sets(self, name: str) -> int:
        """Count the groups of a pool whose blocks hit only together with those of other groups."""
        caching = [spec.pool for spec in self.config.groups if spec.prefix_caching and self.config.prefix_caching]
        return caching.count(name) if len(caching) > 1 else 0

    def _new_groups(self) -> tuple[Group, ...]:
        config = self.config
        lane_of_size: dict[tuple[int, int], int] = {}
        groups = []
        for index, spec in enumerate(config.groups):
            arrays = new_group_arrays(index, config)
            block_size, is_full = int(arrays.parameters[BLOCK_SIZE]), bool(arrays.parameters[KIND] == FULL)
            planned, positions = (int(arrays.parameters[column]) for column in (PLANNED, NUM_POSITIONS))
            stays_out = is_cross(spec) or (config.prefix_caching and not spec.prefix_caching)
            ahead = int(arrays.parameters[COVERED]) - block_size
            lane = NO_LANE if stays_out else lane_of_size.setdefault((block_size, ahead), len(lane_of_size))
            pool, host_pool = self.pools[spec.pool], self.host_pools.get(spec.pool)
            view = GroupView(pool.arrays, arrays, self.rows)
            groups.append(
                Group(index, spec, arrays, pool, host_pool, lane, planned, positions, block_size, is_full, view, ahead)
            )
        return tuple(groups)

    def _new_draft_tables(self) -> tuple[DraftTable, ...]:
        drafting = [group for group in self.groups if num_draft_states(group.spec)]
        return tuple(
            DraftTable(index, group, new_draft_arrays(index, self.config, num_draft_states(group.spec)))
            for index, group in enumerate(drafting, len(self.all_groups))
        )

    def _lanes(self) -> tuple[tuple[Group, ...], ...]:
        num_lanes = 1 + max(group.lane for group in self.groups)
        return tuple(tuple(group for group in self.cached_groups if group.lane == lane) for lane in range(num_lanes))

    @property
    def open_step_id(self) -> StepId:
        """Public number of the open step: it never restarts."""
        return StepId(self.num_steps_before + self.open_step)

    @property
    def open_step(self) -> int:
        """Number of the open step, as blocks record it."""
        return int(self._clock[OPEN_STEP])

    @property
    def settled_step(self) -> int:
        """Number of the last settled step, as blocks record it."""
        return int(self._clock[SETTLED_STEP])

    def advance_open_step(self) -> None:
        """Begin the next step, in every pool."""
        for pool in self.all_pools:
            pool.arrays.counts[OPEN_STEP] += 1
        if self.open_step >= STEPS_BEFORE_RENUMBERING:
            self._renumber_steps()

    def _renumber_steps(self) -> None:
        """Renumber steps from the last settled one, since blocks record 32 bits. O(blocks), every 2**30 steps."""
        settled = self.settled_step // NUM_DEFERRED_LISTS * NUM_DEFERRED_LISTS  # deferred blocks stay in their lists
        for pool in self.all_pools:
            renumber(pool.arrays, settled, ~free_leased(pool.arrays))
        self.relies_on[:] = np.maximum(self.relies_on - settled, 0)
        self.rows[:, LAST_STEP] = np.maximum(self.rows[:, LAST_STEP] - settled, 0)
        self.num_steps_before += settled

    def require_vacant_rows(self, num_rows: int) -> None:
        """Raise TooManySequencesError if fewer rows than ``num_rows`` are vacant."""
        if num_rows > len(self.vacant_rows):
            raise TooManySequencesError(
                f"{num_rows} more sequences need {num_rows} rows, but only {len(self.vacant_rows)} of "
                f"max_sequences = {self.config.max_sequences} are vacant"
            )

    def take_rows(self, num_rows: int) -> Int32Array:
        """Take vacant rows for new sequences: int32 ``[num_rows]``. The caller has checked that there are enough."""
        taken = np.array([self.vacant_rows.pop() for _ in range(num_rows)], np.int32)
        self._clear_rows(taken, RUNNING)
        return taken

    def vacate(self, batch: Int32Array) -> None:
        """Make rows that hold no block vacant. The first row of the batch is the next one to be taken."""
        self._clear_rows(batch, VACANT)
        for row in batch.tolist() if self.media_keys else ():
            self.media_keys.pop(row, None)
        self.vacant_rows.extend(reversed(batch.tolist()))

    def _clear_rows(self, batch: Int32Array, status: int) -> None:
        """Make rows those of new, empty sequences, or vacant."""
        self.loops[clear_rows](self.rows, self.serials, self.relies_on, self.num_known, batch, status)
        if self.limits_publishing:
            self.publish_limits[batch] = LARGEST_SIZE
        if self.counts_epochs:
            self.oldest_epochs[batch] = UNDATED
        for group in self.shedding_groups:
            self.ends[group.index][batch] = 0
        if self.checkpoints is not None:
            self.checkpoints.clear(batch)

    def checkpoint_of(self, num_tokens: int, num_hit_tokens: int) -> int:
        """Return where a chunk of a prompt with a hit should end, so that its last state is kept there; 0 if nowhere.

        The position lies behind the hit and before the last token, where hits can end in all groups but states, and
        where no state is kept anyway at the end of an interval.
        """
        if self.checkpoints is None:
            return 0
        position = (num_tokens - 1) // self.checkpoints.alignment * self.checkpoints.alignment
        is_kept_anyway = all(position % group.block_size == 0 for group in self.state_groups)
        return 0 if position <= num_hit_tokens or is_kept_anyway else position

    def next_mark(self) -> int:
        """Return a number with which no batch of rows was marked before."""
        self.num_batches = self.num_batches % (2**31 - 1) + 1
        return self.num_batches


def _keeps_checkpoints(config: SpaceConfig, spec: GroupSpec) -> bool:
    """Return whether a group keeps states for prefixes to hit."""
    return config.prefix_caching and keeps_state(spec)


Needs: TypeAlias = Mapping[int, Mapping[str, int]]
"""Free blocks that an operation takes, by the number of a tenant and the name of a device pool."""
Places: TypeAlias = Int32Array | slice
"""Places in a batch of rows."""
NEW_PLACE: Final = -(2**31)
"""The destination of a surveyed block without a twin (:func:`~pagedkv.space.swapping.survey`)."""


class Arrival(NamedTuple):
    """What swapping a batch in takes, by tenant and pool.

    Args:
        num_taken: free blocks; num_distinct: blocks that would be taken if the pools held nothing.
        twins: cached blocks that are shared instead of copied: int32 ``[any]``; none where it makes no difference.
    """

    num_taken: dict[int, dict[str, int]]
    num_distinct: dict[int, dict[str, int]]
    twins: dict[int, dict[str, Int32Array]]


class Room:
    """The free blocks of a space, and for which tenants they are: here for none in particular.

    Attributes:
        names: names of the tenants by number, first None, for sequences without a tenant; empty without tenants.
    """

    names: Sequence[str | None] = ()

    def __init__(self, state: "SpaceState") -> None:
        """Use the state of a space. O(1)."""
        self._state = state

    # Tenants

    @property
    def config(self) -> SpaceConfig:
        """The space's configuration, with the tenants that there are now."""
        return self._state.config

    def number_of(self, tenant: object) -> int:
        """Return the number of a tenant by its name; None stands for no tenant. Raises ConfigurationError."""
        if tenant is None:
            return NO_TENANT
        raise ConfigurationError(f"there is no tenant {tenant!r}: set tenants in the configuration")

    def tenant_of(self, row: int) -> int:
        """Return the tenant of a row."""
        del row
        return NO_TENANT

    def by_tenant(self, batch: Int32Array) -> list[tuple[int, Places]]:
        """Return each tenant that has rows in a batch, in order, and the places of its rows."""
        del batch
        return [(NO_TENANT, slice(None))]

    def by_arrival(
        self, batch: Int32Array, num_taken: dict[str, int], num_distinct: dict[str, int], places: dict[str, Int32Array]
    ) -> Arrival:
        """Divide what a batch takes when it is swapped in, by tenant.

        Args:
            batch: the rows.
            num_taken, num_distinct: what all of it takes, by pool.
            places: the destination of each block of the host pools (:func:`~pagedkv.space.swapping.survey`).
        """
        del batch, places
        return Arrival({NO_TENANT: num_taken}, {NO_TENANT: num_distinct}, {})

    # Questions about needs

    def is_ample(self, batch: Int32Array, num_slots: int) -> bool:
        """Return whether every pool has a free block for each of so many slots of each row, in every group.

        A quick bound, which also counts the blocks that draft states take. O(pools).
        """
        count = len(batch) * (num_slots * len(self._state.groups) + self._state.most_blocks_beside)
        return all(count <= counts[NUM_FREE] for counts in self._state.pool_counts)

    def find_shortage(self, needs: Needs) -> Shortage | None:
        """Return the shortage of the first pool with too few free blocks, or too few for a tenant, if any."""
        for name, count in needs[NO_TENANT].items():
            num_free = int(self._state.pools[name].arrays.counts[NUM_FREE])
            if count > num_free:
                return Shortage(name, int(count), num_free)
        return None

    def fits_now(self, needs: Needs, *, is_first: bool = True) -> bool:
        """Return whether the pools have enough blocks beside the watermark.

        ``is_first``: no sequence that is part of the needs comes before, so an empty pool needs no watermark.
        """
        pools = self._state.pools
        return all(
            count <= pools[name].num_free - self.num_kept(pools[name], is_first=is_first)
            for name, count in needs[NO_TENANT].items()
        )

    def fits_empty_pools(self, needs: Needs) -> bool:
        """Return whether empty pools would have enough blocks, within the caps and beside the floors of others."""
        return all(self._fits(needs, pool, np.zeros(0, np.int32)) for pool in self._state.pools.values())

    def fits_beside(self, needs: Needs, shared: Mapping[str, Int32Array]) -> bool:
        """Return whether pools that hold nothing but the shared blocks in use would have enough blocks.

        An operation need not take blocks that it shares, so it can succeed where an empty pool would be too small. If
        the needs fit now, they fit here too.

        Args:
            needs: what is to be taken, including those of the shared blocks that are free.
            shared: the blocks that are shared, by pool: int32 ``[any]``, in any order, repeats allowed.
        """
        for name, pool in self._state.pools.items():
            in_use = np.unique(shared[name][pool.arrays.records[shared[name], QUEUE] != FREE])
            if not self._fits(needs, pool, in_use):
                return False
        return True

    def _fits(self, needs: Needs, pool: BlockPool, in_use: Int32Array) -> bool:
        """Return whether a pool would have enough blocks if only these were in use: int32 ``[any]``."""
        return needs[NO_TENANT][pool.name] <= pool.num_usable - len(in_use)

    def spare(self, pool: BlockPool, tenant: int) -> int:
        """Count the blocks that an admission may take for a tenant, beside what the watermark keeps free."""
        del tenant
        return pool.num_free - self.num_kept(pool)

    def num_kept(self, pool: BlockPool, *, is_first: bool = True) -> int:
        """Count the blocks that admissions leave free: the watermark, or 0 for the first in a pool with none in use."""
        if is_first and pool.num_free == pool.num_present:
            return 0
        return int(self._state.config.watermark * pool.num_present)

    # Shares

    def shares(self) -> tuple[TenantShare, ...]:
        """List what each tenant has of each device pool, pool by pool; empty without tenants."""
        return ()

    def shares_of(self, tenant: int) -> tuple[TenantShare, ...]:
        """List what a tenant has of each device pool; empty without tenants."""
        del tenant
        return ()

    def counts_of(self, pool: BlockPool) -> Int32Array:
        """Count what each tenant has of a pool: int32 ``[tenants, 2]``, blocks in use or deferred, and cached ones."""
        del pool
        return np.zeros((1, 2), np.int32)

    def most_blocks(self, tenant: int) -> dict[str, int]:
        """Count, by pool, the blocks that a tenant can have at most: its cap, or what others' floors leave."""
        del tenant
        return {name: pool.num_usable for name, pool in self._state.pools.items()}


def as_step_id(step_id: int) -> StepId:
    """Check a step's number. Raises StepError."""
    if isinstance(step_id, StepPlan):
        raise StepError("got a plan instead of its number: give plan.step_id")
    return StepId(as_count(step_id, "step_id", most=2**63 - 1, error=StepError))


def as_numbers(batch: Int32Array, counts: npt.ArrayLike | None, num_tokens: int) -> Int32Array:
    """Check how many of ``num_tokens`` tokens each row gets; None means one each. Raises TokenError."""
    given = np.ones(len(batch), np.int64) if counts is None else as_counts(counts, len(batch), "counts")
    if given.min(initial=0) < 0 or given.max(initial=0) > num_tokens or given.sum() != num_tokens:
        raise TokenError(f"the counts {given.tolist()[:8]} do not add up to the {num_tokens} token ids that were given")
    return given.astype(np.int32)


def as_num_reached(state: SpaceState, continues: Receipt) -> int:
    """Return how many leading tokens an earlier life of the request had. Raises ConfigurationError."""
    if not state.config.receipts:
        raise ConfigurationError("no receipts are kept, so none continues: set receipts=True in the configuration")
    if not isinstance(continues, Receipt):
        raise ConfigurationError(f"continues must be a receipt, as free returns them, got {continues!r}")
    return continues.num_reached


def as_num_outputs(num_generated: npt.ArrayLike, batch: Int32Array) -> Int32Array:
    """Check how many tokens rows have generated. Raises TokenError."""
    outputs = as_counts(num_generated, len(batch), "num_generated")
    if outputs.min(initial=0) < 0:
        raise TokenError(f"row {batch[outputs.argmin()]} cannot have generated {outputs.min()} tokens")
    return np.minimum(outputs, LARGEST_SIZE).astype(np.int32)


def require_status(state: SpaceState, batch: Int32Array, status: int) -> int:
    """Check that every row of a batch has that status and is there once; return the batch's mark.

    Raises:
        SequenceError: the subclass that fits the first row at fault.
    """
    mark = state.next_mark()
    place = state.loops[first_unfit_row](state.rows, batch, status, mark)
    if place >= 0:
        _refuse(state, batch, place, status)
    return mark


def has_unknown(state: SpaceState, batch: Int32Array) -> bool:
    """Whether a row has unknown tokens."""
    return state.is_overlapped and bool(state.loops[first_unfilled](state.rows, state.num_known, batch) >= 0)


def require_known(state: SpaceState, batch: Int32Array, what: str) -> None:
    """Raise SequenceError if a row has unknown tokens. Changes nothing."""
    if not state.is_overlapped:
        return
    place = state.loops[first_unfilled](state.rows, state.num_known, batch)
    if place >= 0:
        row = int(batch[place])
        known, num_tokens = int(state.num_known[row]), int(state.rows[row, NUM_TOKENS])
        raise SequenceError(
            f"row {row} cannot be {what}: {num_tokens - known} of its {num_tokens} tokens are unknown; fill them in, "
            f"or roll it back to {known} tokens"
        )


def require_known_prefix(state: SpaceState, row: int, length: int) -> None:
    """Raise SequenceError if a row has fewer tokens, or fewer known ones, than the fork is to have. Changes nothing."""
    num_tokens = int(state.rows[row, NUM_TOKENS])
    if length > num_tokens:
        raise SequenceError(f"row {row} cannot be forked at {length} tokens: it has {num_tokens}")
    if length > state.num_known[row]:
        require_known(state, np.array([row], np.int32), "forked")


def _refuse(state: SpaceState, batch: Int32Array, place: int, wanted: int) -> NoReturn:
    row = int(batch[place])
    if not 0 <= row < len(state.rows):
        raise UnknownSequenceError(f"row {row} does not exist: the space has rows 0 to {len(state.rows) - 1}")
    if row in batch[:place]:
        raise SequenceError(f"row {row} appears twice in one batch")
    status = int(state.rows[row, STATUS])
    if status == VACANT:
        raise FreedSequenceError(f"row {row} serves no sequence: it was freed, or never allocated")
    if status == SWAPPED:
        raise SwappedOutError(f"row {row} is swapped out: swap it in first")
    if status in {LOST, LOST_ON_HOST}:
        raise LostSequenceError(
            f"row {row} lost its content, in an aborted step or with memory given back: free it and allocate its "
            "tokens again"
        )
    assert status == RUNNING
    assert wanted == SWAPPED
    raise SequenceError(f"row {row} is not swapped out")
