"""One rank, as a process of its own: ``python -m tests.ranks.rank_process RANK SIZE ADDRESS DEVICE MODE FAMILY...``.

For each family rank 0 answers prompts, and the others follow. Every rank writes, as JSON, what it knows in the end. A
family may have a way behind it: ``llama:overlap``, ``llama:drafts`` (by a draft model), ``llama:weights`` (new ones).

In mode ``compiled`` the model is compiled and its steps are captured, on a CPU as far as tests do this there. In mode
``messages`` there is no model. In modes ``die``, ``die-within`` and ``hang`` the last rank ends or stops,
after some steps: between two, or within one; in mode ``hang-first`` rank 0 stops.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch

from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.engine.compiled_model import CompiledModel
from pagedkv.engine.ranks import LAYER, RankGroup, SentCopy
from pagedkv.errors import EngineError
from tests.engine.families import make_model, moved, shake
from tests.engine.serving import CONFIG, PROMPTS
from tests.engine.test_captured_passes import Again, replay_on_cpu

__all__ = ["NUM_BLOCKS_SENT", "RANKED", "SIZES", "WISHES", "answers", "engine", "new_weights", "scored_answer"]

STEPS_BEFORE_DEATH: Final = 4
LOSSES: Final = ("die", "die-within", "hang", "hang-first")
NUM_BLOCKS_SENT: Final = (0, 1, *range(4000, 4100), 200_000)
"""Their messages have 16 KiB, with what else is in them, among others."""
PATIENCE: Final = timedelta(seconds=20)
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
ROOMY: Final[EngineConfig] = replace(RANKED, max_batched_tokens=32)
"""Steps that score prompts have fewer tokens than the graphs of other steps."""


def answers(llm: LLM) -> list[list[tuple[int, ...]]]:
    """Answer all prompts; return the tokens of each answer."""
    return [[one.token_ids for one in each.completions] for each in llm.generate(PROMPTS, WISHES)]


def scored_answer(llm: LLM) -> list[int]:
    """Answer a prompt of fewer tokens than any graph of its step, and score it."""
    (output,) = llm.generate([list(range(5, 16))], SamplingParams(max_tokens=6, prompt_logprobs=1))
    return list(output.completions[0].token_ids)


def new_weights(family: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Make other weights of a family."""
    model = make_model(family, **SIZES)
    shake(model, torch.Generator().manual_seed(77))
    return {name: weight.to(device) for name, weight in model.state_dict().items()}


def engine(family: str, way: str = "", ranks: RankGroup | None = None, config: EngineConfig = RANKED) -> LLM:
    """Build an engine that serves a family in a way."""
    device = "cpu" if ranks is None else str(ranks.device)
    model = moved(make_model(family, **SIZES), device)
    draft = moved(make_model(family, **{**SIZES, "num_hidden_layers": 1}), device) if way == "drafts" else None
    return LLM(model, replace(config, overlap=way == "overlap"), ranks=ranks, draft_model=draft)


def _serve(group: RankGroup, mode: str, family: str) -> dict[str, Any]:
    family, _, way = family.partition(":")
    is_compiled_here = mode == "compiled" and group.device.type == "cuda"
    config = replace(ROOMY, compile_model=is_compiled_here) if mode == "compiled" else RANKED
    llm = engine(family, way, group, config)
    if mode == "compiled" and not is_compiled_here:
        llm.core._parts.runner._compiled = CompiledModel(llm.core._model, llm.groups, "aot_eager")
        replay_on_cpu(llm, Again, 2, group.agree)
    written: dict[str, Any] = {"nbytes": llm.core.executor.storage.device_nbytes}

    def change(_: object) -> object:
        return llm.core._model.load_state_dict(llm.part_of(new_weights(family, str(group.device))))

    if group.is_first:
        written["tokens"] = answers(llm)
        if way == "weights":
            llm.set_weights_epoch("new", change=lambda: change("new"))
        written["again"] = answers(llm)
        written["scored"] = scored_answer(llm)
        group.end()
    else:
        written["steps"] = llm.follow(change)
    written["graphs"] = llm.core.capture_state._asdict()
    groups = range(len(llm.core.space.config.groups))
    return {**written, "tables": [llm.core.executor.tables.table(each).tolist() for each in groups]}


def _exchange(group: RankGroup) -> dict[str, Any]:
    """Send copies whose messages have one part or two, and close the group on rank 0, which has sent no step.

    Return how many blocks each copy has here, and their sum; and what was received last.
    """
    copies: list[SentCopy] = []
    received: object = None
    if group.is_first:
        copies = [SentCopy(0, np.arange(count, dtype=np.int32), (1,), is_write=True) for count in NUM_BLOCKS_SENT]
        for copy in copies:
            group.send_copy(copy)
    else:
        while isinstance(received := group.receive(), SentCopy):
            copies.append(received)
    group.close()
    return {"blocks": [[len(each.block_ids), int(each.block_ids.sum())] for each in copies], "received": received}


def _lost(message: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return a method that ends or stops the process after some messages."""
    left = STEPS_BEFORE_DEATH

    def lose(*given: object) -> object:
        nonlocal left
        left -= 1
        answer = message(*given) if left >= 0 or mode != "die" else None
        if left < 0:
            os.kill(os.getpid(), signal.SIGSTOP if mode.startswith("hang") else signal.SIGKILL)
        return answer

    return lose


def _run(group: RankGroup, mode: str, families: Sequence[str]) -> None:
    torch.set_num_threads(1)
    if mode == "hang-first" and group.is_first:
        group.send = _lost(group.send, mode)  # type: ignore[method-assign]
    elif mode in LOSSES and mode != "hang-first" and group.rank == group.size - 1:
        group.receive = _lost(group.receive, mode)  # type: ignore[method-assign]
    written = _exchange(group) if mode == "messages" else {}
    try:
        for family in families:
            written[family] = _serve(group, mode, family)
    except EngineError as problem:
        written["error"] = f"{type(problem).__name__}: {problem}"
    sys.stdout.write(json.dumps(written) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    own_rank, num_ranks, where, on, what, *named = sys.argv[1:]
    patience = PATIENCE if what.startswith("hang") else LAYER
    _run(RankGroup(int(own_rank), int(num_ranks), where, device=on, layer_timeout=patience), what, named)
