"""The configuration of a replay on a virtual clock: the pools, the limits of a step, the rules of scheduling."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pagedkv.blocks import policy_named
from pagedkv.contract.arguments import LARGEST_SIZE, as_count, as_number, require
from pagedkv.contract.space_config import DEFAULT_EVICTION, SpaceConfig, TenantLimits
from pagedkv.contract.spec import FullAttention, GroupSpec, keeps_state
from pagedkv.scheduling import PreemptionKind, SchedulingConfig
from pagedkv.simulation.tiers import TOKEN_NBYTES, SimulatedTier, require_distinct

LONGEST_SEQUENCE: Final = 2**25
"""Tokens of a longest prompt and a longest output, as trace readers accept them."""
LEAST_EVENTS: Final = 65_536
LARGEST_SEED: Final = 2**63 - 1
MOST_NBYTES: Final = 2**63 - 1
GHOSTS_A_BLOCK: Final = 8  # misses of older ghosts count as unknown
EVENTS_A_BLOCK: Final = 4  # one operation names and unnames each block fewer times; then events are read


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """One way to serve a trace.

    Args:
        num_blocks: blocks of each pool, including the null block; a single number applies to each pool.
        block_size: tokens of a block of the only group, one of full attention, unless ``groups`` are given.
        groups: the model's KV-cache groups, each in a pool of its own; ``block_size`` must then be theirs.
        block_nbytes: bytes of a block of each pool, where they are known.
        model: name of the model, for the record.
        cost_model_name: name of the cost model, for the record.
        num_host_blocks: blocks of the host pool of each pool, including the null block; 0: no host pool.
        max_sequences: sequences that run at once; samples and beams count one by one.
        max_batched_tokens: tokens that a step computes, including decoded ones.
        watermark: fraction of a pool that admissions leave free.
        eviction: name of the eviction policy; tail_tokens: with "tlru", the last tokens of each sequence, which go
            first.
        preemption: treatment of a preempted request.
        num_samples: samples of every request; None: as in the trace.
        beam_width: beams of every request; None: no beam search.
        load: multiple of the recorded traffic: seconds of the trace that pass in one second of the replay.
        seed: determines all random values (the parents of beams).
        tenants: caps and floors by tenant name. Requests of these tenants are charged to them, all others to the
            unnamed tenant. None: tenants are not distinguished.
        overlap: whether each step is scheduled while the previous one runs, with tokens that are not known yet. Beams
            skip every second step. Seconds of a step stay those of the cost model.
        tiers: tiers below the device, the fastest first; those of no size are left out.
        max_length: tokens of a reservation of the maximum length; None: the longest of the trace.

    Raises:
        ConfigurationError: a value is out of range, or two of them contradict each other.
    """

    num_blocks: int | Mapping[str, int]
    block_size: int = 16
    groups: tuple[GroupSpec, ...] | None = None
    block_nbytes: Mapping[str, int] = field(default_factory=dict)
    model: str | None = None
    cost_model_name: str | None = None
    num_host_blocks: int | Mapping[str, int] = 0
    max_sequences: int = 256
    max_batched_tokens: int = 8192
    watermark: float = 0.01
    eviction: str = DEFAULT_EVICTION
    preemption: PreemptionKind = "recompute"
    num_samples: int | None = None
    beam_width: int | None = None
    load: float = 1.0
    seed: int = 0
    max_length: int | None = None
    tenants: Mapping[str, TenantLimits] | None = None
    overlap: bool = False
    tiers: tuple[SimulatedTier, ...] = ()
    tail_tokens: int = 2048

    def __post_init__(self) -> None:
        """Check the values that the block space does not check."""
        self.scheduling_config()
        self._check_memory()
        policy_named(self.eviction)
        load = as_number(self.load, "load")
        require(load > 0, f"load must be positive and finite, got {self.load}")
        as_count(self.seed, "seed", most=LARGEST_SEED)
        if self.max_length is not None:
            as_count(self.max_length, "max_length", least=1)
        for name in ("model", "cost_model_name"):
            require(isinstance(getattr(self, name), str | None), f"{name} must be text, got {getattr(self, name)!r}")
        self._check_branching()
        require_distinct(self.tiers)
        has_host = any(self.space_config().host_blocks_by_pool().values())
        require(
            has_host or self.preemption != "swap",
            "preemption by swap needs a host pool: give `num_host_blocks`, or preempt by recompute",
        )

    def _check_memory(self) -> None:
        """Check types alone: the space refuses too few blocks and unknown pools."""
        as_count(self.block_size, "block_size", least=1)
        is_groups = isinstance(self.groups, tuple) and all(isinstance(group, GroupSpec) for group in self.groups)
        require(self.groups is None or is_groups, f"groups must be a tuple of group rules, got {self.groups!r}")
        for name in ("num_blocks", "num_host_blocks"):
            given = getattr(self, name)
            for count in given.values() if isinstance(given, Mapping) else (given,):
                as_count(count, name, least=-LARGEST_SIZE)
        is_known = isinstance(self.block_nbytes, Mapping) and all(
            as_count(count, "block_nbytes", least=1, most=MOST_NBYTES) for count in self.block_nbytes.values()
        )
        require(is_known, f"block_nbytes must map pools to bytes, got {self.block_nbytes!r}")

    def _check_branching(self) -> None:
        require(
            self.num_samples is None or self.beam_width is None, "a request has samples or beams: give one of the two"
        )
        counts = (("`num_samples`", self.num_samples), ("`beam_width`", self.beam_width))
        for name, count in counts:
            require(
                count is None or 1 <= as_count(count, name, least=-LARGEST_SIZE) <= self.max_sequences,
                f"{name} must be from 1 to max_sequences ({self.max_sequences}), got {count}",
            )

    @property
    def group_specs(self) -> tuple[GroupSpec, ...]:
        """The given groups, or one of full attention."""
        return self.groups or (FullAttention(block_size=self.block_size),)

    @property
    def tokens_per_block(self) -> dict[str, float]:
        """For each pool, the number of tokens whose keys and values in all groups take the bytes of one block."""
        nbytes = {
            group.pool: self.block_nbytes.get(group.pool, 1) / group.block_size
            for group in self.group_specs
            if not keeps_state(group)
        }
        return {
            group.pool: group.block_size * nbytes.get(group.pool, 0) / (sum(nbytes.values()) or 1)
            for group in self.group_specs
        }

    @property
    def entry_block_nbytes(self) -> list[int]:
        """Bytes of a block of each group in a tier; where they are not known, those of tokens of 256 KiB."""
        return [self.block_nbytes.get(group.pool, TOKEN_NBYTES * group.block_size) for group in self.group_specs]

    def scheduling_config(self) -> SchedulingConfig:
        """Configure the scheduler."""
        return SchedulingConfig(self.max_sequences, self.max_batched_tokens, self.preemption, overlap=self.overlap)

    def space_config(self, *, is_watched: bool = True) -> SpaceConfig:
        """Configure the block space: a sequence may fill the largest pool, and as many may be swapped out as may run.

        Args:
            is_watched: whether the space records events of blocks and causes of misses, which takes half of the time.
        """
        names = dict.fromkeys(group.pool for group in self.group_specs)
        num_blocks, num_host_blocks = (
            given if isinstance(given, Mapping) else dict.fromkeys(names, given)
            for given in (self.num_blocks, self.num_host_blocks)
        )
        config = SpaceConfig(
            groups=self.group_specs,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_sequences=2 * self.max_sequences if self.preemption == "swap" else self.max_sequences,
            watermark=self.watermark,
            prefix_caching=True,
            events=is_watched,
            max_events=max(LEAST_EVENTS, min(LARGEST_SIZE, EVENTS_A_BLOCK * max(num_blocks.values(), default=0))),
            eviction=self.eviction,
            tail_tokens=self.tail_tokens,
            explain=is_watched,
            ghosts_per_block=GHOSTS_A_BLOCK,
            tenants=self.tenants,
            in_order=self.overlap,  # as in an engine: else blocks freed in a step would have to wait for the next one
        )
        longest = max(group.block_size * num_blocks[group.pool] for group in self.group_specs)
        return replace(config, max_tokens=min(longest, LONGEST_SEQUENCE))

    def as_dict(self) -> dict[str, object]:
        """Return the configuration for JSON; tenants, overlap and tiers only if they are set."""
        tenants = {name: {"cap": limits.cap, "floor": limits.floor} for name, limits in (self.tenants or {}).items()}
        return {
            "num_blocks": _plain(self.num_blocks),
            "block_size": self.block_size,
            "num_host_blocks": _plain(self.num_host_blocks),
            "max_sequences": self.max_sequences,
            "max_batched_tokens": self.max_batched_tokens,
            "watermark": self.watermark,
            "policy": self.eviction,
            **({"tail_tokens": self.tail_tokens} if self.eviction == "tlru" else {}),
            "preemption": self.preemption,
            "num_samples": self.num_samples,
            "beam_width": self.beam_width,
            "speed": self.load,
            "seed": self.seed,
            "model": self.model,
            "cost_model_name": self.cost_model_name,
            **({"tenants": tenants} if tenants else {}),
            **({"overlap": True} if self.overlap else {}),
            **({"tiers": {each.medium: each.as_dict() for each in self.tiers}} if self.tiers else {}),
        }


def _plain(by_pool: int | Mapping[str, int]) -> int | dict[str, int]:
    return by_pool if isinstance(by_pool, int) else dict(by_pool)
