"""The words everything above shares: ids, group rules, the configuration, sequences, statuses.

Owns no state and knows no algorithm. A *group* is the set of layers that share one retention rule
and one block table; four rules exist:

==================  ==============================================  =============================
rule                what a query at position q still needs          a prefix hit of L tokens needs
==================  ==============================================  =============================
FullAttention       every earlier block                             every block below L
SlidingWindow       positions > q - window, and the sinks           the last window, and the sinks
ChunkedLocal        positions from the start of q's chunk           the chunk in which L lies
RecurrentState      the state after token q - 1: one block          the checkpoint at L
==================  ==============================================  =============================
"""

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final, Literal, NewType, TypeAlias, assert_never

from pagedkv.memory.contract.arguments import TokenIds, as_choice, as_count, as_epoch, as_fraction
from pagedkv.memory.contract.errors import ConfigurationError

__all__ = [
    "EVICTION_POLICIES",
    "AllocStatus",
    "ChunkedLocal",
    "FullAttention",
    "GroupSpec",
    "RecurrentState",
    "Replay",
    "Row",
    "Sequence",
    "SequenceGroup",
    "SlidingWindow",
    "SpaceConfig",
    "StepId",
    "TenantLimits",
    "TokenIds",
    "keeps_state",
    "keeps_whole_prefix",
    "most_checkpoints",
    "num_draft_states",
    "num_sink_tokens",
    "replay_of",
]

Row = NewType("Row", int)
"""Row of the tables that serves one live sequence."""

StepId = NewType("StepId", int)
"""Number of a planned step; they grow by one."""

DEFAULT_POOL: Final = "device"
EVICTION_POLICIES: Final = ("lru", "adaptive", "fifo", "hazard")
"""Names of the eviction policies, in the order of :mod:`pagedkv.memory.pool.eviction.registry`."""
DEFAULT_EVICTION: Final = "lru"
"""The policy of whoever names none, in a space, an engine and a simulation alike."""
FEWEST_BLOCKS: Final = 2  # the null block, and one more
NO_LIMIT: Final = -(2**31)  # negative numbers are refused with a message of their own


class AllocStatus(Enum):
    """Answer to "does this fit": now, after others have freed blocks, or not even an empty pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


def _require(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not condition:
        raise ConfigurationError(message)


def _check_count(spec: object, name: str, *, least: int = 1) -> None:
    """Replace a field of a frozen value by the plain integer that it must be."""
    object.__setattr__(spec, name, as_count(getattr(spec, name), name, least=least))


def _check_flag(spec: object, name: str) -> None:
    given = getattr(spec, name)
    _require(isinstance(given, bool), f"{name} must be True or False, got {given!r}")


def _check_group(spec: object, *counts: str) -> None:
    for name in counts:
        _check_count(spec, name, least=0 if name == "num_sink_tokens" else 1)
    pool = getattr(spec, "pool", None)
    _require(isinstance(pool, str), f"pool must be a name, got {pool!r}")
    _check_flag(spec, "prefix_caching")


def _short_repr(spec: "GroupSpec | SpaceConfig") -> str:
    """Write a specification as Python would build it, without what is as it would be by itself."""
    told = [item for item in fields(spec) if item.init and getattr(spec, item.name) != item.default]
    return f"{type(spec).__name__}({', '.join(f'{item.name}={getattr(spec, item.name)!r}' for item in told)})"


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Layers that attend to every earlier token.

    Args:
        block_size: tokens a block.
        pool: name of the block pool the group draws from; groups may share one.
        prefix_caching: False keeps the group out of prefix caching, as any other: its blocks are never named or hit,
            and no hit waits for it. After a hit the sequence's first tokens are to be computed in this group alone
            (:meth:`StepPlan.compute_in <pagedkv.StepPlan.compute_in>`), as one can whose layers are a model of their
            own: that of the drafts, say.
    """

    block_size: int = 16
    pool: str = DEFAULT_POOL
    prefix_caching: bool = True
    kind: Literal["full"] = field(default="full", init=False)

    __repr__ = _short_repr

    def __post_init__(self) -> None:
        _check_group(self, "block_size")


