"""LLM: a model in, answers out.

>>> llm = LLM(model)  # doctest: +SKIP
>>> llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].token_ids  # doctest: +SKIP
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, Protocol, cast, final

import numpy as np
import torch

from pagedkv.contract.arguments import TokenIds, as_token_array
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine.adapters import Adapters
from pagedkv.engine.answer_stream import NewTokens, TokenUpdate
from pagedkv.engine.answering import Sampler
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.core import EngineCore
from pagedkv.engine.drafter import DEFAULT_DRAFT_TOKENS, DraftModel, paired, require_fit
from pagedkv.engine.engine_tiers import HandOff
from pagedkv.engine.identity import model_digest
from pagedkv.engine.outputs import Completion, RequestOutput, StepRecord
from pagedkv.engine.prefix_file import NixlLink
from pagedkv.engine.prompts import Prompt, TokensPrompt, chat_token_ids, is_chat
from pagedkv.engine.ranked_content import WholeModel
from pagedkv.engine.ranks import RankGroup
from pagedkv.engine.request import PLAIN, EngineRequest, Intent
from pagedkv.engine.sampling import SamplingParams, bad_words_as_ids
from pagedkv.engine.self_test import SelfTest, Sizes, self_test
from pagedkv.engine.sharding import RankPart, shard
from pagedkv.errors import ConfigurationError, RequestError, TokenError, UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.compat import BorrowedModel
from pagedkv.probe.layers import EngineGroups, group_layers
from pagedkv.probe.probing import probe, require_supported
from pagedkv.tiers.served import TierStatistics
from pagedkv.warming import ON_CPU, make_ready, of_spaces, of_stores

LOG: Final = logging.getLogger("pagedkv.engine")
DEFAULT_TOKENS: Final = 16
"""Most tokens of an answer, for requests without params."""


class Tokenizer(Protocol):
    """Encodes text as token ids and decodes token ids, as tokenizers of transformers do."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""


