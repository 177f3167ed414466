"""Rollouts of TRL's GRPO trainer by our engine: what is told is what the trainer computes itself.

Needs an environment with TRL: make test-trl.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("trl", reason="make test-trl installs it")
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from pagedkv.engine import EngineConfig, StepRecord
from pagedkv.errors import ConfigurationError, EngineError, PagedKVError
from pagedkv.plugins.trl import Rollouts, rollout_func, weights_digest

PROMPTS: Final = ["abc def", "hello there", "one two three", "xyz"]
CONFIG: Final = EngineConfig(num_blocks=400, block_size=8, max_tokens=128, warm_up=False)
MOST: Final = 1e-4


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({each: place for place, each in enumerate(["<s>", "</s>", *alphabet])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")  # type: ignore[no-untyped-call]  # noqa: S106 - names of tokens
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    return tokenizer


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig.from_dict({"vocab_size": 258, "initializer_range": 0.2, **shape}))


def reward(completions: list[Any], **_: object) -> list[float]:
    """Count what about half of the tokens are."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [sum(character < "t" for character in text) / 16 for text in texts]


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def make(rollouts: Any = None, *, peft_config: Any = None, prompts: Any = PROMPTS, **options: Any) -> GRPOTrainer:  # noqa: ANN401 - TRL's
        given: dict[str, Any] = {
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 3,
        }
        given |= {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "learning_rate": 1e-2}
        return GRPOTrainer(
            make_model(),
            reward_funcs=reward,
            args=GRPOConfig(output_dir=str(tmp_path), **(given | options)),
            train_dataset=Dataset.from_dict({"prompt": prompts * 4}),
            processing_class=make_tokenizer(),
            rollout_func=rollouts,
            peft_config=peft_config,
        )

    return make


def worst_of(trainer: GRPOTrainer, rollout: dict[str, Any]) -> float:
    """Return how far a told log-probability is from the trainer's at most."""
    model, worst = trainer.accelerator.unwrap_model(trainer.model), 0.0
    for prompt, answer, told in zip(
        *(rollout[name] for name in ("prompt_ids", "completion_ids", "logprobs")), strict=True
    ):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            own, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), len(answer))
        assert len(told) == len(answer)
        worst = max(worst, float((own[0] - torch.tensor(told)).abs().max()))
    return worst


class Judged:
    """Rollouts within a training run, of which each is compared with what the trainer computes."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.rollouts = Rollouts(config)
        self.worst: list[float] = []
        self.epochs: list[str] = []

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Answer as the plug-in does."""
        model = trainer.model
        before = [model.config._attn_implementation, *(module.training for module in model.modules())]
        rollout: dict[str, Any] = self.rollouts(prompts, trainer)
        assert before == [model.config._attn_implementation, *(module.training for module in model.modules())]
        self.worst.append(worst_of(trainer, rollout))
        self.epochs.append(self.rollouts._epoch)
        return rollout


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}], ids=str
)
def test_told_log_probabilities_are_the_trainers_while_weights_change(
    make_trainer: Callable[..., GRPOTrainer], options: dict[str, Any]
) -> None:
    judged = Judged()
    trainer = make_trainer(judged, **options)
    trainer.train()
    assert len(judged.worst) == 3
    assert max(judged.worst) < MOST
    assert len(set(judged.epochs)) == 3, "each step had new weights"


def test_adapters_of_peft_are_part_of_what_generates(make_trainer: Callable[..., GRPOTrainer]) -> None:
    judged = Judged()
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj"])
    trainer = make_trainer(judged, peft_config=lora, learning_rate=0.1)
    trainer.train()
    assert len(set(judged.epochs)) == 3
    assert max(judged.worst) < MOST


