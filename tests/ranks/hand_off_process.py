"""One rank of an engine that takes prompts over and hands one over: ``python -m tests.ranks.hand_off_process``.

Arguments: RANK SIZE ADDRESS, and as JSON what to do: families, the folder of the tier, the hand-offs to take over by
family, and the prompt to compute. Rank 0 writes, as JSON by family, the answers and the hand-off of its own prompt.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, HandOff, SamplingParams
from pagedkv.engine.ranked_content import OtherRankBlocks
from pagedkv.engine.ranks import RankGroup, SentCopy
from pagedkv.errors import ConfigurationError, EngineError
from pagedkv.tiers import FolderTier
from tests.engine.families import make_model, moved
from tests.engine.serving import CONFIG, poison
from tests.ranks.rank_process import SIZES

__all__ = ["NUM_NEW", "config", "model_of", "prompt_of", "take_over_and_answer"]

NUM_NEW: Final = 6
PARAMS: Final = SamplingParams(max_tokens=NUM_NEW)
SECONDS: Final = 60.0
FOUR_HEADS: Final = ("qwen3",)
"""Families that get four KV heads; the others have two, which are repeated on four ranks."""


def config(folder: Path) -> EngineConfig:
    """Return the settings of all engines."""
    tier = FolderTier(folder, "64MiB", loads="always", deadline_s=SECONDS)
    return replace(CONFIG, num_blocks=60, max_tokens=100, max_batched_tokens=64, warm_up=False, tiers=(tier,))


def model_of(family: str) -> PreTrainedModel:
    """Return a small model whose heads can be shared out to four ranks."""
    sizes = {**SIZES, "num_key_value_heads": 4} if family in FOUR_HEADS else SIZES
    return make_model(family, **sizes)


def prompt_of(first: int) -> list[int]:
    """Return a prompt of 70 tokens."""
    return list(range(first, first + 70))


def take_over_and_answer(llm: LLM, hand_offs: Sequence[tuple[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Take prompts over; return for each its answer, and how many of its tokens were loaded; or the refusal."""
    answers: list[dict[str, Any]] = []
    for first, told in hand_offs:
        try:
            llm.take_over(HandOff(**told), prompt_of(first))
        except ConfigurationError as problem:
            answers.append({"refused": str(problem)})
            continue
        (request,) = llm.submit([prompt_of(first)], PARAMS)
        while llm.core.has_work:
            llm.step()
            llm.core.space.check()
        answers.append({
            "token_ids": request.samples[0].token_ids,
            "num_loaded": sum(request.num_loaded_tokens.values()),
        })  # fmt: skip
    return answers


def _serve(group: RankGroup, family: str, wishes: Mapping[str, Any]) -> dict[str, Any]:
    folder = Path(wishes["folder"])
    llm = LLM(moved(model_of(family), str(group.device)), config(folder / family), ranks=group)
    poison(llm)
    if not group.is_first:
        return {"steps": llm.follow()}
    answers = take_over_and_answer(llm, wishes["hand_offs"].get(family, []))
    prompt = prompt_of(wishes["first"])
    llm.generate([prompt], SamplingParams(max_tokens=1))
    hand_off = llm.hand_over(prompt)
    exported = llm.export(prompt, folder / f"{family}.prefix")
    written = {"answers": answers, "hand_off": asdict(hand_off), "exported": exported}
    group.end()
    assert llm.core.close(), "what is stored before the ranks end is stored"
    return written


def _die_instead(_: OtherRankBlocks, __: SentCopy) -> None:
    os._exit(9)


def _run(rank: int, size: int, address: str, wishes: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    group = RankGroup(rank, size, address, device=wishes.get("device", "cpu"))
    if wishes.get("dies") and rank == size - 1:
        OtherRankBlocks.copy = _die_instead  # type: ignore[assignment,method-assign]
    written: dict[str, Any] = {}
    try:
        for family in wishes["families"]:
            written[family] = _serve(group, family, wishes)
    except EngineError as problem:
        written["error"] = f"{type(problem).__name__}: {problem}"
    sys.stdout.write(json.dumps(written) + "\n")
    sys.stdout.flush()
    group.close()


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