@final
class LLM:
    """Answers prompts with one model, whose keys and values are in blocks.

    Args:
        model: any decoder of transformers in evaluation mode, on a CPU or a GPU. Engines in several threads may share
            it: their passes take turns. No other code may use the model during a step.
        config: memory, limits, policies.
        tokenizer: for prompts, answers, stop texts and bad words as text; None: requests and answers are token ids.
        sampler: samples tokens; None: by the parameters of each request.
        clock: returns seconds, never backwards. Leases and the times in outputs are in its time.
        ranks: the processes that share the model's heads, each of which builds an engine with the same model and
            configuration; requests go to rank 0, and the others call :meth:`follow`. Each process cuts its model down
            to its own heads, in place.
        draft_model: a smaller decoder of the same vocabulary on the same device, of attention alone, which guesses
            tokens (``EngineConfig.num_draft_tokens``); answers stay the same. It may be the same model. None: there is
            none.

    Attributes:
        core: the loop, to be driven step by step.
        groups: the groups of the model's layers, followed by those of a draft model.
        self_test: the difference between the model over blocks and the dense model; None where it was not computed.

    Raises:
        UnsupportedModelError: paged memory would answer wrongly for the model; the message names the layer, the reason
            and a remedy.
        ConfigurationError: memory or limits that cannot work.
    """

    def __init__(
        self,
        model: compat.Model,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = perf_counter,
        ranks: RankGroup | None = None,
        draft_model: compat.Model | None = None,
    ) -> None:
        begun = perf_counter()
        config = EngineConfig() if config is None else config
        if draft_model is not None:
            config = replace(config, num_draft_tokens=config.num_draft_tokens or DEFAULT_DRAFT_TOKENS)
        self._ranks = ranks
        self._part: RankPart | None = None
        if config.warm_up:
            compile_loops(config)
        whole = None
        if ranks is not None:
            _require_for_ranks(config, model, draft_model, ranks)
            if config.tiers and ranks.is_first:
                whole = WholeModel(find_groups(model, config), model_digest(model))
            self._part = shard(model, ranks.rank, ranks.size, ranks.add_up)
            ranks.meet()  # some may have taken longer to load it
        adapters = _loaded_adapters(model, config, has_others=ranks is not None or draft_model is model)
        self.groups = find_groups(model, config)
        self.self_test = None
        if config.self_test or self.groups.states:
            self.self_test = self._tested(model, config, adapters)
        found = self.self_test
        draft = None
        if draft_model is not None:
            self.groups, draft = with_draft_model(model, self.groups, draft_model, config)
        self.core = EngineCore(
            model,
            self.groups,
            config,
            replays_steps=found is not None and found.replays_steps,
            continues=found is not None and found.continues,
            decode=None if tokenizer is None else lambda token_ids: tokenizer.decode(list(token_ids)),
            sampler=sampler,
            clock=clock,
            ranks=ranks,
            whole=whole,
            draft=draft,
            adapters=adapters,
        )
        LOG.info("%s; the engine was built in %.1f s", self.core.choices, perf_counter() - begun)
        self._tokenizer = tokenizer

    def _tested(self, model: compat.Model, config: EngineConfig, adapters: Adapters | None) -> SelfTest:
        """Test the model by itself, then with each adapter; return what was found of it by itself."""
        found = self_test(model, self.groups, _sizes_of(model, config), refuses=not config.accept_differences)
        if found.refusal is not None:
            LOG.warning("%s", found.refusal)
        if adapters is not None:
            for name in adapters.names:
                with BorrowedModel(model).alone(), adapters.active(name):
                    self._tested(model, config, None)
        return found

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        intents: Intent | Sequence[Intent] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, batched together.

        Args:
            prompts: texts, lists of token ids, :class:`~pagedkv.engine.prompts.TokensPrompt`, or conversations:
                lists of messages, :class:`Chat`.
            params: parameters of all prompts, or a list with those of each; None: 16 tokens, the most likely ones.
            intents: hints about all prompts, or a list with those about each; None: none.

        Returns:
            an output for each prompt, in order. The output of a request that failed alone (as where a logits processor
            raised) has the error; the others are complete.

        Raises:
            RequestError: one of the requests cannot be served; none is served then.
            EngineError: the engine failed in a step, or the device is lost.
        """
        requests = self.submit(prompts, params, intents)
        try:
            while not all(request.is_finished for request in requests):
                self.core.step()
        except BaseException:
            for request in requests:
                self.core.abort(request)
            raise
        return [self._with_text(request.output()) for request in requests]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        intents: Intent | Sequence[Intent] | None = None,
    ) -> Iterator[TokenUpdate]:
        """Answer prompts, batched together, and yield tokens as they come. Closing the iterator ends the requests.

        Raises as :meth:`generate`.
        """
        requests = self.submit(prompts, params, intents)
        new_tokens = [NewTokens(request, prompt) for prompt, request in enumerate(requests)]
        try:
            while not all(request.is_finished for request in requests):
                self.core.step()
                for each in new_tokens:
                    yield from each.take()
            for each in new_tokens:  # of requests that had ended before a step
                yield from each.take()
        finally:
            for request in requests:
                self.core.abort(request)

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        intents: Intent | Sequence[Intent] | None = None,
    ) -> list[EngineRequest]:
        """Add prompts to the queue, all or none; the caller then drives :attr:`core`. Raises RequestError."""
        all_params = _params_of_each(prompts, params)
        all_intents = _intent_of_each(prompts, intents)
        tokens = [self._token_ids(prompt, place) for place, prompt in enumerate(prompts)]
        requests: list[EngineRequest] = []
        try:
            for place, (prompt, each_params, intent) in enumerate(zip(tokens, all_params, all_intents, strict=True)):
                requests.append(self._add(place, prompt, each_params, intent))
        except BaseException:
            for request in requests:
                self.core.abort(request)
            raise
        return requests

    def follow(self, change: Callable[[str | int], object] | None = None) -> int:
        """Carry out the steps of rank 0 until it ends: see :meth:`EngineCore.follow`."""
        return self.core.follow(change)

    def part_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's part of the whole model's weights, by their names; all of them where there is one rank.

        The parts are views. For :meth:`set_weights_epoch`: ``change=lambda: model.load_state_dict(llm.part_of(new))``.
        """
        return dict(weights) if self._part is None else self._part.of(weights)

    def step(self) -> StepRecord:
        """Run one step. Raises EngineError."""
        return self.core.step()

    def reset_prefix_cache(self) -> None:
        """Drop every cached block, so that later requests hit none: see :meth:`EngineCore.reset_prefix_cache`."""
        self.core.reset_prefix_cache()

    def set_weights_epoch(self, weights_epoch: str | int, *, change: Callable[[], object] | None = None) -> None:
        """Begin a new epoch of weights: see :meth:`EngineCore.set_weights_epoch`."""
        self.core.set_weights_epoch(weights_epoch, change=change)

    def forget(self, prompt: Prompt, *, salt: bytes = b"", start: int = 0) -> int:
        """Drop a prompt, and everything that continues it, from the cache and all tiers: :meth:`EngineCore.forget`."""
        return self.core.forget(self._token_ids(prompt, 0), salt=salt, start=start)

    def export(self, prompt: Prompt, path: str | Path, *, salt: bytes = b"") -> int:
        """Write the cached blocks of a prompt to a file: see :meth:`EngineCore.export`."""
        return self.core.export(self._token_ids(prompt, 0), path, salt=salt)

    def import_(self, path: str | Path, *, salt: bytes = b"") -> int:
        """Load a prefix from a file into the cache: see :meth:`EngineCore.import_`."""
        return self.core.import_(path, salt=salt)

    def hand_over(
        self, prompt: Prompt, *, salt: bytes = b"", timeout_s: float = 60.0, link: NixlLink | None = None
    ) -> HandOff:
        """Offer a prompt's blocks to another engine, by tiers or a link: see :meth:`EngineCore.hand_over`."""
        return self.core.hand_over(self._token_ids(prompt, 0), salt=salt, timeout_s=timeout_s, link=link)

    def take_over(
        self,
        hand_off: HandOff,
        prompt: Prompt,
        *,
        salt: bytes = b"",
        timeout_s: float = 60.0,
        link: NixlLink | None = None,
    ) -> int:
        """Take a prompt's blocks over from another engine: see :meth:`EngineCore.take_over`."""
        return self.core.take_over(hand_off, self._token_ids(prompt, 0), salt=salt, timeout_s=timeout_s, link=link)

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier of ``EngineConfig.tiers``."""
        return self.core.tier_statistics()

    def flush_tiers(self, timeout_s: float = 60.0) -> bool:
        """Wait until all computed blocks are stored in the tiers: see :meth:`EngineCore.flush_tiers`."""
        return self.core.flush_tiers(timeout_s)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Flush and close the tiers; the engine goes on without them: see :meth:`EngineCore.close`."""
        return self.core.close(timeout_s)

    def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Add a tenant, or change the limits of one: see :meth:`EngineCore.set_tenant`."""
        self.core.set_tenant(name, limits)

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant without requests: see :meth:`EngineCore.remove_tenant`."""
        self.core.remove_tenant(name)

    def output(self, request: EngineRequest) -> RequestOutput:
        """Return a request's output so far, with text where there is a tokenizer. Changes nothing."""
        return self._with_text(request.output())

    def _add(self, place: int, prompt: Int32Array, params: SamplingParams, intent: Intent) -> EngineRequest:
        try:
            return self.core.add(prompt, self._with_ids(params), intent)
        except RequestError as problem:
            raise RequestError(f"prompt {place}: {problem}") from problem

    def _token_ids(self, prompt: Prompt, place: int) -> Int32Array:
        try:
            prompt = chat_token_ids(self._tokenizer, prompt) if is_chat(prompt) else prompt
        except RequestError as problem:
            raise RequestError(f"prompt {place}: {problem}") from problem
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    f"prompt {place} is text, but the engine has no tokenizer: give it one (`LLM.tokenizer`), or token "
                    "ids (`TokensPrompt`)"
                )
            prompt = self._tokenizer.encode(prompt)
        if isinstance(prompt, TokensPrompt):
            prompt = self._plain(prompt, place)
        try:
            return as_token_array(cast("TokenIds", prompt))
        except TokenError as problem:
            raise RequestError(f"prompt {place} must be a text or a list of token ids: {problem}") from problem

    @staticmethod
    def _plain(prompt: TokensPrompt, place: int) -> Sequence[int]:
        try:
            prompt.require_supported()
        except RequestError as problem:
            raise RequestError(f"prompt {place}: {problem}") from problem
        return prompt.token_ids

    def _with_ids(self, params: SamplingParams) -> SamplingParams:
        """Turn bad words that are text into token ids."""
        if not any(isinstance(word, str) for word in params.bad_words):
            return params
        if self._tokenizer is None:
            raise RequestError("bad_words are text, but the engine has no tokenizer: give it one, or token ids")
        return replace(params, bad_words=bad_words_as_ids(params.bad_words, plain_encoding(self._tokenizer)))

    def _with_text(self, output: RequestOutput) -> RequestOutput:
        if self._tokenizer is None:
            return output
        completions = tuple(self._completion_with_text(each) for each in output.completions)
        return replace(output, completions=completions)

    def _completion_with_text(self, completion: Completion) -> Completion:
        if completion.text is not None or self._tokenizer is None:
            return completion
        is_ended_by_token = isinstance(completion.stop, int)
        token_ids = completion.token_ids[:-1] if is_ended_by_token else completion.token_ids
        return replace(completion, text=self._tokenizer.decode(list(token_ids)))


