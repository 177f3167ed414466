"""TRL 1.16: rollouts of its GRPO trainer by pagedkv's engine, on the weights that are being trained.

::

    from pagedkv.plugins.trl import rollout_func

    trainer = GRPOTrainer(model, reward_funcs=..., args=args, train_dataset=data, rollout_func=rollout_func())

The trainer's own model generates, so no weights are copied and none are stale: a digest of all weights tells whether
what earlier calls computed still holds. A prompt that TRL repeats is computed once, and its samples are forks.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Final, TypeAlias, final

import torch
import trl
from accelerate import DistributedType
from trl import GRPOTrainer

from pagedkv.engine import LLM, EngineConfig, RequestOutput, SamplingParams
from pagedkv.engine.sampling import BatchSampler, Place, SampledTokens, WaitingRow
from pagedkv.errors import ConfigurationError, EngineError

__all__ = ["Rollouts", "rollout_func", "weights_digest"]

Rollout: TypeAlias = dict[str, list[list[int]] | list[list[float]]]
WHOLE: Final = {DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU}
"""Every process has all weights."""
FINISHED: Final = {"stop", "length"}
MOST_FORKS: Final = 16
"""Answers of one request, which needs room for all of them at once; further ones hit the blocks of its prompt."""
PIECE: Final = 2**20
SEED: Final = 1729


def rollout_func(config: EngineConfig | None = None) -> Callable[[list[Any], GRPOTrainer], Rollout]:
    """Return what ``GRPOTrainer(rollout_func=...)`` takes.

    Args:
        config: memory and limits of the engine, which is built by the first call. Its ``seed`` and ``weights_epoch``
            are the trainer's.
    """
    return Rollouts(EngineConfig() if config is None else config)


@final
class Rollouts:
    """Answers prompts with the model of a trainer.

    Args:
        config: of the engine.

    Attributes:
        llm: the engine; None before the first call.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.llm: LLM | None = None
        self._config = config
        self._model: torch.nn.Module | None = None
        self._epoch = ""

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> Rollout:
        """Answer prompts, each as often as it is given, in order.

        Args:
            prompts: texts, or conversations; what TRL repeats is given repeatedly.
            trainer: its model, tokenizer, sampling parameters and ends of answers are used.

        Returns:
            ``prompt_ids``, ``completion_ids`` with the token that ended an answer, and ``logprobs`` of these tokens at
            the trainer's temperature, before filters and penalties.

        Raises:
            ConfigurationError: a trainer whose rollouts would not be those of its model: sharded weights, mixed
                precision, other engines, parameters of generation that are not known here.
            UnsupportedModelError: the engine refuses the model; the message has the reason.
            EngineError: an answer failed. No call returns fewer answers than prompts.

        Cost: the weights are read once for their digest.
        """
        _require_plain(trainer)
        model = _model_of(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)  # noqa: SLF001 - so that both have the same tokens
        if images is not None:
            raise ConfigurationError("prompts with images cannot be answered here: the engine takes texts")
        places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, ids in enumerate(prompt_ids):
            places[tuple(ids)].append(place)
        params = _params_of(trainer)
        most = min(MOST_FORKS, self._config.max_sequences)
        groups = [found[begin : begin + most] for found in places.values() for begin in range(0, len(found), most)]
        with _evaluating(model), torch.no_grad():
            llm = self._engine(model, trainer)
            each = [replace(params, n=len(group)) for group in groups]
            outputs = llm.generate([prompt_ids[group[0]] for group in groups], each)
        completion_ids: list[list[int]] = [[] for _ in prompt_ids]
        logprobs: list[list[float]] = [[] for _ in prompt_ids]
        for group, output in zip(groups, outputs, strict=True):
            _require_whole(output)
            for place, answer in zip(group, output.completions, strict=True):
                completion_ids[place] = list(answer.token_ids)
                logprobs[place] = [each.logprob for each in answer.logprobs or ()]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def _engine(self, model: Any, trainer: GRPOTrainer) -> LLM:  # noqa: ANN401 - of transformers
        """Return the engine, in the epoch of the weights as they are; another model has another one."""
        epoch = weights_digest(model).hex()
        if self.llm is None or self._model is not model:
            seed = trainer.args.seed + trainer.accelerator.process_index
            config = replace(self._config, seed=seed, weights_epoch=epoch)
            sampler = None if trainer.temperature == 1.0 else _AtTemperature(model, trainer.temperature)
            self.llm, self._model = LLM(model, config, sampler=sampler), model
        elif epoch != self._epoch:
            self.llm.set_weights_epoch(epoch)
        self._epoch = epoch
        return self.llm