@dataclass(frozen=True, slots=True)
class Replay:
    """How a window that is gone is computed again, where full attention still has the prompt.

    The step computes the last tokens of the hit once more, in the layers of windows alone; layers of full attention
    read the keys that they have cached. The first of these tokens lack what lay before them, and each layer carries
    that on by a window: with n layers of windows behind one another the window before the hit's end is exact where
    ``num_tokens >= n * (window - 1)``. Rounded up to whole blocks, so much is computed then that the blocks that are
    kept of it are exact throughout. With less it is approximate: nothing of it is published, nor anything that the
    sequence computes from there on.

    Args:
        num_tokens: tokens to compute again, at least 1.
        num_layers: layers of windows that lie behind one another in the model, those of other groups included.
    """

    num_tokens: int
    num_layers: int

    def __post_init__(self) -> None:
        _check_count(self, "num_tokens")
        _check_count(self, "num_layers")


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers whose query at position q attends to positions in ``(q - window, q]`` and the sinks.

    Args:
        window: tokens attended to, the query's own included; at least 1.
        num_sink_tokens: leading tokens that stay attended to (StreamingLLM); their blocks are kept.
        replay: how windows that the cache has lost may be computed again, where a match allows it
            (:meth:`BlockSpace.match <pagedkv.BlockSpace.match>`). None: never. All of a space's groups with prefix
            caching are full attention or windows with a replay then.
    """

    window: int
    block_size: int = 16
    num_sink_tokens: int = 0
    pool: str = DEFAULT_POOL
    prefix_caching: bool = True
    replay: Replay | None = None
    kind: Literal["window"] = field(default="window", init=False)

    __repr__ = _short_repr

    def __post_init__(self) -> None:
        _check_group(self, "block_size", "window", "num_sink_tokens")
        is_replay = self.replay is None or isinstance(self.replay, Replay)
        _require(is_replay, f"replay must be a Replay or None, got {self.replay!r}")
        _require(
            self.replay is None or self.prefix_caching,
            f"{self.replay!r} brings back what hits lack, but prefix_caching is False",
        )


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """Layers whose query attends only to its own chunk of ``chunk_size`` positions (Llama 4)."""

    chunk_size: int
    block_size: int = 16
    pool: str = DEFAULT_POOL
    prefix_caching: bool = True
    kind: Literal["chunk"] = field(default="chunk", init=False)

    __repr__ = _short_repr

    def __post_init__(self) -> None:
        _check_group(self, "block_size", "chunk_size")


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Layers that keep a state instead of keys and values (Mamba, linear attention, convolutions).

    A block holds one state. A sequence holds the block of its current state; with prefix caching on,
    the state at every multiple of ``checkpoint_interval`` tokens stays in a block of its own, so that
    prefixes hit there. The step that computes positions ``[s, e)`` reads the state from the block of
    position ``s - 1``, and writes it to the block of ``e - 1`` and of every checkpoint it passes. Where a
    step ends at :attr:`Allocation.checkpoint <pagedkv.Allocation.checkpoint>`, that state is kept as well.

    With ``num_draft_states`` tokens may be refused again: positions that are not accepted yet, drafts and unknown
    tokens, each have a state of their own, and the accepted one becomes the current
    (:attr:`StepPlan.draft_states <pagedkv.StepPlan.draft_states>`).

    Args:
        checkpoint_interval: tokens between checkpoints: the group's block size.
        max_checkpoints: most states that stay cached while nobody uses them, at least 1; of more, the least valuable
            goes at once: those that a prompt has passed before those at its end, and these before those where prompts
            branch, the older first. None: as many as the pool has room for.
        num_draft_states: most tokens of a sequence, drafts and unknown ones, that are not accepted at one time; each
            takes a block. For d drafts a step, d where a step is planned once the one before was sampled, and 2d + 2
            where it is planned while that one runs, and filled in before it is acknowledged. 0: the state is advanced
            in place, and takes no drafts.
    """

    checkpoint_interval: int
    pool: str = "state"
    prefix_caching: bool = True
    max_checkpoints: int | None = None
    num_draft_states: int = 0
    kind: Literal["recurrent"] = field(default="recurrent", init=False)

    __repr__ = _short_repr

    def __post_init__(self) -> None:
        _check_group(self, "checkpoint_interval")
        _check_count(self, "num_draft_states", least=0)
        if self.max_checkpoints is not None:
            _check_count(self, "max_checkpoints")
            _require(
                self.prefix_caching,
                f"max_checkpoints = {self.max_checkpoints} bounds what is cached, but prefix_caching is False",
            )

    @property
    def block_size(self) -> int:
        """Tokens that one block stands for."""
        return self.checkpoint_interval


GroupSpec: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | RecurrentState
"""The rule of a group. What differs between rules is asked by the functions below, and by others that match over them:
each answers for every rule, so that mypy names them all when a rule joins."""


