"""EngineParts: the model of an engine over its blocks, built from a configuration.

::

    config, model, groups  ->  space        which blocks hold which tokens
                               executor     storage and block tables on the device
                               runner       the model's passes, by graphs where they can be captured
                               drafter      those of a draft model, if there is one

What does not fit or cannot work is refused here, before the first request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import NamedTuple, final

import torch

from pagedkv.attention import AttentionBackend, backend_for
from pagedkv.contract.answers import BlockHolders
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.device import BlockTables, KVStorage, PlanExecutor, block_nbytes_of, runs_of_pools
from pagedkv.engine.adapters import Adapters
from pagedkv.engine.captured_passes import MOST_TOKENS, CapturedPasses, of_tables, what_prevents_graphs
from pagedkv.engine.compiled_model import LEAST_TOKENS, CompiledModel, what_prevents_compiling
from pagedkv.engine.config import MOST_BLOCKS, EngineConfig
from pagedkv.engine.content import OwnContent, StoredContent
from pagedkv.engine.drafter import Drafter, DraftModel
from pagedkv.engine.kv_scales import set_scales
from pagedkv.engine.memory_use import MemoryUse, as_gib, free_nbytes, refusing, require_room
from pagedkv.engine.ranked_content import RankedContent, WholeModel
from pagedkv.engine.ranks import RankGroup
from pagedkv.engine.runner import ModelRunner, copy_written_states
from pagedkv.engine.unfoldings import AbsorbedLatents, latents_to_absorb
from pagedkv.errors import ConfigurationError, UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.layers import EngineGroups
from pagedkv.space import BlockSpace


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What a self-test found about recurrent layers, see :class:`~pagedkv.engine.runner.ModelRunner`."""

    replays_steps: bool = False
    continues: bool = True


