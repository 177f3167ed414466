"""Group mixes under test: what is combined, in spaces so small that shortages and collisions are common."""

import math
from dataclasses import dataclass, field, replace

from pagedkv import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    Replay,
    SlidingWindow,
    SpaceConfig,
    TenantLimits,
)
from tests.compiling import TESTED_POLICIES

__all__ = ["MIXES", "Mix", "limits_of"]


@dataclass(frozen=True, slots=True)
class Mix:
    """One kind of model.

    Args:
        name: what is combined.
        groups: its groups.
        num_blocks: for each pool, the sizes to choose from, null block included.
        num_host_blocks: for each pool with a host pool, the size of that.
        watermark, caching, events: as in ``SpaceConfig``.
        tenants: cap and floor of each tenant, in tenths of every pool.
        expected: things that a long run must have met at least once.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    num_blocks: dict[str, tuple[int, ...]]
    num_host_blocks: dict[str, int] = field(default_factory=dict)
    watermark: float = 0.0
    caching: bool = True
    events: bool = False
    tenants: dict[str, tuple[int, int]] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Name the mix, for test ids."""
        return self.name

    @property
    def takes_digests(self) -> bool:
        """Whether callers may bring digests: all groups full attention of one block size."""
        sizes = {group.block_size for group in self.groups if group.prefix_caching}
        return self.has_whole_prefixes and len(sizes) == 1

    @property
    def has_whole_prefixes(self) -> bool:
        """Whether each group inside prefix caching keeps whole prefixes."""
        return all(isinstance(group, FullAttention) for group in self.groups if group.prefix_caching)

    @property
    def takes_drafts(self) -> bool:
        """Whether drafts may be appended: no group is a state, or each keeps states of drafts."""
        states = [group for group in self.groups if isinstance(group, RecurrentState)]
        return all(group.num_draft_states for group in states)

    @property
    def num_draft_states(self) -> int:
        """Most tokens of a sequence that may be open: 0 where states take none, or there are none."""
        return min((group.num_draft_states for group in self.groups if isinstance(group, RecurrentState)), default=0)

    @property
    def keeps_states(self) -> bool:
        """Whether states are kept for prefixes to hit."""
        return self.caching and any(isinstance(group, RecurrentState) and group.prefix_caching for group in self.groups)

    @property
    def replays(self) -> bool:
        """Whether windows that are gone can be computed again."""
        return any(isinstance(group, SlidingWindow) and group.replay is not None for group in self.groups)

    @property
    def finds_all_it_holds(self) -> bool:
        """Whether every full block of a sequence can be found: only where nothing but full attention is cached."""
        return self.caching and self.has_whole_prefixes

    @property
    def roomy(self) -> "Mix":
        """The same groups, in pools where little is ever short."""
        return replace(
            self,
            num_blocks={pool: (max(sizes) + EXTRA_BLOCKS,) for pool, sizes in self.num_blocks.items()},
            num_host_blocks={pool: size + EXTRA_BLOCKS for pool, size in self.num_host_blocks.items()},
        )

    def tenant(self, number: int) -> str | None:
        """One of the tenants, or none."""
        names = (None, *self.tenants)
        return names[number % len(names)]

    def config(self, size: int) -> SpaceConfig:
        """Configure a space of one of six sizes.

        Each has a policy of its own; half run in order, and the others keep leases; half count epochs of the weights,
        in half of them hits may end inside blocks, in half windows are kept at intervals, and most keep receipts, or
        have records of evicted content: some many, some few.
        """
        num_blocks = {pool: sizes[size % len(sizes)] for pool, sizes in self.num_blocks.items()}
        return SpaceConfig(
            self.groups,
            num_blocks=num_blocks,
            num_host_blocks={pool: self.num_host_blocks.get(pool, 0) for pool in num_blocks},
            max_sequences=6,
            max_tokens=40,
            watermark=self.watermark,
            prefix_caching=self.caching,
            retention_interval=(0, 0, 1, 2, 0, 1)[size] * math.lcm(*(each.block_size for each in self.groups)),
            min_partial_hit=(0, 1, 0, 1, 2, 0)[size],
            in_order=size % 2 == 1,
            events=self.events,
            receipts=size % 3 > 0,
            explain=size % 3 < 2,
            ghosts_per_block=8 if size < len(EVICTION) // 2 else 1,
            eviction=EVICTION[size],
            leases=self.caching and size % 2 == 0,
            tenants={name: limits_of(tenths, num_blocks) for name, tenths in self.tenants.items()} or None,
            weights_epoch=0 if size in EPOCH_LAGS else "",
            max_epoch_lag=EPOCH_LAGS.get(size, 0),
        )


