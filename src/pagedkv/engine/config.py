"""EngineConfig: memory, limits and policies of an engine, and the configurations of its space and scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from pagedkv.contract.arguments import as_choice, as_count, as_flag, as_fraction, require_instance
from pagedkv.contract.space_config import (
    DEFAULT_EVICTION,
    EVICTION_POLICIES,
    SpaceConfig,
    TenantLimits,
    require_tenants,
)
from pagedkv.device import KeyValueShape, num_blocks_that_fit
from pagedkv.engine.guessing import MOST_TOKENS, PromptLookup
from pagedkv.engine.kv_scales import KVScales
from pagedkv.engine.sampling.parameters import LARGEST_SEED
from pagedkv.errors import ConfigurationError
from pagedkv.probe.layers import EngineGroups
from pagedkv.scheduling import PreemptionKind, SchedulingConfig, require_preemption
from pagedkv.tiers import Tier

KVType: TypeAlias = Literal["auto", "fp8"]
BeyondContext: TypeAlias = Literal["refuse", "clip"]

MIB = 2**20
MOST_NBYTES = 2**60
"""More than any machine has."""
MOST_BLOCKS = 2**20
"""Blocks of each pool of a share of the memory: a small model has more than enough, and blocks cost bookkeeping."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine.

    Args:
        block_size: tokens of a block.
        checkpoint_interval: tokens between the kept states of recurrent layers.
        kv_nbytes: bytes of blocks on the device, split among the pools; used where ``num_blocks`` is None.
        kv_share: in place of ``kv_nbytes`` the share of the memory that is free on the device once the model is there,
            0 to 1, in at most :data:`MOST_BLOCKS` blocks; told by :attr:`EngineCore.choices`. What is left is for steps
            and their graphs. Not with several ranks. None: ``kv_nbytes``.
        kv_at_first: the share of the blocks that have memory at first, above 0 and below 1; the pool then changes its
            size (:class:`MemoryBroker`, :meth:`EngineCore.shrink`), in pieces of memory that the device can release.
            For one rank, and models whose groups have one pool in block-major layout. None: pools keep their size.
        kv_dtype: type of stored keys and values: "auto", the model's own, or "fp8", eight bits (e4m3fn, on a GPU),
            which takes half of the memory of bfloat16 and rounds to three bits after the leading one. Latents and
            states are always of the model's own type.
        kv_scales: with "fp8", the scales of each layer's heads (:func:`measure_kv_scales`). None: every scale is 1, so
            magnitudes above 448 become 448.
        mean_tokens: mean tokens of a request, by which bytes are split among pools.
        num_blocks: blocks of each pool, by its name, or one number for every pool; null blocks included.
        num_host_blocks: the same for swapping; 0: none.
        max_sequences: most sequences that run at once.
        max_batched_tokens: most tokens of a step.
        max_tokens: tokens of the longest sequence; None: by the model's config, 4,096 if it has no limit.
        beyond_context: for a request whose ``max_tokens`` exceed the longest sequence: "refuse" it, or "clip" its
            answer there, as vLLM does, or where the pools hold no more of it. A prompt that leaves no room for a token
            is refused in both cases.
        preemption: how a preempted request continues.
        prefix_caching: share blocks between requests, and keep them for later ones.
        min_partial_hit: fewest tokens of a hit inside a block, for which that block is copied; 0: no such hits.
        watermark: fraction of blocks that admissions leave free.
        eviction: name of the eviction policy; tail_tokens: with "tlru", the last tokens of each sequence, which go
            first.
        weights_epoch: the first version of the weights: text, or a number if epochs are to be counted (8 bytes a
            block).
        max_epoch_lag: the oldest weights that may have contributed to a hit, in epochs before the current one; above 0
            only if epochs are counted.
        self_test: compare the model over blocks with the dense model before the first request; always done with
            recurrent layers, since it also finds out how their states continue.
        accept_differences: go on, with a warning, where the self-test finds other answers than the model's own; answers
            may be wrong then. :attr:`LLM.self_test` has the differences. Models that fail are refused all the same.
        warm_up: compile all loops that requests can reach, on all cores, before the first request, unless they are on
            disk; False: compile each when it is first called, so that the engine is built sooner, and requests wait.
        capture_steps: on a GPU, launch steps of up to 512 tokens as CUDA graphs, where the model allows it; False: call
            by call, for a model that is changed or watched between steps.
        compile_model: compile the model's layers with torch.compile, for models of attention alone: building the engine
            takes seconds longer, and steps then have fewer and larger kernels. If its graphs differ from its calls by
            rounding, steps are not captured (:attr:`EngineCore.capture_state`). None: on a GPU, where it
            can be compiled (:attr:`EngineCore.choices`).
        absorb_latents: attend to latents (MLA) in their blocks, by matrices that are read out of the model when the
            engine is built, instead of letting the model unfold the latents in every step. Answers change by rounding.
            None: on a GPU. Layers that do not unfold by matrices are unfolded (:attr:`EngineCore.absorbed`).
        overlap: plan and launch each step before the tokens of the step before are on the host, so that a GPU does not
            wait. Answers are the same. The next call of ``step`` notes a step's tokens. Tokens computed after the end
            of an answer that was not known yet count as abandoned in receipts. Sequences whose next tokens are guessed
            wait for their last token. None: on a GPU, without a draft model.
        speculation: draft tokens by lookup in the request's own tokens, which steps verify; answers stay the same.
            None: no drafts.
        predicted_tokens: most tokens of a sequence that a step drafts from a request's prediction
            (``Intent.prediction``), 0 to 64; answers stay the same. 0: predictions are not used. With recurrent layers
            also at most the drafts of ``speculation``, since each takes a state.
        num_draft_tokens: tokens of a sequence that a draft model guesses in a step, 0 to 64; answers stay the same. 0:
            4 if the engine has a draft model. Not together with ``speculation``.
        leases: keep content until a time if an :class:`Intent` has a lease, at 16 bytes a block. The clock of the space
            is then the engine's, in seconds.
        events: log stored and removed blocks for a publisher (:mod:`pagedkv.events`), which drains them after each
            step.
        tenants: caps and floors by tenant name; {}: tenants are added later (:meth:`EngineCore.set_tenant`). None:
            tenants are not distinguished.
        seed: with a request's number, the seed of its noise if it has none: the same requests in the same order sample
            the same tokens.
        adapters: folders of LoRA adapters (PEFT), by the name that requests choose one by (``Intent.adapter``); they
            are loaded into the model's layers (:mod:`pagedkv.engine.adapters`). Without compiled layers, captured
            steps, absorbed latents and several ranks, and with no draft model that is the model itself. What tiers
            keep belongs to the set of adapters.
        tiers: where cached content is kept beside the device, the fastest first: ``(HostTier("16GiB"),
            FolderTier("/var/cache/pagedkv", "200GiB"))``, of :mod:`pagedkv.tiers`. Their content is verified, and
            answers stay the same with any failure of a tier. The weights are read once when the engine is built.
    """

    block_size: int = 16
    checkpoint_interval: int = 1024
    kv_nbytes: int = 512 * MIB
    kv_share: float | None = None
    kv_at_first: float | None = None
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
    tail_tokens: int = 2048
    weights_epoch: str | int = ""
    max_epoch_lag: int = 0
    self_test: bool = True
    accept_differences: bool = False
    warm_up: bool = True
    capture_steps: bool = True
    compile_model: bool | None = None
    absorb_latents: bool | None = None
    overlap: bool | None = None
    speculation: PromptLookup | None = None
    predicted_tokens: int = 0
    num_draft_tokens: int = 0
    leases: bool = False
    events: bool = False
    tenants: Mapping[str, TenantLimits] | None = None
    seed: int = 0
    adapters: Mapping[str, str] | None = None
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        """Check the values that the space and the scheduler do not check."""
        for name in ("block_size", "checkpoint_interval", "mean_tokens", "max_sequences", "max_batched_tokens"):
            as_count(getattr(self, name), name, least=1)
        as_count(self.kv_nbytes, "kv_nbytes", least=1, most=MOST_NBYTES)
        _check_share(self.kv_share, "kv_share")
        _check_share(self.kv_at_first, "kv_at_first")
        as_count(self.min_partial_hit, "min_partial_hit")
        as_count(self.seed, "seed", most=LARGEST_SEED)
        if self.max_tokens is not None:
            as_count(self.max_tokens, "max_tokens", least=1)
        for name in ("num_blocks", "num_host_blocks"):
            _check_blocks(getattr(self, name), name)
        for name in (
            "prefix_caching",
            "self_test",
            "warm_up",
            "capture_steps",
            "accept_differences",
            "leases",
            "events",
        ):
            as_flag(getattr(self, name), name)
        for name in ("compile_model", "absorb_latents", "overlap"):
            as_flag(getattr(self, name) is None or getattr(self, name), name)
        as_fraction(self.watermark, "watermark")
        as_choice(self.eviction, EVICTION_POLICIES, "eviction policy")
        require_preemption(self.preemption)
        if self.speculation is not None:
            require_instance(self.speculation, PromptLookup, "speculation")
        as_count(self.tail_tokens, "`tail_tokens`")
        as_count(self.predicted_tokens, "predicted_tokens", most=MOST_TOKENS)
        as_count(self.num_draft_tokens, "num_draft_tokens", most=MOST_TOKENS)
        self._require_one_guesser()
        require_tenants(self.tenants)
        self._check_adapters()
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

    def _check_adapters(self) -> None:
        """Check names and folders of adapters. Raises ConfigurationError."""
        if self.adapters is None:
            return
        require_instance(self.adapters, Mapping, "adapters")
        for name, folder in self.adapters.items():
            if not isinstance(name, str) or not name or not isinstance(folder, str):
                raise ConfigurationError(f"adapters must be folders by name, got {name!r}: {folder!r}")
        refused = [name for name in ("compile_model", "absorb_latents") if getattr(self, name)]
        if refused and len(self.adapters):
            raise ConfigurationError(
                f"{' and '.join(refused)} read weights once, which an adapter changes from pass to pass: leave one out"
            )

    def _require_one_guesser(self) -> None:
        """Refuse a draft model beside lookups. Raises ConfigurationError."""
        if self.num_draft_tokens and self.speculation is not None:
            raise ConfigurationError(
                "a draft model and `speculation` both guess the tokens of a sequence: leave one of them out"
            )

    def scheduling(self, *, publishes_answers: bool = True) -> SchedulingConfig:
        """Return the scheduler's configuration. ``publishes_answers``: blocks of decoded tokens may be hit."""
        return SchedulingConfig(
            self.max_sequences,
            self.max_batched_tokens,
            self.preemption,
            most_drafts=self.most_drafts,
            publishes_answers=publishes_answers,
            overlap=bool(self.overlap),
        )

    def longest(self, model_tokens: int | None) -> int:
        """Return the tokens of the longest sequence. ``model_tokens``: the model's own limit; None: it has none."""
        return self.max_tokens or model_tokens or 4096

    @property
    def most_drafts(self) -> int:
        """Most drafts of a sequence in a step."""
        return max(self.predicted_tokens, self.num_draft_states)

    @property
    def num_draft_states(self) -> int:
        """Most drafts of a sequence in a step of a model with recurrent layers, where each draft takes a state."""
        return self.num_draft_tokens if self.speculation is None else self.speculation.num_tokens

    def stored(self, groups: EngineGroups, device: torch.device) -> EngineGroups:
        """Return groups with the types and scalings of ``kv_dtype`` and ``kv_scales``. Raises ConfigurationError."""
        if self.kv_dtype == "auto":
            return groups
        if device.type != "cuda":
            raise ConfigurationError(f"kv_dtype 'fp8' needs the kernels of a GPU, and the model is on {device}")
        if groups.sparse:
            raise ConfigurationError("kv_dtype 'fp8' is not for models whose indexers select keys: leave it out")
        scaling: Literal["tensor", "head"] = "tensor" if self.kv_scales is None else "head"
        shapes = [
            replace(shape, dtype=torch.float8_e4m3fn, scaling=scaling) if isinstance(shape, KeyValueShape) else shape
            for shape in groups.shapes
        ]
        return replace(groups, shapes=tuple(shapes))

    def space(self, groups: EngineGroups, model_tokens: int | None) -> SpaceConfig:
        """Return the space's configuration.

        Args:
            groups: the model's groups.
            model_tokens: the model's own limit of a sequence; None: it has none.

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
            tail_tokens=self.tail_tokens,
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


def _check_share(given: float | None, name: str) -> None:
    if given is not None and not as_fraction(given, name):
        raise ConfigurationError(f"{name} is 0, which leaves no memory for blocks: give a share, such as 0.9")


def _check_scales(scales: object, kv_dtype: KVType) -> None:
    if scales is None:
        return
    require_instance(scales, KVScales, "kv_scales")
    if kv_dtype != "fp8":
        raise ConfigurationError(f"kv_scales are for keys of eight bits, and kv_dtype is {kv_dtype!r}: set it to 'fp8'")


def _check_blocks(given: object, what: str) -> None:
    """Check numbers of blocks: one, or one for each pool. None is allowed for ``num_blocks`` alone."""
    if isinstance(given, Mapping):
        for pool, count in given.items():
            as_count(count, f"{what} of pool {pool!r}")
    elif given is not None or what == "num_host_blocks":
        as_count(given, what)