def keeps_state(group: GroupSpec) -> bool:
    """Tell whether a group keeps a state for a sequence, rather than something for each of its tokens."""
    match group:
        case RecurrentState():
            return True
        case FullAttention() | SlidingWindow() | ChunkedLocal():
            return False
        case _:
            assert_never(group)


def keeps_whole_prefix(group: GroupSpec) -> bool:
    """Tell whether a group keeps what it has of every token, for as long as the sequence lives."""
    match group:
        case FullAttention():
            return True
        case SlidingWindow() | ChunkedLocal() | RecurrentState():
            return False
        case _:
            assert_never(group)


def num_sink_tokens(group: GroupSpec) -> int:
    """Count the leading tokens that a group keeps whatever else it gives up."""
    match group:
        case SlidingWindow():
            return group.num_sink_tokens
        case FullAttention() | ChunkedLocal() | RecurrentState():
            return 0
        case _:
            assert_never(group)


def replay_of(group: GroupSpec) -> Replay | None:
    """Tell how what a group has given up may be computed again; None: it may not."""
    match group:
        case SlidingWindow():
            return group.replay
        case FullAttention() | ChunkedLocal() | RecurrentState():
            return None
        case _:
            assert_never(group)


def num_draft_states(group: GroupSpec) -> int:
    """Count the states of drafts that each row may have in a group."""
    match group:
        case RecurrentState():
            return group.num_draft_states
        case FullAttention() | SlidingWindow() | ChunkedLocal():
            return 0
        case _:
            assert_never(group)