def limits_of(tenths: tuple[int, int], num_blocks: dict[str, int]) -> TenantLimits:
    """Cap and floor of a tenant in pools of so many blocks."""
    cap, floor = tenths
    return TenantLimits(
        cap={pool: max(1, cap * (count - 1) // 10) for pool, count in num_blocks.items()},
        floor={pool: floor * (count - 1) // 10 for pool, count in num_blocks.items()},
    )


EVICTION = tuple(
    name if name in TESTED_POLICIES else "lru" for name in ("hazard", "lru", "adaptive", "priority", "fifo", "tlru")
)
EPOCH_LAGS = {1: 1, 2: 2, 4: 0}
EXTRA_BLOCKS = 40
ALWAYS = frozenset({"shortage", "copy on write", "fork", "abort", "lost", "several steps in flight", "truncate"})
CACHED = ALWAYS | {"hit", "eviction"}
SWAPPING = frozenset({"swap out", "swap in"})
KEEPING = frozenset({"chunk to a checkpoint", "kept state hit", "state kept inside"})
SHARING = frozenset({"recharged", "at its cap", "tenant's shortage", "new limits", "new tenant", "tenant removed"})
INSIDE = frozenset({"partial hit"})  # with states none: in these mixes they are kept where blocks end

MIXES = (
    Mix(
        "full",
        (FullAttention(2),),
        {"device": (14, 30, 40)},
        {"device": 16},
        watermark=0.1,
        expected=CACHED | {"older weights hit"} | SWAPPING | INSIDE | {"merge", "other drafts"},
    ),
    Mix(
        "window with sinks",
        (SlidingWindow(window=5, block_size=2, num_sink_tokens=3),),
        {"device": (14, 30)},
        events=True,
        expected=CACHED | INSIDE | {"slide", "merge"},
    ),
    Mix(
        "full and window in one pool",
        (FullAttention(3), SlidingWindow(window=4, block_size=2)),
        {"device": (16, 40)},
        {"device": 12},
        expected=CACHED | SWAPPING | INSIDE | {"slide"},
    ),
    Mix(
        "chunk and full",
        (ChunkedLocal(chunk_size=6, block_size=2), FullAttention(4), ChunkedLocal(chunk_size=3, block_size=4)),
        {"device": (20, 40)},
        expected=CACHED | INSIDE | {"slide"},
    ),
    Mix(
        "state and full",
        (RecurrentState(4), FullAttention(2)),
        {"state": (8, 16), "device": (16, 40)},
        watermark=0.2,
        expected=CACHED | KEEPING | {"slide"},
    ),
    Mix(
        "state",
        (RecurrentState(3),),
        {"state": (6, 12, 20)},
        {"state": 10},
        events=True,
        expected=CACHED | SWAPPING | KEEPING | {"slide"},
    ),
    Mix(
        "all rules, swapping",
        (
            FullAttention(2),
            SlidingWindow(window=5, block_size=1, num_sink_tokens=2),
            ChunkedLocal(chunk_size=4, block_size=4),
            RecurrentState(8, max_checkpoints=2),
        ),
        {"device": (40, 60), "state": (6, 12)},
        {"device": 30, "state": 6},
        events=True,
        expected=CACHED | SWAPPING | KEEPING | {"slide"},
    ),
    Mix(
        "drafts of states",
        (RecurrentState(4, num_draft_states=6), FullAttention(2), SlidingWindow(window=5, block_size=2)),
        {"state": (12, 24), "device": (30, 60)},
        {"state": 8, "device": 20},
        expected=CACHED | SWAPPING | {"slide", "draft state", "other drafts"},
    ),
    Mix(
        "full, others outside",
        (
            SlidingWindow(window=5, block_size=2, num_sink_tokens=1, prefix_caching=False),
            FullAttention(3),
            FullAttention(4, prefix_caching=False),
        ),
        {"device": (24, 60)},
        {"device": 20},
        expected=CACHED | SWAPPING | {"slide"},
    ),
    Mix(
        "window, a state outside",
        (RecurrentState(4, prefix_caching=False), SlidingWindow(window=5, block_size=2), ChunkedLocal(6, 2)),
        {"state": (4, 8), "device": (20, 40)},
        {"state": 5, "device": 14},
        watermark=0.1,
        expected=CACHED | SWAPPING | {"slide"},
    ),
    Mix(
        "without caching",
        (FullAttention(3), SlidingWindow(window=4, block_size=2, num_sink_tokens=1), RecurrentState(4)),
        {"device": (16, 40), "state": (4, 7)},
        {"device": 14, "state": 4},
        caching=False,
        expected=ALWAYS | SWAPPING | {"slide"},
    ),
    Mix(
        "windows, replayed",
        (
            FullAttention(4),
            SlidingWindow(window=3, block_size=2, pool="windows", replay=Replay(4, 2)),
            SlidingWindow(window=4, block_size=1, num_sink_tokens=1, pool="windows", replay=Replay(6, 2)),
        ),
        {"device": (24, 50), "windows": (40, 60, 80)},
        {"device": 24, "windows": 60},
        expected=CACHED | SWAPPING | {"slide", "replay"},
    ),
    Mix(
        "window, replayed nearly",
        (FullAttention(2), SlidingWindow(window=4, block_size=2, pool="windows", replay=Replay(3, 3))),
        {"device": (24, 40), "windows": (12, 20)},
        {"device": 16, "windows": 10},
        expected=CACHED | SWAPPING | {"slide", "approximate replay"},
    ),
    Mix(
        "full, tenants",
        (FullAttention(2),),
        {"device": (20, 30, 40)},
        {"device": 16},
        watermark=0.1,
        events=True,
        tenants={"a": (5, 1), "b": (8, 3)},
        expected=CACHED | SWAPPING | INSIDE | SHARING,
    ),
    Mix(
        "window and state, tenants",
        (
            FullAttention(2),
            SlidingWindow(window=4, block_size=2),
            RecurrentState(4, num_draft_states=4, max_checkpoints=3),
        ),
        {"device": (30, 50), "state": (8, 16)},
        {"device": 24, "state": 6},
        tenants={"a": (7, 0), "b": (9, 3)},
        expected=CACHED | SWAPPING | KEEPING | SHARING | {"slide"},
    ),
)