def test_order_is_kept_repeated_prompts_are_forks_and_equal_weights_are_hit(
    make_trainer: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = Rollouts(CONFIG)
    trainer = make_trainer(rollouts)
    long = "a prompt of more than one block of eight tokens "
    prompts = [long + each for each in ("one", "two", "one", "one", "two")]
    first = rollouts(prompts, trainer)
    assert [trainer.processing_class.decode(ids) for ids in first["prompt_ids"]] == prompts
    assert rollouts.llm is not None
    steps: list[StepRecord] = []
    step = rollouts.llm.core.step
    monkeypatch.setattr(rollouts.llm.core, "step", lambda: steps.append(step()))
    again = rollouts(prompts, trainer)
    assert first["prompt_ids"] == again["prompt_ids"]
    assert sum(each.num_admitted for each in steps) == 2, "each prompt once, however often it is given"
    assert sum(each.num_hit_tokens for each in steps) >= 2 * 48, "no epoch began"
    assert worst_of(trainer, first) < MOST
    assert worst_of(trainer, again) < MOST
    answers = {tuple(ids) for ids in (*first["completion_ids"], *again["completion_ids"])}
    assert len(answers) > 7, "samples differ"


def test_conversations_are_rendered_as_trl_renders_them(make_trainer: Callable[..., GRPOTrainer]) -> None:
    judged = Judged()
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    trainer = make_trainer(judged, prompts=prompts)
    trainer.train()
    rollout = judged.rollouts(prompts, trainer)
    assert rollout["prompt_ids"] == trainer._tokenize_prompts(prompts)[0]
    assert max(judged.worst) < MOST


def test_the_digest_notices_what_counters_of_changes_do_not() -> None:
    model: Any = make_model()
    found = {weights_digest(model)}
    assert weights_digest(model) in found
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    found.add(weights_digest(model))
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(-1).view(torch.int32)[3] ^= 1
        found.add(weights_digest(model))
        weight[[0, 1]] = weight[[1, 0]]
        found.add(weights_digest(model))
        first, second = model.model.layers[0].mlp.gate_proj.weight, model.model.layers[1].mlp.gate_proj.weight
        first.data, second.data = second.data, first.data
        found.add(weights_digest(model))
        model.to(torch.bfloat16)
        found.add(weights_digest(model))
        model.lm_head.weight.view(-1).view(torch.int16)[-1] ^= 1
        found.add(weights_digest(model))
    assert len(found) == 7


def test_an_answer_that_fails_raises(make_trainer: Callable[..., GRPOTrainer]) -> None:
    trainer = make_trainer(rollout_func(CONFIG))
    with pytest.raises(PagedKVError, match="prompt 1"):
        trainer.rollout_func(["short", "x" * 200], trainer)
    rollouts = Rollouts(CONFIG)
    rollouts(["short"], trainer)
    assert rollouts.llm is not None

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    trainer.model.model.forward = refuse
    with pytest.raises(EngineError):
        rollouts(["short", "short", "another"], trainer)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bf16": True}, "mixed precision"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs are not known here"),
    ],
)
def test_a_trainer_that_would_generate_otherwise_is_refused(
    make_trainer: Callable[..., GRPOTrainer], options: dict[str, Any], told: str
) -> None:
    trainer = make_trainer(rollout_func(CONFIG), **options)
    with pytest.raises(ConfigurationError, match=told):
        trainer.rollout_func(PROMPTS, trainer)


def test_rewards_are_those_of_trls_own_generation(
    make_trainer: Callable[..., GRPOTrainer], record_property: Callable[[str, object], None]
) -> None:
    num = 2000
    prompts = [prompt for prompt in PROMPTS for _ in range(num // len(PROMPTS))]
    rewards: list[list[float]] = []
    for rollouts in (None, rollout_func(CONFIG)):
        trainer = make_trainer(rollouts, max_completion_length=16, generation_batch_size=8)
        torch.manual_seed(1)
        trainer._generate(prompts[:4])
        begun = time.perf_counter()
        _, _, _, completions, *_ = trainer._generate(prompts)
        record_property(f"seconds_{'trl' if rollouts is None else 'pagedkv'}", time.perf_counter() - begun)
        rewards.append(reward(completions))
    means = [sum(each) / num for each in rewards]
    variances = [
        sum((value - mean) ** 2 for value in each) / (num - 1) for each, mean in zip(rewards, means, strict=True)
    ]
    error = math.sqrt(sum(variances) / num)
    print(means, error)  # noqa: T201 - what was measured
    assert min(variances) > 0
    assert abs(means[0] - means[1]) < 2 * error
