"""The configuration of a space: its groups, its pools, and what it records.

The split of memory among the pools, from bytes to blocks; replays and devices are both sized by it.

Memory is split so that every pool has room for equally many sequences, running or cached, of the mean length of the
requests. Full attention keeps blocks for all tokens of a sequence. A window or chunk keeps the last one, which is all
that a cached prefix needs in order to hit (docs/decisions/0015). A recurrent group keeps the current state, the state
at the prompt's end, and those at intervals. Windows also have room for the tokens that one step computes before the
window slides.
"""

import math
from collections import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from pagedkv.contract.arguments import (
    as_choice,
    as_count,
    as_epoch,
    as_fraction,
    check_count,
    check_flag,
    require,
    short_repr,
)
from pagedkv.contract.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    is_cross,
    keeps_state,
    keeps_whole_prefix,
    most_checkpoints,
    num_ahead,
    num_draft_states,
    replay_of,
)
from pagedkv.errors import ConfigurationError

EVICTION_POLICIES: Final = ("lru", "adaptive", "fifo", "hazard", "priority", "tlru")
"""Names of the eviction policies, in the order of :mod:`pagedkv.blocks.eviction.registry`."""
DEFAULT_EVICTION: Final = "lru"
"""The policy if none is named, in a space, an engine and a simulation alike."""
LARGEST_PRIORITY: Final = 127
"""The largest number, and the negative of the smallest, by which the eviction policy ``priority`` orders content."""
FEWEST_BLOCKS: Final = 2  # the null block, and one more
NO_LIMIT: Final = -(2**31)  # negative numbers are refused with a message of their own


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The most blocks of the device pools that one tenant may have, and the blocks guaranteed to it.

    Each is one number where there is one pool, else a mapping that names the pools. A space checks both when it is
    configured.

    Args:
        cap: most blocks, in use or cached, that are charged to it at any time; None: no cap.
        floor: blocks that it can always allocate, and that are never evicted for other tenants.
    """

    cap: int | Mapping[str, int | None] | None = None
    floor: int | Mapping[str, int] = 0


def require_tenants(tenants: object) -> None:
    """Raise ConfigurationError for anything but limits by tenant name, or None."""
    is_limits = tenants is None or (
        isinstance(tenants, Mapping)
        and all(isinstance(name, str) and name and isinstance(limits, TenantLimits) for name, limits in tenants.items())
    )
    require(is_limits, f"tenants must map names to TenantLimits, got {tenants!r}")


@dataclass(frozen=True, slots=True)
class SpaceConfig:
    """The settings of a block space; checked when built.

    Args:
        groups: the model's KV-cache groups, in the order of the tables, those of cross-attention last; a list becomes a
            tuple.
        num_blocks: blocks of each pool, the null block included; one number if there is one pool.
        num_host_blocks: blocks of the host pool of each device pool (0: no swapping).
        max_sequences: rows of the tables: sequences that can be live or swapped out at once.
        max_tokens: longest sequence, lookahead included; sets the width of the tables.
        watermark: fraction of a pool that admissions leave free for running sequences, in [0, 1).
        prefix_caching: name full blocks and share them between sequences.
        shed_windows: of the blocks that windows, chunks and states leave behind, keep cached only those that later
            prompts can hit: those before the ends of prompts and sequences, and before places where prompts were seen
            to branch. False keeps all of them until they are evicted. So does a space without full attention, since
            only full attention shows where prompts branch.
        retention_interval: tokens between the places at which windows, chunks and states stay cached besides. At each
            multiple that a sequence has passed, what a hit there needs is kept until it is evicted, so that the first
            prompt that leaves the sequence's tokens hits there too. It costs a window of blocks, or a state, each. A
            multiple of the block sizes of all groups with prefix caching. 0: none. No effect where nothing is shed.
        min_partial_hit: fewest tokens for which a block is copied. Where a prompt leaves a cached chain or ends inside
            a block, the leading tokens of that block hit as well if there are at least so many, and the plan copies the
            block into the sequence's own block. 0: hits end at block boundaries.
        in_order: steps run one after the other on one stream, so a freed block can be allocated at once: whatever
            writes it next runs later. If False, a freed block waits until the last step that may read or write it is
            acknowledged.
        events: record stored/removed/cleared events, and the digest of the block before each block, 32 bytes a block.
        max_events: events per pool kept until drained; beyond that the oldest are dropped, and a GAP event is
            recorded.
        receipts: count what each sequence uses (:meth:`BlockSpace.receipt <pagedkv.BlockSpace.receipt>`).
        explain: remember lost content, so that :meth:`BlockSpace.explain <pagedkv.BlockSpace.explain>` can distinguish
            evicted content from content that was never stored, and record why each request's hit ended
            (:meth:`BlockSpace.explanation <pagedkv.BlockSpace.explanation>`).
        ghosts_per_block: where ``explain`` is set, ghosts of lost blocks that are kept for each block of a pool; 13
            bytes each.
        leases: cached content can be kept until a given time, at 16 bytes a block (:meth:`BlockSpace.lease
            <pagedkv.BlockSpace.lease>`).
        tenants: limits by tenant name. Callers name the tenant when they allocate (:meth:`BlockSpace.allocate
            <pagedkv.BlockSpace.allocate>`). 16 bytes a block and 64 a tenant. They may come and go later
            (:meth:`BlockSpace.set_tenant <pagedkv.BlockSpace.set_tenant>`); {}: none yet. None: tenants are not
            distinguished.
        eviction: name of the policy that chooses which cached blocks are evicted first: one of
            :data:`EVICTION_POLICIES`.
        tail_tokens: with ``eviction="tlru"``, the last tokens of each sequence that are evicted before all else, in
            whole blocks: what a next turn may compute within the limit of its time to the first token, less what it
            adds itself.
        weights_epoch: version of the model's weights. A text is part of every block's identity, and has no order. A
            number may only grow: blocks remember the epochs that contributed to them, at 8 bytes a block, and each row
            reports them (:meth:`BlockSpace.set_weights_epoch <pagedkv.BlockSpace.set_weights_epoch>`).
        max_epoch_lag: the most epochs by which the oldest weights that contributed to a hit may be behind; more than 0
            only where ``weights_epoch`` is a number.
    """

    groups: abc.Sequence[GroupSpec]
    num_blocks: int | Mapping[str, int]
    num_host_blocks: int | Mapping[str, int] = 0
    max_sequences: int = 1024
    max_tokens: int = 131_072 + 1024
    watermark: float = 0.01
    prefix_caching: bool = True
    shed_windows: bool = True
    retention_interval: int = 0
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
    tail_tokens: int = 2048
    weights_epoch: str | int = ""
    max_epoch_lag: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if isinstance(self.groups, list):
            object.__setattr__(self, "groups", tuple(self.groups))
        is_groups = isinstance(self.groups, tuple) and all(isinstance(group, GroupSpec) for group in self.groups)
        require(
            is_groups and len(self.groups) >= 1, f"groups must be a tuple or list of group rules, got {self.groups!r}"
        )
        self._check_crossing()
        check_count(self, "max_sequences")
        check_count(self, "max_tokens")
        check_count(self, "max_events")
        check_count(self, "ghosts_per_block")
        check_count(self, "min_partial_hit", least=0)
        check_count(self, "retention_interval", least=0)
        check_count(self, "tail_tokens", least=0)
        for name in ("prefix_caching", "shed_windows", "in_order", "events", "receipts", "explain", "leases"):
            check_flag(self, name)
        require(
            not self.prefix_caching or any(group.prefix_caching for group in self.groups),
            "every group stays out of prefix caching: leave one in, or set prefix_caching=False for the space",
        )
        as_fraction(self.watermark, "watermark")
        self._check_epochs()
        as_choice(self.eviction, EVICTION_POLICIES, "eviction policy")
        for name, blocks in self.blocks_by_pool().items():
            require(
                blocks >= FEWEST_BLOCKS, f"pool {name!r} needs at least 2 blocks (one is the null block), got {blocks}"
            )
        for name, blocks in self.host_blocks_by_pool().items():
            require(
                blocks == 0 or blocks >= FEWEST_BLOCKS,
                f"the host pool of {name!r} needs 0 blocks or at least 2, got {blocks}",
            )
        self._check_retention()
        self._check_tenants()
        self._check_replays()
        self._check_ahead()

    def _check_retention(self) -> None:
        """Refuse an interval at which no hit of all groups could end."""
        alignment = math.lcm(*(group.block_size for group in self.groups if group.prefix_caching))
        require(
            self.retention_interval % alignment == 0,
            f"retention_interval = {self.retention_interval} is no multiple of {alignment}: hits of all groups end at "
            "multiples of their block sizes",
        )

    def _check_crossing(self) -> None:
        num_own = len(self.groups) - len(self.crossing)
        require(
            self.crossing == tuple(range(max(1, num_own), len(self.groups))),
            f"{self.groups[self.crossing[0] if self.crossing else 0]!r} keeps nothing of the sequence itself: put "
            "groups of cross-attention after all others, of which there must be one",
        )

    def _check_ahead(self) -> None:
        """Refuse what is not served beside a group whose names cover tokens ahead."""
        covering = next((group for group in self.groups if num_ahead(group)), None)
        if covering is None:
            return
        states = [group for group in self.groups if keeps_state(group) and group.prefix_caching]
        for is_set, what in (
            (bool(states) and self.prefix_caching, "a recurrent state: give it prefix_caching=False"),
            (bool(self.replaying), "a window with a replay: leave replay out"),
            (self.min_partial_hit > 0, "hits inside blocks: set min_partial_hit=0"),
            (self.events, "events, whose readers know no such names: set events=False"),
            (self.explain, "explanations, which compare names of whole blocks: set explain=False"),
        ):
            require(not is_set, f"{covering!r} has names that cover tokens ahead, which is not served beside {what}")

    def _check_replays(self) -> None:
        replaying = [group for group in self.groups if replay_of(group)]
        if not replaying:
            return
        require(self.prefix_caching, f"{replaying[0]!r} brings back what hits lack, but prefix_caching is False")
        inside = [group for group in self.groups if group.prefix_caching and group not in replaying]
        for group in inside:
            require(
                keeps_whole_prefix(group),
                f"{group!r} cannot be replayed with {replaying[0]!r}: the tokens go through all layers, so each group "
                "with prefix caching is full attention, or a window with a replay",
            )
        require(
            bool(inside), f"{replaying[0]!r} is replayed where full attention has a prompt cached: no group is such"
        )

    def _check_tenants(self) -> None:
        tenants = {} if self.tenants is None else self.tenants
        require_tenants(tenants)
        promised = dict.fromkeys(self.pool_names, 0)
        for tenant, given in tenants.items():
            for pool, (_, floor) in self.limits_of(tenant, given).items():
                promised[pool] += floor
        self.require_floors(promised)

    def require_floors(self, promised: Mapping[str, int]) -> None:
        """Raise ConfigurationError if the floors of all tenants, added up by pool, exceed a pool."""
        for pool, num_blocks in self.blocks_by_pool().items():
            require(
                promised[pool] <= num_blocks - 1,
                f"the floors of the tenants in pool {pool!r} add up to {promised[pool]} blocks, but it has "
                f"{num_blocks - 1}",
            )

    def _check_epochs(self) -> None:
        check_count(self, "max_epoch_lag", least=0)
        if isinstance(self.weights_epoch, str):
            require(
                self.max_epoch_lag == 0,
                f"max_epoch_lag = {self.max_epoch_lag} needs epochs that are counted: weights_epoch must be a number, "
                f"the first one, got {self.weights_epoch!r}",
            )
        else:
            object.__setattr__(self, "weights_epoch", as_epoch(self.weights_epoch))

    @property
    def replaying(self) -> tuple[int, ...]:
        """Groups with windows that can be computed again."""
        return tuple(index for index, group in enumerate(self.groups) if replay_of(group))

    @property
    def drafting(self) -> tuple[int, ...]:
        """Groups that keep draft states, and have a second table for them."""
        return tuple(index for index, group in enumerate(self.groups) if num_draft_states(group))

    @property
    def crossing(self) -> tuple[int, ...]:
        """Groups of cross-attention: the last ones."""
        return tuple(index for index, group in enumerate(self.groups) if is_cross(group))

    @property
    def own_starts(self) -> tuple[int, ...]:
        """Groups where plans may begin ranges at other positions.

        Those outside prefix caching, those with replays, and those of cross-attention, whose positions are others.
        """
        outside = [index for index, group in enumerate(self.groups) if self.prefix_caching and not group.prefix_caching]
        return tuple(sorted({*outside, *self.replaying, *self.crossing}))

    @property
    def has_features(self) -> bool:
        """Whether pools need optional code: any recording or limit beyond names, or a policy other than LRU."""
        partial = self.prefix_caching and self.min_partial_hit > 0
        bounded = self.prefix_caching and any(most_checkpoints(spec) is not None for spec in self.groups)
        has_tenants = self.tenants is not None
        features = (self.explain, self.counts_epochs, self.leases, partial, bounded, has_tenants, self.events)
        return self.eviction != DEFAULT_EVICTION or any(features)

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
        """Cap and floor of each tenant in each device pool, the unnamed tenant first; no cap means all of the pool."""
        by_tenant = [self.limits_of(tenant, given) for tenant, given in (self.tenants or {}).items()]
        return {
            pool: ((num_blocks - 1, 0), *(limits[pool] for limits in by_tenant))
            for pool, num_blocks in self.blocks_by_pool().items()
        }

    def limits_of(self, tenant: str, given: TenantLimits) -> dict[str, tuple[int, int]]:
        """Cap and floor of one tenant in each device pool; no cap means all of the pool. O(pools).

        Raises:
            ConfigurationError: limits that a pool cannot keep, whatever the other tenants have.
        """
        num_usable = {pool: num_blocks - 1 for pool, num_blocks in self.blocks_by_pool().items()}
        wanted: int | Mapping[str, int] = num_usable
        if isinstance(given.cap, Mapping):
            wanted = {pool: num_usable.get(pool, 0) if cap is None else cap for pool, cap in given.cap.items()}
        elif given.cap is not None:
            wanted = given.cap
        caps = self._by_pool(wanted, f"the cap of tenant {tenant!r}")
        floors = self._by_pool(given.floor, f"the floor of tenant {tenant!r}")
        for pool, usable in num_usable.items():
            cap, floor, where = caps[pool], floors[pool], f"tenant {tenant!r} in pool {pool!r}"
            require(cap >= 1, f"the cap of {where} must be at least 1 block, got {cap}")
            require(cap <= usable, f"the cap of {where} is {cap} blocks, but the pool has {usable}")
            require(0 <= floor <= cap, f"the floor of {where} must be at least 0 and at most {cap}, got {floor}")
        return {pool: (caps[pool], floors[pool]) for pool in num_usable}

    def _by_pool(self, given: int | Mapping[str, int], what: str) -> dict[str, int]:
        names = self.pool_names
        if isinstance(given, Mapping):
            unknown = sorted(set(given) - set(names), key=repr)
            missing = sorted(set(names) - set(given))
            require(
                not unknown and not missing,
                f"{what} must name the pools {list(names)}: missing {missing}, unknown {unknown}",
            )
            return {name: as_count(given[name], f"{what} of pool {name!r}", least=NO_LIMIT) for name in names}
        number = as_count(given, what, least=NO_LIMIT)
        require(
            number == 0 or len(names) == 1,
            f"{what} is one number ({number}) but the groups draw from the pools {list(names)}: give a mapping",
        )
        return dict.fromkeys(names, number)


GIB: Final = 2**30
"""Bytes of a GiB."""
SPARE_BLOCKS: Final = 2
"""A window overlaps one block more than it fills, and the next token may need another."""
STATES_BESIDE_INTERVALS: Final = 2
"""The current state, and the state at the prompt's end."""
MOST_OF_MEMORY: Final = 0.5
"""Largest share of all memory that windows may reserve for the tokens of a step."""


