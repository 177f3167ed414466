"""Prompts go from engines on one, two and four ranks to one another, through a tier with blocks of all heads."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch

from pagedkv.device import KeyValueShape, StateShape
from pagedkv.engine import LLM, HandOff, RankGroup, SamplingParams
from pagedkv.engine.ranked_content import RankedContent, WholeModel
from pagedkv.errors import ConfigurationError
from pagedkv.probe.layers import EngineGroups
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, poison, reference
from tests.ranks.hand_off_process import NUM_NEW, config, model_of, prompt_of, take_over_and_answer
from tests.ranks.rank_process import SIZES
from tests.ranks.running import free_address, run_ranks

FAMILIES: Final = ("llama", "gemma2", "qwen3")
OF_TWO: Final = 20
OF_ONE: Final = 40
OF_FOUR: Final = 60
NUM_STORED: Final = {"llama": 64, "gemma2": 68, "qwen3": 64}


PROCESS: Final = "tests.ranks.hand_off_process"


def run(size: int, folder: Path, first: int, hand_offs: Mapping[str, Any]) -> dict[str, Any]:
    """Run all ranks of an engine; return what rank 0 wrote, by family."""
    wishes = {"families": FAMILIES, "folder": str(folder), "first": first, "hand_offs": hand_offs}
    ranks = run_ranks(PROCESS, size, wishes)
    assert all(each[family]["steps"] for each in ranks[1:] for family in FAMILIES)
    return ranks[0]


def require_right(family: str, answers: list[dict[str, Any]], *firsts: int) -> None:
    """Compare answers with dense generation; all but the last tokens of their prompts were loaded."""
    expected = reference(model_of(family), [prompt_of(first) for first in firsts], NUM_NEW)
    assert len(answers) == len(firsts)
    for answer, dense in zip(answers, expected, strict=True):
        assert answer["num_loaded"] == NUM_STORED[family], family
        assert answer["token_ids"][: dense.num_certain] == dense.token_ids[: dense.num_certain], family


@pytest.mark.long
def test_prompts_go_between_one_two_and_four_ranks(tmp_path: Path) -> None:
    of_two = run(2, tmp_path, OF_TWO, {})
    own = {family: LLM(model_of(family), config(tmp_path / family)) for family in FAMILIES}
    from_two = {family: (OF_TWO, of_two[family]["hand_off"]) for family in FAMILIES}
    from_one = {}
    for family, llm in own.items():
        llm.generate([prompt_of(OF_ONE)], SamplingParams(max_tokens=1))
        from_one[family] = (OF_ONE, json.loads(json.dumps(asdict(llm.hand_over(prompt_of(OF_ONE))))))
        assert from_one[family][1]["fingerprint"] == from_two[family][1]["fingerprint"]
        assert from_one[family][1]["runs"] == from_two[family][1]["runs"], "entries of the same bytes"
    of_four = run(4, tmp_path, OF_FOUR, {family: [from_two[family], from_one[family]] for family in FAMILIES})
    from_four = {family: (OF_FOUR, of_four[family]["hand_off"]) for family in FAMILIES}
    foreign = {"llama": [(OF_ONE, from_one["qwen3"][1])]}
    again = run(
        2,
        tmp_path,
        OF_TWO,
        {family: [from_four[family], from_one[family], *foreign.get(family, [])] for family in FAMILIES},
    )
    for family, llm in own.items():
        require_right(family, of_four[family]["answers"], OF_TWO, OF_ONE)
        require_right(family, again[family]["answers"][:2], OF_FOUR, OF_ONE)
        poison(llm)
        require_right(family, take_over_and_answer(llm, [from_two[family], from_four[family]]), OF_TWO, OF_FOUR)
    assert "both need the same weights" in again["llama"]["answers"][2]["refused"]
    other = LLM(make_model("mistral", **SIZES), config(tmp_path / "other"))
    with pytest.raises(ConfigurationError, match="both need the same weights"):
        other.take_over(HandOff(**of_two["llama"]["hand_off"]), prompt_of(OF_TWO))
    for family in FAMILIES:
        bare = LLM(model_of(family), replace(config(tmp_path), tiers=()))
        assert bare.import_(tmp_path / f"{family}.prefix") == of_two[family]["exported"] > 0
        tokens = bare.generate([prompt_of(OF_TWO)], SamplingParams(max_tokens=NUM_NEW))[0].token_ids
        (dense,) = reference(model_of(family), [prompt_of(OF_TWO)], NUM_NEW)
        assert list(tokens)[: dense.num_certain] == dense.token_ids[: dense.num_certain]


@pytest.mark.long
def test_a_rank_that_dies_while_its_blocks_are_read_ends_all_with_a_clear_error(tmp_path: Path) -> None:
    wishes = {"families": ["llama"], "folder": str(tmp_path), "first": OF_TWO, "hand_offs": {}, "dies": True}
    ranks = run_ranks(PROCESS, 2, wishes)
    assert ranks[1] == {}
    assert "RankLostError" in ranks[0]["error"]
    assert "llama" not in ranks[0]


def test_after_the_ranks_have_ended_nothing_is_read(tmp_path: Path) -> None:
    """Ranks that follow another engine by then would send blocks of that one."""
    group = RankGroup(0, 1, free_address())
    try:
        llm = LLM(model_of("llama"), config(tmp_path), ranks=group)
        llm.generate([prompt_of(OF_ONE)], SamplingParams(max_tokens=1))
        hand_off = llm.hand_over(prompt_of(OF_ONE))
        assert hand_off.num_tokens == NUM_STORED["llama"]
        with pytest.raises(ConfigurationError, match="no new weights"):
            llm.set_weights_epoch("other")
        group.end()
        llm.generate([prompt_of(OF_TWO)], SamplingParams(max_tokens=1))
        assert llm.hand_over(prompt_of(OF_TWO)).num_tokens == 0
        assert llm.hand_over(prompt_of(OF_ONE)).runs == hand_off.runs
        bare = LLM(model_of("llama"), replace(config(tmp_path), tiers=()), ranks=group)
        with pytest.raises(ConfigurationError, match="only at rank 0 and with `tiers`"):
            bare.export(prompt_of(OF_ONE), tmp_path / "prefix")
        with pytest.raises(ConfigurationError, match="only at rank 0 and with `tiers`"):
            bare.import_(tmp_path / "prefix")
        with pytest.raises(ConfigurationError, match="a hand-off needs a tier"):
            bare.hand_over(prompt_of(OF_ONE))
    finally:
        group.close()


def test_blocks_that_are_no_parts_of_whole_ones_are_refused() -> None:
    """Groups that differ, states that are split, and scales by head, which each rank has for its own."""
    groups = {family: LLM(make_model(family), CONFIG).groups for family in ("llama", "gemma2", "lfm2")}
    llm = LLM(make_model("llama"), CONFIG)

    def content(whole: EngineGroups, part: EngineGroups) -> RankedContent:
        ranks = cast("RankGroup", None)  # the refusal comes first
        return RankedContent(WholeModel(whole, b""), llm.core._model, part, llm.core.executor.storage, ranks)

    with pytest.raises(ConfigurationError, match="the groups of the whole model"):
        content(groups["gemma2"], groups["llama"])
    own = groups["lfm2"]
    split = [
        replace(each, num_layers=each.num_layers + 1) if isinstance(each, StateShape) else each for each in own.shapes
    ]
    with pytest.raises(ConfigurationError, match="no tiers for states that are split"):
        content(replace(own, shapes=tuple(split)), own)
    own = groups["llama"]
    assert isinstance(own.shapes[0], KeyValueShape)
    scaled = replace(own.shapes[0], dtype=torch.float8_e4m3fn, scaling="head")
    with pytest.raises(ConfigurationError, match="no tiers for scales by head"):
        content(replace(own, shapes=(scaled,)), own)