def _params_of_each(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    """Return the parameters of each prompt. Raises RequestError."""
    if isinstance(prompts, str):
        raise RequestError("prompts is one text: give a list of prompts")
    if not isinstance(prompts, Sequence) and np.ndim(prompts) == 0:
        raise RequestError(f"prompts must be a list of prompts, got {prompts!r}")
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams(max_tokens=DEFAULT_TOKENS)] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise RequestError(f"params must be SamplingParams, or a list of them, got {params!r}")
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts need as many SamplingParams, got {len(params)}")
    return params


def _intent_of_each(prompts: Sequence[Prompt], intents: Intent | Sequence[Intent] | None) -> Sequence[Intent]:
    """Return the intent of each prompt. Raises RequestError."""
    if intents is None or isinstance(intents, Intent):
        return [intents or PLAIN] * len(prompts)
    if not isinstance(intents, Sequence) or not all(isinstance(intent, Intent) for intent in intents):
        raise RequestError(f"intents must be an Intent, or a list of them, got {intents!r}")
    if len(intents) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts need as many Intents, got {len(intents)}")
    return intents


def _require_for_ranks(
    config: EngineConfig, model: compat.Model, draft_model: compat.Model | None, ranks: RankGroup
) -> None:
    """Raise ConfigurationError for what an engine on several ranks lacks, or a model on another device."""
    if config.tiers and config.num_draft_tokens:
        raise ConfigurationError(
            "an engine on several ranks has no tiers beside a draft model, which only rank 0 computes: leave one out"
        )
    if draft_model is model:
        raise ConfigurationError("a model that is split over ranks cannot be its own draft model: load it once more")
    if model.device != ranks.device:
        raise ConfigurationError(
            f"rank {ranks.rank} has its model on {model.device}, and its device is {ranks.device}: move it there "
            "before the engine is built, or make the RankGroup with the model's device"
        )