def most_checkpoints(group: GroupSpec) -> int | None:
    """Tell how many states of a group stay cached at most while nobody uses them; None: no such bound."""
    match group:
        case RecurrentState():
            return group.max_checkpoints
        case FullAttention() | SlidingWindow() | ChunkedLocal():
            return None
        case _:
            assert_never(group)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have of the device pools, and what it can count on.

    One number where there is one pool, else a mapping that names the pools. A space checks them when it is configured.

    Args:
        cap: most blocks that are charged to it at any time, in use or cached; None: no cap.
        floor: blocks that it can always take, whatever others do, and that are not evicted for others.
    """

    cap: int | Mapping[str, int | None] | None = None
    floor: int | Mapping[str, int] = 0


@dataclass(frozen=True, slots=True)
class SpaceConfig:
    """Everything a block space needs to know; checked when built.

    Args:
        groups: the model's KV-cache groups, in the order of the tables; a list becomes a tuple.
        num_blocks: blocks of each pool, the null block included; one number when there is one pool.
        num_host_blocks: blocks of the host pool of each device pool (0: no swapping).
        max_sequences: rows of the tables: sequences that can be live or swapped out at once.
        max_tokens: longest sequence, lookahead included; sets the width of the tables.
        watermark: fraction of a pool that admissions leave free for running sequences, in [0, 1).
        prefix_caching: name full blocks and share them between sequences.
        shed_windows: of what windows, chunks and states leave behind, keep cached what later prompts can hit: what lies
            before the ends of prompts and sequences, and before places where prompts were seen to branch. False keeps
            it all until it is evicted; so does a space without full attention, which would not see where prompts
            branch.
        min_partial_hit: fewest tokens for whose sake a block is copied: where a prompt leaves a cached chain inside a
            block, or ends inside one, the leading tokens of that block hit as well, if they are as many, and the plan
            copies it into the sequence's own block. 0: hits end where blocks end.
        in_order: steps are carried out one after the other on one stream, so that a block which is given back waits for
            no forward pass: whatever writes it next comes later. Without it, a block waits until the last step that
            may touch it is acknowledged.
        events: record stored/removed/cleared events.
        max_events: events a pool that wait to be drained; of more, the oldest are lost, and a gap is told.
        receipts: count what each sequence takes (:meth:`BlockSpace.receipt <pagedkv.BlockSpace.receipt>`).
        explain: remember content that is gone, so that :meth:`BlockSpace.explain <pagedkv.BlockSpace.explain>` can tell
            what was evicted from what was never there, and why each request's hit ended
            (:meth:`BlockSpace.explanation <pagedkv.BlockSpace.explanation>`).
        ghosts_per_block: where ``explain`` is set, how many blocks' content is remembered once it is gone, for each
            block of a pool; 13 bytes each.
        leases: cached content can be kept until a time, at 16 bytes a block (:meth:`BlockSpace.lease
            <pagedkv.BlockSpace.lease>`).
        tenants: by name, who shares the pools under limits; whoever allocates says for whom
            (:meth:`BlockSpace.allocate <pagedkv.BlockSpace.allocate>`). 16 bytes a block and 64 a tenant. None: nobody
            is told apart.
        eviction: name of the policy that says which cached blocks go first: one of :data:`EVICTION_POLICIES`.
        weights_epoch: version of the model's weights. Text is part of every block's identity, and has no order. A
            number is counted, and may only grow: blocks remember which epochs contributed to them, at 8 bytes a block,
            and rows can tell (:meth:`BlockSpace.set_weights_epoch <pagedkv.BlockSpace.set_weights_epoch>`).
        max_epoch_lag: how many epochs back the oldest weights may lie that contributed to a hit; more than 0 only where
            epochs are counted.
    """

    groups: abc.Sequence[GroupSpec]
    num_blocks: int | Mapping[str, int]
    num_host_blocks: int | Mapping[str, int] = 0
    max_sequences: int = 1024
    max_tokens: int = 131_072 + 1024
    watermark: float = 0.01
    prefix_caching: bool = True
    shed_windows: bool = True
    min_partial_hit: int = 0
    in_order: bool = False
    events: bool = False
    max_events: int = 65_536
    receipts: bool = False
    explain: bool = False
    ghosts_per_block: int = 4
    leases: bool = False
    tenants: Mapping[str, TenantLimits] | None = None
    eviction: str = DEFAULT_EVICTION
    weights_epoch: str | int = ""
    max_epoch_lag: int = 0

    __repr__ = _short_repr

    def __post_init__(self) -> None:
        if isinstance(self.groups, list):
            object.__setattr__(self, "groups", tuple(self.groups))
        is_groups = isinstance(self.groups, tuple) and all(isinstance(group, GroupSpec) for group in self.groups)
        _require(
            is_groups and len(self.groups) >= 1, f"groups must be a tuple or list of group rules, got {self.groups!r}"
        )
        _check_count(self, "max_sequences")
        _check_count(self, "max_tokens")
        _check_count(self, "max_events")
        _check_count(self, "ghosts_per_block")
        _check_count(self, "min_partial_hit", least=0)
        for name in ("prefix_caching", "shed_windows", "in_order", "events", "receipts", "explain", "leases"):
            _check_flag(self, name)
        _require(
            not self.prefix_caching or any(group.prefix_caching for group in self.groups),
            "every group stays out of prefix caching: leave one in, or set prefix_caching=False for the space",
        )
        as_fraction(self.watermark, "watermark")
        self._check_epochs()
        as_choice(self.eviction, EVICTION_POLICIES, "eviction policy")
        for name, blocks in self.blocks_by_pool().items():
            _require(
                blocks >= FEWEST_BLOCKS, f"pool {name!r} needs at least 2 blocks (one is the null block), got {blocks}"
            )
        for name, blocks in self.host_blocks_by_pool().items():
            _require(
                blocks == 0 or blocks >= FEWEST_BLOCKS,
                f"the host pool of {name!r} needs 0 blocks or at least 2, got {blocks}",
            )
        self._check_tenants()
        self._check_replays()

    def _check_replays(self) -> None:
        replaying = [group for group in self.groups if replay_of(group)]
        if not replaying:
            return
        _require(self.prefix_caching, f"{replaying[0]!r} brings back what hits lack, but prefix_caching is False")
        inside = [group for group in self.groups if group.prefix_caching and group not in replaying]
        for group in inside:
            _require(
                keeps_whole_prefix(group),
                f"{group!r} cannot be replayed with {replaying[0]!r}: the tokens go through all layers, so each group "
                "with prefix caching is full attention, or a window with a replay",
            )
        _require(
            bool(inside), f"{replaying[0]!r} is replayed where full attention has a prompt cached: no group is such"
        )

    def _check_tenants(self) -> None:
        tenants = {} if self.tenants is None else self.tenants
        is_limits = isinstance(tenants, Mapping) and all(
            isinstance(name, str) and name and isinstance(limits, TenantLimits) for name, limits in tenants.items()
        )
        _require(is_limits, f"tenants must map names to TenantLimits, got {tenants!r}")
        num_blocks = self.blocks_by_pool()
        for pool, limits in self.limits_by_pool().items():
            num_usable = num_blocks[pool] - 1
            for tenant, (cap, floor) in zip(tenants, limits[1:], strict=True):
                where = f"tenant {tenant!r} in pool {pool!r}"
                _require(cap >= 1, f"the cap of {where} must be at least 1 block, got {cap}")
                _require(cap <= num_usable, f"the cap of {where} is {cap} blocks, but the pool has {num_usable}")
                _require(0 <= floor <= cap, f"the floor of {where} must be at least 0 and at most {cap}, got {floor}")
            promised = sum(floor for _, floor in limits)
            _require(
                promised <= num_usable,
                f"the floors of the tenants in pool {pool!r} add up to {promised} blocks, but it has {num_usable}",
            )

    def _check_epochs(self) -> None:
        _check_count(self, "max_epoch_lag", least=0)
        if isinstance(self.weights_epoch, str):
            _require(
                self.max_epoch_lag == 0,
                f"max_epoch_lag = {self.max_epoch_lag} needs epochs that are counted: weights_epoch must be a number, "
                f"the first one, got {self.weights_epoch!r}",
            )
        else:
            object.__setattr__(self, "weights_epoch", as_epoch(self.weights_epoch))

    @property
    def replaying(self) -> tuple[int, ...]:
        """Groups whose windows can be computed again."""
        return tuple(index for index, group in enumerate(self.groups) if replay_of(group))

    @property
    def drafting(self) -> tuple[int, ...]:
        """Groups that keep draft states, and have a second table for them."""
        return tuple(index for index, group in enumerate(self.groups) if num_draft_states(group))

    @property
    def own_starts(self) -> tuple[int, ...]:
        """Groups in which plans may begin ranges elsewhere: those outside prefix caching, and those replayed."""
        outside = [index for index, group in enumerate(self.groups) if self.prefix_caching and not group.prefix_caching]
        return tuple(sorted({*outside, *self.replaying}))

    @property
    def counts_epochs(self) -> bool:
        """Whether epochs of the weights are numbers, which blocks remember."""
        return not isinstance(self.weights_epoch, str)

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Names of the pools, in the order in which groups mention them."""
        return tuple(dict.fromkeys(group.pool for group in self.groups))

    def blocks_by_pool(self) -> dict[str, int]:
        """Number of device blocks of each pool, the null block included."""
        return self._by_pool(self.num_blocks, "num_blocks")

    def host_blocks_by_pool(self) -> dict[str, int]:
        """Number of host blocks of each pool; 0 where that pool cannot swap."""
        return self._by_pool(self.num_host_blocks, "num_host_blocks")

    def limits_by_pool(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Cap and floor of each tenant in each device pool, of whoever names none first; no cap is all of the pool."""
        num_usable = {pool: num_blocks - 1 for pool, num_blocks in self.blocks_by_pool().items()}
        limits = {pool: [(count, 0)] for pool, count in num_usable.items()}
        for tenant, given in (self.tenants or {}).items():
            wanted: int | Mapping[str, int] = num_usable
            if isinstance(given.cap, Mapping):
                wanted = {pool: num_usable.get(pool, 0) if cap is None else cap for pool, cap in given.cap.items()}
            elif given.cap is not None:
                wanted = given.cap
            caps = self._by_pool(wanted, f"the cap of tenant {tenant!r}")
            floors = self._by_pool(given.floor, f"the floor of tenant {tenant!r}")
            for pool, own in limits.items():
                own.append((caps[pool], floors[pool]))
        return {pool: tuple(own) for pool, own in limits.items()}

    def _by_pool(self, given: int | Mapping[str, int], what: str) -> dict[str, int]:
        names = self.pool_names
        if isinstance(given, Mapping):
            unknown = sorted(set(given) - set(names), key=repr)
            missing = sorted(set(names) - set(given))
            _require(
                not unknown and not missing,
                f"{what} must name the pools {list(names)}: missing {missing}, unknown {unknown}",
            )
            return {name: as_count(given[name], f"{what} of pool {name!r}", least=NO_LIMIT) for name in names}
        number = as_count(given, what, least=NO_LIMIT)
        _require(
            number == 0 or len(names) == 1,
            f"{what} is one number ({number}) but the groups draw from the pools {list(names)}: give a mapping",
        )
        return dict.fromkeys(names, number)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence as the classic block managers see it: an id and its tokens so far.

    The engine appends to ``token_ids``; the manager reads what it has not seen yet.
    """

    seq_id: int
    token_ids: list[int]


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """Sequences that share one prompt: parallel samples or beams of one request.

    Args:
        request_id: for messages only.
        seqs: the live sequences of the group.
    """

    request_id: str
    seqs: list[Sequence]
