"""Rewards of TRL's own generation and of our rollouts, for as many completions of the same untrained model.

    make test-trl        once: it makes the environment
    .venv/trl/bin/python -m benchmarks.trl_rewards [--completions 2000]

Both generate for one ``GRPOTrainer``'s worth of settings at temperature 1; the reward is the share of a completion's
characters below "t". The means must be within two standard errors. Seconds, and of them the processor's, are those of
one call that answers all, after a small one.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.machine import describe
from pagedkv.engine import EngineConfig
from pagedkv.plugins.trl import rollout_func
from tests.peers.test_trl import PROMPTS, make_model, make_tokenizer, reward

MOST_ERRORS: Final = 2.0


def generated(rollouts: Callable[..., Any] | None, num: int, folder: str) -> tuple[list[float], float, float]:
    """Return rewards, seconds, and seconds of the processor."""
    trainer = GRPOTrainer(
        make_model(),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", max_completion_length=16,
            per_device_train_batch_size=8, num_generations=4, generation_batch_size=8,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=make_tokenizer(),
        rollout_func=rollouts,
    )  # fmt: skip
    torch.manual_seed(1)
    generate = trainer._generate  # noqa: SLF001 - what a training step calls
    generate(PROMPTS)
    begun_s, own_s = time.perf_counter(), time.process_time()
    _, _, _, completions, *_ = generate([prompt for prompt in PROMPTS for _ in range(num // len(PROMPTS))])
    return reward(completions), time.perf_counter() - begun_s, time.process_time() - own_s


def main() -> None:
    """Generate, compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=16_000)
    parser.add_argument("--sequences", type=int, default=2048, help="at once")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    config = EngineConfig(
        num_blocks=given.blocks, block_size=8, max_tokens=128, max_sequences=given.sequences, warm_up=False
    )
    rows: dict[str, dict[str, float]] = {}
    for name, rollouts in (("TRL", None), ("pagedkv", rollout_func(config))):
        with tempfile.TemporaryDirectory() as folder:
            rewards, seconds, own_s = generated(rollouts, given.completions, folder)
        variance = float(np.var(rewards, ddof=1)) / len(rewards)
        rows[name] = {"mean": float(np.mean(rewards)), "variance": variance, "seconds": seconds, "processor_s": own_s}
        print(f"{name:8} reward {rows[name]['mean']:.4f}, {seconds:.1f} s, {own_s:.1f} s of the processor", flush=True)
    error = math.sqrt(sum(row["variance"] for row in rows.values()))
    apart = abs(rows["TRL"]["mean"] - rows["pagedkv"]["mean"]) / error
    print(f"{apart:.2f} standard errors of {error:.4f} apart")
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": describe(), "standard_errors_apart": apart, **rows}, indent=1))
    assert apart < MOST_ERRORS


if __name__ == "__main__":
    main()
