"""One rank, as a process of its own: ``python -m tests.ranks.rank_process RANK SIZE ADDRESS MODE FAMILY...``.

For each family rank 0 answers prompts, and the others follow. Every rank writes, as JSON, what it knows in the end. In
mode ``die`` the last rank ends in the middle.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from pagedkv.memory.contract.errors import EngineError
from pagedkv.serving.engine import LLM, EngineConfig, SamplingParams
from pagedkv.serving.engine.ranks import RankGroup
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS

__all__ = ["RANKED", "SIZES", "WISHES", "answers"]

STEPS_BEFORE_DEATH: Final = 4
SIZES: Final = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "hidden_size": 32,
    "head_dim": 8,
}
"""Sizes that can be cut into four parts; two KV heads among them."""
WISHES: Final = (
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.8, seed=4, n=2),
    SamplingParams(max_tokens=6, prompt_logprobs=1),
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=1.0, seed=2, top_k=9),
    SamplingParams(max_tokens=12),
)
RANKED: Final[EngineConfig] = replace(CONFIG, num_blocks=60)


def answers(llm: LLM) -> list[list[tuple[int, ...]]]:
    """Answer all prompts; return the tokens of each answer."""
    return [[one.token_ids for one in each.completions] for each in llm.generate(PROMPTS, WISHES)]


def _serve(group: RankGroup, family: str) -> dict[str, Any]:
    llm = LLM(make_model(family, **SIZES), RANKED, ranks=group)
    written: dict[str, Any] = {"nbytes": llm.core.executor.storage.device_nbytes}
    if group.is_first:
        written["tokens"] = answers(llm)
        group.end()
    else:
        written["steps"] = llm.follow()
    groups = range(len(llm.core.space.config.groups))
    return {**written, "tables": [llm.core.executor.tables.table(each).tolist() for each in groups]}


def _dying(receive: Callable[[], Any]) -> Callable[[], Any]:
    """Return a method that ends the process after some steps."""
    left = STEPS_BEFORE_DEATH

    def die() -> Any:  # noqa: ANN401 - as it
        nonlocal left
        left -= 1
        if left < 0:
            os._exit(9)
        return receive()

    return die


def _run(rank: int, size: int, address: str, mode: str, families: Sequence[str]) -> None:
    torch.set_num_threads(1)
    group = RankGroup(rank, size, address)
    if mode == "die" and rank == size - 1:
        group.receive = _dying(group.receive)  # type: ignore[method-assign]
    written: dict[str, Any] = {}
    try:
        for family in families:
            written[family] = _serve(group, family)
    except EngineError as problem:
        written["error"] = f"{type(problem).__name__}: {problem}"
    sys.stdout.write(json.dumps(written) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a group that has lost a rank waits for it where Python ends


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