@final
class EngineParts:
    """The model over blocks.

    Args:
        model, groups, config, ranks, draft: as of :class:`~pagedkv.engine.core.EngineCore`.
        traits: of its recurrent layers.
        adapters: those of the model, which is not compiled or captured with them; None: there are none.

    Attributes:
        space: the block space; executor: storage and block tables; runner: the model's passes.
        drafter: the draft model's passes; None: there is no draft model, or another rank has it.
        absorbed: the layers that attend to latents without unfolding them.
        config: the configuration, without open choices; choices: a sentence that tells them, and why.
        memory: bytes on the device.
        num_vocabulary: columns of the logits.

    Raises:
        ConfigurationError: memory or limits that cannot work.
        UnsupportedModelError: the model is to be compiled, and cannot be; or it is split, and has indexers.
    """

    def __init__(
        self,
        model: compat.Model,
        groups: EngineGroups,
        config: EngineConfig,
        traits: ModelTraits,
        ranks: RankGroup | None,
        draft: DraftModel | None,
        adapters: Adapters | None = None,
    ) -> None:
        if ranks is not None and groups.sparse:
            raise UnsupportedModelError(
                f"{type(model).__name__} has indexers that select keys, which were never compared on several ranks: "
                "serve it on one"
            )
        may_fall_back = config.compile_model is None
        self.adapters = adapters
        config, self.choices = chosen_for(config, groups, model.device)
        self.config, self._model = config, model
        self._ranks, self._draft_model = ranks, None if draft is None else draft.model
        wanted = config.absorb_latents if adapters is None else False  # whose matrices an adapter may change
        self.absorbed = AbsorbedLatents(
            model, latents_to_absorb(model, groups, wanted=wanted, is_sharded=ranks is not None)
        )
        self._groups = groups = config.stored(replace(groups, absorbed=frozenset(self.absorbed.by_layer)), model.device)
        self.config, told = with_memory(config, groups, model.device, is_sharded=ranks is not None)
        self.choices += told
        space_config = self.config.space(groups, compat.longest_sequence(model))
        self.num_vocabulary = groups.num_vocabulary
        self.space = BlockSpace(space_config)
        absent = {} if config.kv_at_first is None else self._first_absent(config.kv_at_first)
        require_room(_kv_nbytes(space_config, groups, absent), model)
        self.executor = self._new_executor(space_config, groups, absent)
        self.runner, self.memory = self._prepared(traits, may_fall_back=may_fall_back)
        is_first = ranks is None or ranks.is_first
        self.drafter = self._new_drafter(draft) if draft is not None and is_first else None

    def _prepared(self, traits: ModelTraits, *, may_fall_back: bool) -> tuple[ModelRunner, MemoryUse]:
        """Make the runner and prepare it; uncompiled if compiling fails and was no wish of the configuration."""
        failure = compiled = None
        try:
            compiled = _compiled(self._model, self._groups) if self.config.compile_model else None
            runner = self._new_runner(traits, compiled)
            runner.compile()
        except Exception as problem:
            if not (self.config.compile_model and may_fall_back):
                raise
            failure = (str(problem).splitlines() or [type(problem).__name__])[0]
        if self._ranks is not None and self.config.compile_model and not self._ranks.agree(failure is None):
            failure = failure or "it cannot be on another rank"
        if failure is not None:
            self.choices = f"{self.choices}; the model is not compiled after all: {failure}"
            self.config = replace(self.config, compile_model=False)
            return self._prepared(traits, may_fall_back=False)
        self.choices = "; ".join([self.choices, *(compiled.joined if compiled is not None else [])])
        return runner, runner.prepare(self.config.max_sequences)

    def _new_runner(self, traits: ModelTraits, compiled: CompiledModel | None) -> ModelRunner:
        model, groups = self._model, self._groups
        uncaptured = what_prevents_graphs(groups, model.device, are_wanted=self.config.capture_steps)
        if self.adapters is not None:
            uncaptured = uncaptured or "adapters change what its layers compute from pass to pass"
        return ModelRunner(
            model,
            groups,
            self.executor,
            self._backend(model, groups, self.absorbed.latent_dim),
            replays_steps=traits.replays_steps,
            continues=traits.continues,
            captured=None if uncaptured else self._new_graphs(),
            uncaptured=uncaptured,
            compiled=compiled,
            unfoldings=self.absorbed.by_call(groups),
            add_up=None if self._ranks is None else self._ranks.add_up,
            share=None if self._ranks is None else self._ranks.share,
            adapters=self.adapters,
        )

    def content(self, whole: WholeModel | None) -> StoredContent | None:
        """Return what tiers and files have of the blocks; None on ranks without ``whole``.

        Args:
            whole: what was known of the model before it was split; None: it is not split, or there are no tiers here.

        Raises:
            ConfigurationError: blocks of several ranks cannot be put together.
        """
        storage, model = self.executor.storage, self._model
        if self._ranks is None:
            return OwnContent(model, self._groups.specs, storage, self._draft_model)
        if whole is None:
            return None
        stored = replace(whole, groups=self.config.stored(whole.groups, model.device))
        return RankedContent(stored, model, self._groups, storage, self._ranks)

    def _first_absent(self, share: float) -> dict[str, Int32Array]:
        """Make all blocks absent but a share of them, rounded up to what the device can release; return those absent.

        Raises:
            ConfigurationError: a model on several ranks, or with several pools, or blocks of several pieces.
        """
        if self._ranks is not None or len(self.space.config.pool_names) > 1:
            raise ConfigurationError(
                "kv_at_first is for a model on one rank whose groups have one pool: it has "
                f"{list(self.space.config.pool_names)}"
            )
        (pool, run), *_ = runs_of_pools(self.space.config, self._groups.shapes, self._model.device).items()
        num_blocks = self.space.config.blocks_by_pool()[pool]
        num_first = max(1, ceil(share * num_blocks / run))
        answer = self.space.shrink(max(0, num_blocks // run - num_first) * run, pool=pool, run=run)
        assert not isinstance(answer, BlockHolders), "nothing holds a block of a new space"
        return {pool: answer}

    def _new_executor(
        self, space_config: SpaceConfig, groups: EngineGroups, absent: Mapping[str, Int32Array]
    ) -> PlanExecutor:
        config, device = self.config, self._model.device
        storage = KVStorage(space_config, groups.shapes, device, absent=absent)
        if config.kv_scales is not None:
            set_scales(storage, groups, config.kv_scales)
        tables = BlockTables(space_config, max_batched_tokens=config.max_batched_tokens, device=device)
        return PlanExecutor(storage, tables, zero_new_blocks=False)  # only written slots are read

    def _new_graphs(self) -> CapturedPasses:
        config, device = self.config, self._model.device
        with refusing("what graphs read and write", device):
            has_states, in_rows = bool(self._groups.states), self._groups.in_rows
            captured = CapturedPasses(
                self._model,
                of_tables(self.executor.tables, None if in_rows else config.max_sequences),
                device,
                max_tokens=min(config.max_batched_tokens, config.max_sequences if in_rows else MOST_TOKENS),
                num_vocabulary=self.num_vocabulary,
                min_tokens=LEAST_TOKENS if config.compile_model else 1,
                agree=None if self._ranks is None else self._ranks.agree,
                keep=partial(copy_written_states, self._groups, self.executor) if has_states else None,
            )
        if self._ranks is not None:
            self._ranks.before_end(captured.drop)
        return captured

    def _new_drafter(self, draft: DraftModel) -> Drafter:
        with refusing("what the draft model's graphs read and write", draft.model.device):
            drafter = Drafter(
                draft,
                self.executor,
                self._backend(draft.model, draft.groups),
                self.num_vocabulary,
                max_places=self.config.max_sequences,
                capture_passes=self.config.capture_steps,
            )
        self.memory = self.memory.beside(drafter.prepare(), self._model, draft.model)
        return drafter

    def _backend(self, model: compat.Model, groups: EngineGroups, latent_dim: int = 0) -> AttentionBackend:
        config = self.config
        return backend_for(
            self.executor.storage,
            groups.attention,
            max_places=config.max_sequences,
            max_tokens=config.max_batched_tokens,
            max_length=self.space.config.max_tokens,
            query_dtype=model.dtype,
            num_draft=config.most_drafts,
            latent_dim=latent_dim,
        )


def require_draft_model(config: EngineConfig, draft: DraftModel | None) -> None:
    """Raise ConfigurationError if drafts are wanted, and there is no model to guess them."""
    if draft is None and config.num_draft_tokens:
        raise ConfigurationError(
            f"num_draft_tokens is {config.num_draft_tokens}, and there is no draft model to guess them: give one "
            "(`LLM.draft_model`), or leave `num_draft_tokens` 0"
        )


def _kv_nbytes(config: SpaceConfig, groups: EngineGroups, absent: Mapping[str, Int32Array]) -> int:
    """Return the bytes of all pools on the device, without those of absent blocks."""
    nbytes: Mapping[str, int] = block_nbytes_of(groups.specs, groups.shapes)
    return sum((count - len(absent.get(pool, ()))) * nbytes[pool] for pool, count in config.blocks_by_pool().items())


class Chosen(NamedTuple):
    """A configuration without open choices, and a sentence that tells them and why."""

    config: EngineConfig
    told: str


def chosen_for(config: EngineConfig, groups: EngineGroups, device: torch.device) -> Chosen:
    """Decide what the configuration leaves open: compiling and overlap, wherever they make steps faster.

    ``groups``: of the model, on ``device``.
    """
    nowhere = None if device.type == "cuda" else f"the model is on {device.type}"
    uncompiled = nowhere or what_prevents_compiling(groups)
    if config.adapters:
        uncompiled = uncompiled or "adapters change what its layers compute from pass to pass"
    apart = nowhere or ("a draft model needs the last token of each sequence" if config.num_draft_tokens else None)
    if config.compile_model is not None:
        uncompiled = None if config.compile_model else "compile_model is off"
    if config.overlap is not None:
        apart = None if config.overlap else "overlap is off"
    compiled = "the model is compiled" if uncompiled is None else f"the model is not compiled ({uncompiled})"
    overlapping = "steps overlap" if apart is None else f"steps do not overlap ({apart})"
    chosen = replace(config, compile_model=uncompiled is None, overlap=apart is None)
    return Chosen(chosen, f"{compiled}; {overlapping}")


def with_memory(
    config: EngineConfig, groups: EngineGroups, device: torch.device, *, is_sharded: bool
) -> tuple[EngineConfig, str]:
    """Turn a share of the free memory into bytes; return what is to be told of it as well.

    Raises:
        ConfigurationError: several ranks share the model, each of which would find another number.
    """
    if config.kv_share is None or config.num_blocks is not None:
        return config, ""
    if is_sharded:
        raise ConfigurationError("kv_share is for one rank: give kv_nbytes or num_blocks, which all ranks have alike")
    free = free_nbytes(device)
    nbytes_by_pool: Mapping[str, int] = block_nbytes_of(groups.specs, groups.shapes)
    kv_nbytes = max(1, min(int(config.kv_share * free), MOST_BLOCKS * sum(nbytes_by_pool.values())))
    told = f"; keys and values have {as_gib(kv_nbytes)}, {kv_nbytes / free:.0%} of what was free on {device}"
    return replace(config, kv_nbytes=kv_nbytes, kv_share=None), told


def _compiled(model: compat.Model, groups: EngineGroups) -> CompiledModel:
    """Return a model that is compiled when it first runs. Raises UnsupportedModelError."""
    why = what_prevents_compiling(groups)
    if why is not None:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be compiled: {why}. Leave compile_model off")
    return CompiledModel(model, groups)