def blocks_that_fit(
    groups: Sequence[GroupSpec], block_nbytes: Mapping[str, int], nbytes: float, mean_tokens: float, step_tokens: int
) -> dict[str, int]:
    """Split memory among the pools.

    Args:
        groups: the groups, each in a pool of its own.
        block_nbytes: bytes of a block of each pool.
        nbytes: bytes of all pools together.
        mean_tokens: mean tokens of a request, prompt and output.
        step_tokens: most tokens that a step computes, or that are admitted at once.

    Returns:
        blocks of each pool, the null block included.

    Raises:
        ConfigurationError: a pool would have no block besides the null block.
    """
    token_nbytes = {group.pool: block_nbytes[group.pool] / group.block_size for group in groups}
    kept_nbytes = {group.pool: _kept_tokens(group, mean_tokens) * token_nbytes[group.pool] for group in groups}
    passing_nbytes = {
        group.pool: (step_tokens + group.block_size) * token_nbytes[group.pool] * _is_window(group) for group in groups
    }
    fits = min(1.0, MOST_OF_MEMORY * nbytes / (sum(passing_nbytes.values()) or 1))
    num_sequences = (nbytes - fits * sum(passing_nbytes.values())) / sum(kept_nbytes.values())
    num_blocks = {
        pool: int((num_sequences * kept_nbytes[pool] + fits * passing_nbytes[pool]) // block_nbytes[pool])
        for pool in kept_nbytes
    }
    if len(num_blocks) == 1:
        num_blocks = {pool: int(nbytes // block_nbytes[pool]) for pool in num_blocks}
    scarce = min(num_blocks, key=lambda pool: num_blocks[pool])
    if num_blocks[scarce] < FEWEST_BLOCKS:
        raise ConfigurationError(
            f"{nbytes / GIB:,.2f} GiB leave {num_blocks[scarce]} blocks of {block_nbytes[scarce]:,} bytes for pool "
            f"{scarce!r}, and one is the null block: give more memory, or smaller blocks"
        )
    return num_blocks


def _is_window(group: GroupSpec) -> bool:
    match group:
        case SlidingWindow() | ChunkedLocal():
            return True
        case FullAttention() | CrossAttention() | RecurrentState():
            return False
        case _:
            assert_never(group)


def _kept_tokens(group: GroupSpec, mean_tokens: float) -> float:
    """Count the tokens for which a sequence keeps blocks in a group, running or cached for a later prompt."""
    whole = max(1.0, mean_tokens)
    match group:
        case FullAttention():
            return whole
        case SlidingWindow():
            return min(whole, group.window + group.num_sink_tokens) + SPARE_BLOCKS * group.block_size
        case ChunkedLocal():
            return min(whole, group.chunk_size) + SPARE_BLOCKS * group.block_size
        case CrossAttention():
            return group.max_encoder_tokens
        case RecurrentState():
            return whole + (STATES_BESIDE_INTERVALS + group.num_draft_states) * group.block_size
        case _:
            assert_never(group)
