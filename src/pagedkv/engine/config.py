"""EngineConfig: memory, limits and policies of an engine; what space and scheduler are told is made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pagedkv.arguments import as_count
from pagedkv.device import num_blocks_that_fit
from pagedkv.engine.grouping import EngineGroups
from pagedkv.engine.prompt_lookup import PromptLookup
from pagedkv.engine.sampling.parameters import LARGEST_SEED
from pagedkv.errors import ConfigurationError
from pagedkv.scheduling import PreemptionKind, SchedulingConfig
from pagedkv.spec import DEFAULT_EVICTION, SpaceConfig

__all__ = ["EngineConfig"]

MIB = 2**20
MOST_NBYTES = 2**60
"""More than any machine has."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is told.

    Args:
        block_size: tokens a block.
        checkpoint_interval: tokens between the states that are kept of recurrent layers.
        kv_nbytes: bytes for blocks on the device, split among the pools; taken where ``num_blocks`` is None.
        mean_tokens: tokens of a request, in the mean, by which bytes are split among pools.
        num_blocks: blocks of each pool, by its name, or one number for every pool; null blocks included.
        num_host_blocks: the same for swapping; 0: none.
        max_sequences: sequences that run at once.
        max_batched_tokens: tokens of a step.
        max_tokens: tokens of the longest sequence; None: what the model's config says, 4,096 if nothing.
        preemption: what becomes of a request that must give its blocks up.
        prefix_caching: share blocks between requests, and keep them for later ones.
        min_partial_hit: fewest tokens for whose sake a block is copied.
        watermark: fraction of blocks that admissions leave free.
        eviction: name of the policy.
        self_test: compare the model with itself, dense, before anything is answered; done whatever is said here where
            layers are recurrent, since it also finds out how their states go on.
        speculation: guess tokens from what a request has already, and let steps compute them beside the next one;
            answers stay the same. None: no guesses.
        seed: where the noise of requests comes from that name no seed, together with their number: the same requests in
            the same order draw the same tokens.
    """

    block_size: int = 16
    checkpoint_interval: int = 1024
    kv_nbytes: int = 512 * MIB
    mean_tokens: int = 1024
    num_blocks: int | Mapping[str, int] | None = None
    num_host_blocks: int | Mapping[str, int] = 0
    max_sequences: int = 64
    max_batched_tokens: int = 2048
    max_tokens: int | None = None
    preemption: PreemptionKind = "recompute"
    prefix_caching: bool = True
    min_partial_hit: int = 0
    watermark: float = 0.01
    eviction: str = DEFAULT_EVICTION
    self_test: bool = True
    speculation: PromptLookup | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what the space and the scheduler do not check."""
        as_count(self.kv_nbytes, "kv_nbytes", least=1, most=MOST_NBYTES)
        as_count(self.seed, "seed", most=LARGEST_SEED)
        if self.preemption == "swap" and not self.num_host_blocks:
            raise ConfigurationError("preemption by swap needs host blocks: set num_host_blocks")

    def scheduling(self, *, publishes_answers: bool = True) -> SchedulingConfig:
        """Give the scheduler's part; the model says whether what it decoded may be hit by others."""
        return SchedulingConfig(
            self.max_sequences,
            self.max_batched_tokens,
            self.preemption,
            most_drafts=self.most_drafts,
            publishes_answers=publishes_answers,
        )

    @property
    def most_drafts(self) -> int:
        """Guessed tokens of a sequence in a step at most."""
        return 0 if self.speculation is None else self.speculation.num_tokens

    def space(self, groups: EngineGroups, model_tokens: int | None) -> SpaceConfig:
        """Give the space's part.

        Args:
            groups: the model's groups.
            model_tokens: the longest sequence that the model knows; None if it does not say.

        Raises:
            ConfigurationError: not enough memory, or pools that do not exist.
        """
        longest = self.max_tokens or model_tokens or 4096
        config = SpaceConfig(
            groups.specs,
            dict.fromkeys([spec.pool for spec in groups.specs], 2),
            num_host_blocks=self._by_pool(groups, self.num_host_blocks),
            max_sequences=self.max_sequences * (2 if self.num_host_blocks else 1),
            max_tokens=longest,
            watermark=self.watermark,
            prefix_caching=self.prefix_caching,
            min_partial_hit=self.min_partial_hit if self.prefix_caching else 0,
            eviction=self.eviction,
            in_order=True,
            receipts=True,
            explain=True,
        )
        return replace(config, num_blocks=self._num_blocks(groups, longest))

    def _num_blocks(self, groups: EngineGroups, longest: int) -> Mapping[str, int]:
        if self.num_blocks is not None:
            return self._by_pool(groups, self.num_blocks)
        return num_blocks_that_fit(
            groups.specs,
            groups.shapes,
            self.kv_nbytes,
            mean_tokens=min(longest, self.mean_tokens),
            step_tokens=max(self.max_batched_tokens, longest),
        )

    @staticmethod
    def _by_pool(groups: EngineGroups, given: int | Mapping[str, int]) -> Mapping[str, int]:
        return given if isinstance(given, Mapping) else {spec.pool: given for spec in groups.specs}
