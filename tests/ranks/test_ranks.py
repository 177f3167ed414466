"""Two and four processes answer as one does, with equal tables; where one dies, all end with a clear error."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig
from pagedkv.engine.ranks import INLINE_NBYTES, RankGroup
from pagedkv.engine.sharding import shard
from pagedkv.errors import ConfigurationError, EngineError, UnsupportedModelError
from pagedkv.tiers import HostTier
from tests.choosing import long_but
from tests.engine.families import make_model
from tests.ranks.rank_process import NUM_BLOCKS_SENT, RANKED, SIZES, answers, engine, new_weights, scored_answer
from tests.ranks.running import free_address, run_ranks

LATENTS: Final = ("deepseek_v3",)
"""Families whose blocks are equal on all ranks."""
PROCESS: Final = "tests.ranks.rank_process"


def run(size: int, families: Sequence[str], mode: str = "serve") -> list[dict[str, Any]]:
    """Run all ranks; return what each of them wrote, {} of one that died."""
    return run_ranks(PROCESS, size, "cpu", mode, *families)


@pytest.mark.parametrize(
    ("size", "families"),
    [
        (2, ("llama", "gemma2", "deepseek_v3", "llama:overlap", "llama:drafts", "llama:weights")),
        pytest.param(4, ("llama", "llama:overlap", "llama:drafts", "llama:weights"), marks=pytest.mark.long),
        pytest.param(2, ("qwen3", "mistral", "llama", "mixtral", "qwen3:overlap"), marks=pytest.mark.long),
        pytest.param(4, ("gemma2", "qwen3", "mistral"), marks=pytest.mark.long),
    ],
)  # four in make test: tests/ranks/test_hand_off.py
def test_several_ranks_answer_as_one(size: int, families: Sequence[str]) -> None:
    """By overlapped steps, with a draft model and with new weights too."""
    ranks = run(size, families)
    for each in families:
        family, _, way = each.partition(":")
        llm = engine(family, way)
        mine = [rank[each] for rank in ranks]
        assert mine[0]["tokens"] == [[list(one) for one in some] for some in answers(llm)], each
        if way == "weights":
            llm.set_weights_epoch("new", change=partial(llm.core._model.load_state_dict, new_weights(family)))
        assert mine[0]["again"] == [[list(one) for one in some] for some in answers(llm)], each
        assert (mine[0]["again"] == mine[0]["tokens"]) == (way != "weights"), each
        assert [rank["tables"] for rank in mine[1:]] == [mine[0]["tables"]] * (size - 1), each
        assert all(rank["steps"] > 10 for rank in mine[1:])
        if way != "drafts":  # whose blocks are whole
            num_parts = 1 if family in LATENTS else 2
            whole = llm.core.executor.storage.device_nbytes
            assert {rank["nbytes"] for rank in mine} == {whole // num_parts}, "each rank stores one of two KV heads"


def test_messages_of_one_part_and_of_two_arrive_and_ranks_end_in_order_without_a_step() -> None:
    first, other = run(2, [], "messages")
    assert first["received"] is other["received"] is None
    assert first["blocks"] == other["blocks"]
    assert [count for count, _ in first["blocks"]] == list(NUM_BLOCKS_SENT)
    assert INLINE_NBYTES // 4 in range(NUM_BLOCKS_SENT[2], NUM_BLOCKS_SENT[-2])


@pytest.mark.long
def test_compiled_layers_and_captured_steps_answer_as_one_process() -> None:
    ranks = run(2, ["llama"], "compiled")
    mine = [each["llama"] for each in ranks]
    llm = LLM(make_model("llama", **SIZES), RANKED)
    assert mine[0]["tokens"] == mine[0]["again"] == [[list(one) for one in each] for each in answers(llm)]
    assert mine[0]["scored"] == scored_answer(llm)
    assert mine[0]["graphs"] == mine[1]["graphs"]
    assert mine[0]["graphs"]["refusal"] is None
    assert mine[0]["graphs"]["num_graphs"] > 2


@pytest.mark.parametrize("mode", long_but((), ("die", "die-within")))
def test_a_rank_that_dies_ends_all_with_a_clear_error(mode: str) -> None:
    ranks = run(2, ["llama"], mode)
    assert ranks[1] == {}
    assert ranks[0]["error"].startswith("RankLostError: rank 0 of 2 cannot finish")
    assert "another rank has ended or does not answer" in ranks[0]["error"]
    assert "llama" not in ranks[0]


def parts(model_name: str, size: int) -> tuple[PreTrainedModel, list[PreTrainedModel]]:
    """Return a whole model, and its parts."""
    pieces = [make_model(model_name, **SIZES) for _ in range(size)]
    for rank, piece in enumerate(pieces):
        shard(piece, rank, size, lambda _: None)
    return make_model(model_name, **SIZES), pieces


def test_parts_are_the_whole() -> None:
    whole, pieces = parts("llama", 4)
    layer = whole.model.layers[0]
    ours = [piece.model.layers[0] for piece in pieces]
    assert sum(piece.mlp.up_proj.weight.shape[0] for piece in ours) == layer.mlp.up_proj.weight.shape[0]
    assert sum(piece.self_attn.o_proj.weight.shape[1] for piece in ours) == layer.self_attn.o_proj.weight.shape[1]
    keys = layer.self_attn.k_proj.weight
    for rank, piece in enumerate(ours):
        assert piece.self_attn.k_proj.weight.equal(keys[8 * (rank // 2) : 8 * (rank // 2 + 1)]), "repeated heads"
        assert piece.self_attn.num_key_value_groups == 1


def test_a_rank_takes_its_part_of_whole_weights() -> None:
    whole = make_model("qwen2", **SIZES)  # with biases
    for rank in range(4):
        piece = make_model("qwen2", **SIZES)
        part = shard(piece, rank, 4, lambda _: None).of(whole.state_dict())
        mine = piece.state_dict()
        assert part.keys() == mine.keys()
        assert all(part[name].equal(weight) for name, weight in mine.items())
        piece.load_state_dict(part)


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no base_model_tp_plan"):
        shard(make_model("falcon_h1"), 0, 2, lambda _: None)
    with pytest.raises(UnsupportedModelError, match="cannot be cut into 3 equal parts"):
        shard(make_model("llama", **SIZES), 0, 3, lambda _: None)
    group = RankGroup(0, 1, free_address())
    model = make_model("llama", **SIZES)
    with pytest.raises(ConfigurationError, match="cannot be its own draft model"):
        LLM(model, RANKED, ranks=group, draft_model=model)
    with pytest.raises(ConfigurationError, match="no tiers beside a draft model"):
        LLM(model, replace(RANKED, tiers=(HostTier("1MiB"),)), ranks=group, draft_model=make_model("llama", **SIZES))
    tiered = LLM(model, replace(RANKED, tiers=(HostTier("1MiB"),)), ranks=group)
    with pytest.raises(ConfigurationError, match="with tiers has no new weights"):
        tiered.set_weights_epoch("new")
    group.close()
    with pytest.raises(ConfigurationError, match="RANK, WORLD_SIZE"):
        RankGroup.from_environment()
    with pytest.raises(ConfigurationError, match="only ranks other than the first follow"):
        LLM(make_model("llama"), EngineConfig(num_blocks=20, self_test=False)).follow()
    with pytest.raises(ConfigurationError, match=r"rank 1 has device 'cuda:7', and there are \d GPUs"):
        RankGroup(1, 2, "127.0.0.1:1", device="cuda:7")
    with pytest.raises(ConfigurationError, match="a rank's device is 'cpu', 'cuda' or 'cuda:N', got 'gpu'"):
        RankGroup(1, 2, "127.0.0.1:1", device="gpu")


@pytest.mark.long
@pytest.mark.parametrize(("mode", "waiting"), [("hang", 0), ("hang-first", 1)])
def test_a_rank_that_hangs_ends_the_other_with_a_clear_error(mode: str, waiting: int) -> None:
    ranks = run_ranks(PROCESS, 2, "cpu", mode, "llama", enough=waiting)
    assert ranks[waiting]["error"].startswith(f"RankLostError: rank {waiting} of 2 cannot finish")


def test_a_group_that_is_closed_is_not_used_again() -> None:
    group = RankGroup(0, 1, free_address())
    with pytest.raises(ConfigurationError, match=r"has a group of torch\.distributed already: close it first"):
        RankGroup(0, 1, free_address())
    group.meet()
    group.close()
    group.close()
    with pytest.raises(EngineError, match="the ranks' group is closed"):
        group.meet()
    again = RankGroup(0, 1, free_address())
    group.close()
    again.meet()  # the end of the first group has not ended it
    again.close()


def test_a_model_on_another_device_is_refused() -> None:
    group = RankGroup(0, 1, free_address())
    try:
        group.device = torch.device("cuda", 0)
        with pytest.raises(ConfigurationError, match="has its model on cpu, and its device is cuda:0: move it there"):
            LLM(make_model("llama", **SIZES), RANKED, ranks=group)
    finally:
        group.device = torch.device("cpu")
        group.close()