def _loaded_adapters(model: compat.Model, config: EngineConfig, *, has_others: bool) -> Adapters | None:
    """Load a configuration's adapters; None: it has none. Raises ConfigurationError."""
    if not config.adapters:
        return None
    if has_others:
        raise ConfigurationError("adapters need a model in one process, which is not its own draft model")
    return Adapters(model, config.adapters)


def compile_loops(config: EngineConfig) -> None:
    """Compile all loops that requests of an engine can reach, if they are not on disk, on all cores."""
    stores = [of_stores(tier.eviction) for tier in config.tiers]
    make_ready(of_spaces(config.eviction), *dict.fromkeys(stores), ON_CPU)


def find_groups(model: compat.Model, config: EngineConfig) -> EngineGroups:
    """Probe a model, and put its layers into groups.

    Raises:
        UnsupportedModelError: paged memory would answer wrongly for it.
    """
    require_supported(model)
    return group_layers(probe(model), config.block_size, config.checkpoint_interval, config.num_draft_states)


def _sizes_of(model: compat.Model, config: EngineConfig) -> Sizes:
    longest = config.longest(compat.longest_sequence(model))
    return Sizes(config.max_sequences, config.max_batched_tokens, longest)


def with_draft_model(
    model: compat.Model, groups: EngineGroups, draft_model: compat.Model, config: EngineConfig
) -> tuple[EngineGroups, DraftModel]:
    """Probe a draft model, and append its groups to those of the model.

    Raises:
        UnsupportedModelError: paged memory would compute it wrongly, or it has recurrent layers.
        ConfigurationError: it does not fit the model.
    """
    require_fit(model, draft_model, config.longest(compat.longest_sequence(model)))
    try:
        draft_groups = find_groups(draft_model, config)
        both = paired(groups, draft_model, draft_groups)
        if config.self_test and draft_model is not model:
            self_test(draft_model, draft_groups, _sizes_of(draft_model, config))
    except UnsupportedModelError as problem:
        raise UnsupportedModelError(f"the draft model cannot be used: {problem}") from problem
    return both


def plain_encoding(tokenizer: Tokenizer) -> Callable[[str], Sequence[int]]:
    """Return a tokenizer's encoding without the special tokens that tokenizers of transformers add."""
    rust = compat.rust_tokenizer(tokenizer)
    if rust is not None:

        def encode(text: str) -> Sequence[int]:
            rust.no_truncation()
            rust.no_padding()
            found: list[int] = rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return found

        return encode
    if "add_special_tokens" in inspect.signature(tokenizer.encode).parameters:
        return partial(cast("Callable[..., Sequence[int]]", tokenizer.encode), add_special_tokens=False)
    return tokenizer.encode
