"""EngineConfig: memory, limits and policies of an engine; what space and scheduler are told is made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from pagedkv.memory.contract.arguments import as_choice, as_count, as_flag, as_fraction, require_instance
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.contract.space_config import (
    DEFAULT_EVICTION,
    EVICTION_POLICIES,
    SpaceConfig,
    TenantLimits,
    require_tenants,
)
from pagedkv.memory.device import KeyValueShape, num_blocks_that_fit
from pagedkv.memory.scheduling import PreemptionKind, SchedulingConfig, require_preemption
from pagedkv.memory.tiers import Tier
from pagedkv.serving.engine.grouping import EngineGroups
from pagedkv.serving.engine.kv_scales import KVScales
from pagedkv.serving.engine.prompt_lookup import MOST_TOKENS, PromptLookup
from pagedkv.serving.engine.sampling.parameters import LARGEST_SEED

__all__ = ["EngineConfig"]

KVType: TypeAlias = Literal["auto", "fp8"]
BeyondContext: TypeAlias = Literal["refuse", "clip"]

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
        kv_dtype: how keys and values are stored: "auto", in the model's own type, or "fp8", in eight bits (e4m3fn, on a
            GPU), which halves what bfloat16 takes and rounds to three bits behind the leading one. Latents and states
            stay as they are.
        kv_scales: with "fp8", the scales of each layer's heads (:func:`measure_kv_scales`). None: every scale is 1, so
            magnitudes above 448 become 448.
        mean_tokens: tokens of a request, in the mean, by which bytes are split among pools.
        num_blocks: blocks of each pool, by its name, or one number for every pool; null blocks included.
        num_host_blocks: the same for swapping; 0: none.
        max_sequences: sequences that run at once.
        max_batched_tokens: tokens of a step.
        max_tokens: tokens of the longest sequence; None: what the model's config says, 4,096 if nothing.
        beyond_context: what becomes of a request whose ``max_tokens`` go beyond the longest sequence: "refuse" it, or
            "clip" its answer there, as vLLM does. A prompt that leaves no room for a token is refused either way.
        preemption: what becomes of a request that must give its blocks up.
        prefix_caching: share blocks between requests, and keep them for later ones.
        min_partial_hit: fewest tokens for whose sake a block is copied.
        watermark: fraction of blocks that admissions leave free.
        eviction: name of the policy.
        weights_epoch: the first version of the weights: text, or a number where epochs are to be counted (8 bytes a
            block).
        max_epoch_lag: how many epochs back the oldest weights may lie that contributed to a hit; more than 0 only where
            epochs are counted.
        self_test: compare the model with itself, dense, before anything is answered; done whatever is said here where
            layers are recurrent, since it also finds out how their states go on.
        warm_up: compile all loops that requests can reach before the first one is served, if they are not on disk, on
            all cores; False: each when it is first called, so that a first look begins sooner, and requests wait.
        capture_steps: on a GPU, launch steps of up to 512 tokens as CUDA graphs, where the model allows it; False: call
            by call, for a model that is to be changed or watched from step to step.
        compile_model: run the model as torch.compile makes it, for models of attention alone: minutes when an engine is
            built, and fewer and larger kernels from then on. Where its graphs are other than its calls by rounding,
            steps are not captured (:attr:`EngineCore.capture_state`).
        absorb_latents: attend to latents (MLA) where they are, by matrices that are read out of the model when the
            engine is built, and do not let the model unfold them at every step. Answers change by rounding. None: on a
            GPU. Layers that do not unfold by matrices are unfolded (:attr:`EngineCore.absorbed`).
        overlap: plan and launch each step before the tokens of the one before it are on the host, so that a GPU does
            not wait. Answers are the same. A step's tokens are noted by the next call of ``step``, and tokens computed
            behind an end that was not known count as abandoned in receipts.
        speculation: guess tokens from what a request has already, and let steps compute them beside the next one;
            answers stay the same. None: no guesses.
        predicted_tokens: tokens of a sequence that a step guesses at most from what a request predicts
            (``Intent.prediction``), 0 to 64; answers stay the same. 0: predictions are not used. With recurrent layers
            also at most the guesses of ``speculation``, since each takes a state.
        num_draft_tokens: tokens of a sequence that a draft model guesses in a step, 0 to 64; answers stay the same. 0:
            4 where the engine is given a draft model. Not together with ``speculation`` or ``overlap``.
        leases: keep content until a time where an :class:`Intent` asks for it, at 16 bytes a block. The clock of the
            space then shows the engine's seconds.
        events: log the names that blocks get and lose, for a publisher (:mod:`pagedkv.events`) that drains them after
            each step.
        tenants: caps and floors by tenant name; {}: tenants come later (:meth:`EngineCore.set_tenant`). None: tenants
            are not distinguished.
        seed: where the noise of requests comes from that name no seed, together with their number: the same requests in
            the same order draw the same tokens.
        tiers: where cached content is kept beside the device, the fastest first: ``(HostTier("16GiB"),
            FolderTier("/var/cache/pagedkv", "200GiB"))``, of :mod:`pagedkv.tiers`. What they serve is verified, and
            whatever they do, answers stay the same. The weights are read once when the engine is built.
    """

    block_size: int = 16
    checkpoint_interval: int = 1024
    kv_nbytes: int = 512 * MIB
    kv_dtype: KVType = "auto"
    kv_scales: KVScales | None = None
    mean_tokens: int = 1024
    num_blocks: int | Mapping[str, int] | None = None
    num_host_blocks: int | Mapping[str, int] = 0
    max_sequences: int = 64
    max_batched_tokens: int = 2048
    max_tokens: int | None = None
    beyond_context: BeyondContext = "refuse"
    preemption: PreemptionKind = "recompute"
    prefix_caching: bool = True
    min_partial_hit: int = 0
    watermark: float = 0.01
    eviction: str = DEFAULT_EVICTION
    weights_epoch: str | int = ""
    max_epoch_lag: int = 0
    self_test: bool = True
    warm_up: bool = True
    capture_steps: bool = True
    compile_model: bool = False
    absorb_latents: bool | None = None
    overlap: bool = False
    speculation: PromptLookup | None = None
    predicted_tokens: int = 0
    num_draft_tokens: int = 0
    leases: bool = False
    events: bool = False
    tenants: Mapping[str, TenantLimits] | None = None
    seed: int = 0
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        """Check what the space and the scheduler do not check."""
        for name in ("block_size", "checkpoint_interval", "mean_tokens", "max_sequences", "max_batched_tokens"):
            as_count(getattr(self, name), name, least=1)
        as_count(self.kv_nbytes, "kv_nbytes", least=1, most=MOST_NBYTES)
        as_count(self.min_partial_hit, "min_partial_hit")
        as_count(self.seed, "seed", most=LARGEST_SEED)
        if self.max_tokens is not None:
            as_count(self.max_tokens, "max_tokens", least=1)
        for name in ("num_blocks", "num_host_blocks"):
            _check_blocks(getattr(self, name), name)
        for name in ("prefix_caching", "self_test", "warm_up", "capture_steps", "compile_model", "overlap"):
            as_flag(getattr(self, name), name)
        for name in ("leases", "events"):
            as_flag(getattr(self, name), name)
        as_flag(self.absorb_latents is None or self.absorb_latents, "absorb_latents")
        as_fraction(self.watermark, "watermark")
        as_choice(self.eviction, EVICTION_POLICIES, "eviction policy")
        require_preemption(self.preemption)
        if self.speculation is not None:
            require_instance(self.speculation, PromptLookup, "speculation")
        as_count(self.predicted_tokens, "predicted_tokens", most=MOST_TOKENS)
        as_count(self.num_draft_tokens, "num_draft_tokens", most=MOST_TOKENS)
        self._require_one_guesser()
        require_tenants(self.tenants)
        as_count(self.max_epoch_lag, "max_epoch_lag")
        as_choice(self.kv_dtype, ("auto", "fp8"), "kv_dtype")
        _check_scales(self.kv_scales, self.kv_dtype)
        as_choice(self.beyond_context, ("refuse", "clip"), "beyond_context")
        require_instance(self.tiers, tuple, "tiers")
        for tier in self.tiers:
            require_instance(tier, Tier, "a tier")
        if self.tiers and not self.prefix_caching:
            raise ConfigurationError("tiers keep what the prefix cache has: they need prefix_caching=True")
        if self.preemption == "swap" and not self.num_host_blocks:
            raise ConfigurationError("preemption by swap needs host blocks: set num_host_blocks")

    def _require_one_guesser(self) -> None:
        """Refuse what a draft model does not go with."""
        if not self.num_draft_tokens:
            return
        if self.speculation is not None:
            raise ConfigurationError(
                "a draft model and `speculation` both guess the tokens of a sequence: leave one of them out"
            )
        if self.overlap:
            raise ConfigurationError(
                "a draft model needs the last token of each sequence before a step begins, so that no two steps could "
                "`overlap`: leave one of them out"
            )

    def scheduling(self, *, publishes_answers: bool = True) -> SchedulingConfig:
        """Give the scheduler's part; the model says whether what it decoded may be hit by others."""
        return SchedulingConfig(
            self.max_sequences,
            self.max_batched_tokens,
            self.preemption,
            most_drafts=self.most_drafts,
            publishes_answers=publishes_answers,
            overlap=self.overlap,
        )

    def longest(self, model_tokens: int | None) -> int:
        """Tokens of the longest sequence; ``model_tokens``: that the model knows, None if it does not say."""
        return self.max_tokens or model_tokens or 4096

    @property
    def most_drafts(self) -> int:
        """Guessed tokens of a sequence in a step at most."""
        return max(self.predicted_tokens, self.num_draft_states)

    @property
    def num_draft_states(self) -> int:
        """Guessed tokens of a sequence in a step at most where each takes a state, as in recurrent layers."""
        return self.num_draft_tokens if self.speculation is None else self.speculation.num_tokens

    def stored(self, groups: EngineGroups, device: torch.device) -> EngineGroups:
        """Give groups whose keys and values are stored as ``kv_dtype`` says. Raises ConfigurationError."""
        if self.kv_dtype == "auto":
            return groups
        if device.type != "cuda":
            raise ConfigurationError(f"kv_dtype 'fp8' needs the kernels of a GPU, and the model is on {device}")
        scaling: Literal["tensor", "head"] = "tensor" if self.kv_scales is None else "head"
        shapes = [
            replace(shape, dtype=torch.float8_e4m3fn, scaling=scaling) if isinstance(shape, KeyValueShape) else shape
            for shape in groups.shapes
        ]
        return replace(groups, shapes=tuple(shapes))

    def space(self, groups: EngineGroups, model_tokens: int | None) -> SpaceConfig:
        """Give the space's part.

        Args:
            groups: the model's groups.
            model_tokens: the longest sequence that the model knows; None if it does not say.

        Raises:
            ConfigurationError: not enough memory, or pools that do not exist.
        """
        longest = self.longest(model_tokens)
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
            weights_epoch=self.weights_epoch,
            max_epoch_lag=self.max_epoch_lag,
            in_order=True,
            receipts=True,
            explain=True,
            leases=self.leases,
            events=self.events,
        )
        return replace(config, num_blocks=self._num_blocks(groups, longest), tenants=self.tenants)

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


def _check_scales(scales: object, kv_dtype: KVType) -> None:
    if scales is None:
        return
    require_instance(scales, KVScales, "kv_scales")
    if kv_dtype != "fp8":
        raise ConfigurationError(f"kv_scales are for keys of eight bits, and kv_dtype is {kv_dtype!r}: set it to 'fp8'")


def _check_blocks(given: object, what: str) -> None:
    """Check numbers of blocks: one, or one for each pool, whose names the model tells; None is asked of the memory."""
    if isinstance(given, Mapping):
        for pool, count in given.items():
            as_count(count, f"{what} of pool {pool!r}")
    elif given is not None or what == "num_host_blocks":
        as_count(given, what)
