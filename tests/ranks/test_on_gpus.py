"""Ranks with a GPU each answer as one GPU does, by graphs; blocks go between engines on any number of ranks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from pagedkv.engine import LLM
from tests.engine.families import make_model, moved
from tests.engine.serving import poison, reference
from tests.ranks.hand_off_process import NUM_NEW, config, model_of, prompt_of, take_over_and_answer
from tests.ranks.rank_process import RANKED, SIZES, answers, new_weights, scored_answer
from tests.ranks.running import run_ranks
from tests.ranks.test_ranks import LATENTS

NUM_GPUS: Final = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="there is no second GPU")

ALL_SIZES: Final = (2, 4)
FAMILIES: Final = ("llama", "gemma2", "qwen3", "mistral", "deepseek_v3", "mixtral")
HOST_EXPERTS: Final = ("mixtral",)
"""Whose experts some versions of transformers look up on the host, with which nothing can be captured."""
HANDED_OVER: Final = ("llama", "qwen3")


def require_gpus(size: int) -> None:
    """Skip the test if there are fewer GPUs than ranks."""
    if size > NUM_GPUS:
        pytest.skip(f"there are {NUM_GPUS} GPUs")


@pytest.mark.parametrize("size", ALL_SIZES)
@pytest.mark.parametrize(("mode", "families"), [("serve", FAMILIES), ("compiled", ("llama", "qwen3"))])
def test_ranks_answer_as_one_gpu_by_graphs(mode: str, families: Sequence[str], size: int) -> None:
    require_gpus(size)
    ranks = run_ranks("tests.ranks.rank_process", size, "cuda", mode, *families)
    for family in families:
        mine = [each[family] for each in ranks]
        one = LLM(moved(make_model(family, **SIZES), "cuda"), RANKED)
        assert mine[0]["tokens"] == mine[0]["again"] == [[list(each) for each in all_] for all_ in answers(one)], family
        assert mine[0]["scored"] == scored_answer(one), family
        assert [each["tables"] for each in mine[1:]] == [mine[0]["tables"]] * (size - 1), family
        graphs = [each["graphs"] for each in mine]
        assert graphs == [graphs[0]] * size, family
        if family in LATENTS:
            assert "unfolds latents" in graphs[0]["refusal"], family
        elif family not in HOST_EXPERTS:
            assert graphs[0]["refusal"] is None, family
            assert graphs[0]["num_graphs"] > 2, family


@pytest.mark.parametrize("size", ALL_SIZES)
def test_overlapped_steps_draft_models_and_new_weights_answer_as_one_gpu(size: int) -> None:
    require_gpus(size)
    ways = ("llama:overlap", "llama:drafts", "llama:weights", "qwen3:overlap")
    ranks = run_ranks("tests.ranks.rank_process", size, "cuda", "serve", *ways)
    for each in ways:
        family, _, way = each.partition(":")
        mine = [rank[each] for rank in ranks]
        one = LLM(moved(make_model(family, **SIZES), "cuda"), RANKED)
        assert mine[0]["tokens"] == [[list(one_) for one_ in some] for some in answers(one)], each
        if way == "weights":
            new = partial(one.core._model.load_state_dict, new_weights(family, "cuda"))
            one.set_weights_epoch("new", change=new)
        assert mine[0]["again"] == [[list(one_) for one_ in some] for some in answers(one)], each
        assert [rank["tables"] for rank in mine[1:]] == [mine[0]["tables"]] * (size - 1), each


@pytest.mark.parametrize("mode", ["die", "die-within", "hang"])
def test_a_lost_rank_ends_all_with_a_clear_error(mode: str) -> None:
    """Also where the GPUs of the others wait for it."""
    size = min(NUM_GPUS, ALL_SIZES[-1])
    ranks = run_ranks("tests.ranks.rank_process", size, "cuda", mode, "llama", enough=0 if mode == "hang" else None)
    assert ranks[-1] == {}
    for rank in ranks[: 1 if mode == "hang" else -1]:
        assert rank["error"].startswith("RankLostError: ")
        assert "another rank has ended or does not answer" in rank["error"]
        assert "llama" not in rank


@pytest.mark.parametrize("size", ALL_SIZES)
def test_prompts_go_between_ranks_and_one_gpu(size: int, tmp_path: Path) -> None:
    require_gpus(size)
    wishes: dict[str, Any] = {"families": HANDED_OVER, "folder": str(tmp_path), "first": 20, "hand_offs": {}}
    first = run_ranks("tests.ranks.hand_off_process", size, {**wishes, "device": "cuda"})[0]
    for family in HANDED_OVER:
        model = moved(model_of(family), "cuda")
        dense = reference(model, [prompt_of(20)], NUM_NEW)
        one = LLM(model, config(tmp_path / family))
        poison(one)
        (answer,) = take_over_and_answer(one, [(20, first[family]["hand_off"])])
        assert answer["num_loaded"] > 60, family
        assert answer["token_ids"][: dense[0].num_certain] == dense[0].token_ids[: dense[0].num_certain], family
        assert one.close()
    hand_offs = {family: [(20, first[family]["hand_off"])] for family in HANDED_OVER}
    again = run_ranks(
        "tests.ranks.hand_off_process", size, {**wishes, "first": 100, "hand_offs": hand_offs, "device": "cuda"}
    )[0]
    for family in HANDED_OVER:
        (answer,) = again[family]["answers"]
        assert answer["num_loaded"] > 60, family