def weights_digest(model: torch.nn.Module) -> bytes:
    """Digest all parameters and buffers of a model, where they are: 32 bytes, of 128 bits a tensor.

    Counters of changes (``_version``) do not suffice: fused optimizers leave them alone. Each tensor is summed as
    whole numbers modulo 2**64, twice, with random odd factors by place, so a change that keeps a sum is as unlikely
    as a guess of 64 bits, and of both as one of 128.

    Cost: the weights are read once; one wait for the device.
    """
    draws = torch.Generator().manual_seed(SEED)
    factors = torch.randint(-(2**63), 2**63 - 1, (2, PIECE), generator=draws, dtype=torch.int64) | 1
    digest, sums = hashlib.sha256(), []
    by_device: dict[torch.device, torch.Tensor] = {}
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers()), key=lambda named: named[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.device not in by_device:
            by_device[tensor.device] = factors.to(tensor.device)
        sums.append(_sums_of(tensor.detach(), by_device[tensor.device]))
    if sums:
        digest.update(torch.stack([each.cpu() for each in sums]).numpy().tobytes())
    return digest.digest()


def _sums_of(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's words with two factors for each place: int64 ``[2]``."""
    words = tensor.contiguous().view(-1).view(WORDS[tensor.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(words.split(PIECE)):
        summed = (piece.to(torch.int64) * factors[:, : len(piece)]).sum(1)
        total += summed * factors[:, -1 - number % PIECE]
    return total


WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _require_plain(trainer: GRPOTrainer) -> None:
    """Raise ConfigurationError for a trainer whose generation is not that of its model's weights alone."""
    accelerator, args = trainer.accelerator, trainer.args
    if not hasattr(trainer, "_tokenize_prompts"):
        raise ConfigurationError(f"rollouts are for TRL 1.16; {trl.__version__} tokenizes prompts otherwise")
    if accelerator.distributed_type not in WHOLE:
        raise ConfigurationError(f"{accelerator.distributed_type} shards the weights: rollouts need all of them")
    if accelerator.mixed_precision != "no":
        raise ConfigurationError(
            f"mixed precision ({accelerator.mixed_precision}) computes otherwise than the model's weights: load the "
            "model in that type, and set bf16=False and fp16=False"
        )
    if trainer.use_vllm or trainer.use_transformers_continuous_batching:
        raise ConfigurationError("a rollout_func generates by itself: leave out use_vllm and continuous batching")
    if args.generation_kwargs:
        raise ConfigurationError(f"generation_kwargs are not known here: {sorted(args.generation_kwargs)}")
    if trainer.tools:
        raise ConfigurationError("tools call TRL's own generation again: leave them out")


def _model_of(trainer: GRPOTrainer) -> Any:  # noqa: ANN401 - of transformers
    """Return the decoder that is trained; with PEFT, the one that has the adapters in it."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def _params_of(trainer: GRPOTrainer) -> SamplingParams:
    """Return the trainer's parameters of sampling; the temperature is the sampler's."""
    return SamplingParams(
        temperature=1.0,
        top_k=trainer.top_k or 0,
        top_p=trainer.top_p,
        min_p=trainer.min_p or 0.0,
        repetition_penalty=trainer.repetition_penalty,
        max_tokens=trainer.max_completion_length,
        stop_token_ids=trainer.eos_token_ids,
        logprobs=0,
    )


def _require_whole(output: RequestOutput) -> None:
    """Raise EngineError for an answer that ended otherwise than answers do."""
    ends = [answer.finish_reason for answer in output.completions]
    if output.error is not None or not ends or not FINISHED.issuperset(ends):
        raise EngineError(f"an answer to prompt {output.number} ended as {ends}: {output.error}")


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Let a model compute without dropout for a while; each of its modules is then as it was."""
    were = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was in were:
            module.training = was


@final
class _AtTemperature:
    """Samples from logits divided by a temperature, so that log-probabilities are those that the trainer computes.

    Penalties multiply or divide, so they may come after the temperature as well as before it.
    """

    def __init__(self, model: Any, temperature: float) -> None:  # noqa: ANN401 - of transformers
        self._sampler = BatchSampler(model.config.get_text_config().vocab_size)
        self._temperature = temperature

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Sample a token for each row of logits."""
        return self._sampler.sample(logits / self._temperature, places)

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Call foreign processors of waiting rows again; there are none."""
        return self._sampler.resume(waiting)
