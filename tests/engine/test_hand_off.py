"""Prefill and decode apart: one engine computes a prompt, another goes on from it, through a tier that both have."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import pytest

from pagedkv.engine import LLM, EngineConfig, EngineRequest, HandOff, Intent, SamplingParams
from pagedkv.errors import ConfigurationError
from pagedkv.tiers import FolderTier, HostTier
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, compare, poison, reference_of

NUM_NEW: Final = 6
PARAMS: Final = SamplingParams(max_tokens=NUM_NEW)
LONG: Final = list(range(20, 90))
SECONDS: Final = 30.0
PREFILL: Final = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from pagedkv.engine import LLM, SamplingParams
from tests.engine.families import make_model
from tests.engine.test_hand_off import LONG, config
folder = Path(sys.argv[1])
for family in sys.argv[2:]:
    llm = LLM(make_model(family), config(folder / family))
    llm.generate([LONG], SamplingParams(max_tokens=1))
    print(json.dumps(asdict(llm.hand_over(LONG))))
LLM(make_model("llama"), config(folder / "ended")).generate([LONG], SamplingParams(max_tokens=1))
"""  # and the process ends: stores are given the time to write


def config(folder: Path) -> EngineConfig:
    """Return the settings of both engines."""
    tier = FolderTier(folder, "64MiB", loads="always", deadline_s=SECONDS)
    return replace(CONFIG, num_blocks=60, max_tokens=100, max_batched_tokens=64, warm_up=False, tiers=(tier,))


def test_of_a_prompt_that_was_never_stored_nothing_is_listed(tmp_path: Path) -> None:
    """Its entries were listed, and all of its tokens told to be there."""
    model = make_model("llama")
    prefill, decoding = LLM(model, config(tmp_path)), LLM(model, config(tmp_path))
    prefill.generate([LONG], PARAMS)
    hand_off = prefill.hand_over(LONG)
    assert decoding.take_over(hand_off, [*LONG[:40], 1, *LONG[41:]]) == 0
    assert decoding.take_over(hand_off, LONG, salt=b"another") == 0
    assert decoding.tier_statistics()[0].store.num_entries == 0
    assert decoding.take_over(hand_off, [*LONG[:66], 1, 2]) == 64, "what follows is free"
    assert decoding.take_over(replace(hand_off, prompt=""), LONG) == 64


def decoded(llm: LLM) -> EngineRequest:
    """Answer the prompt."""
    (request,) = llm.submit([LONG], PARAMS)
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    return request


@pytest.mark.parametrize(
    "num_tokens",
    [{"gemma3_text": 68, "lfm2": 64}, pytest.param({"llama": 64, "deepseek_v32": 64}, marks=pytest.mark.long)],
)
def test_a_process_computes_prompts_and_other_engines_decode_them(num_tokens: dict[str, int], tmp_path: Path) -> None:
    """One that runs before anything is stored takes a prompt over; one that is built afterwards hits."""
    running = {family: LLM(make_model(family), config(tmp_path / family)) for family in num_tokens}
    command = [sys.executable, "-c", PREFILL, str(tmp_path), *num_tokens]
    root = Path(__file__).parents[2]
    told = subprocess.run(command, check=True, timeout=120, cwd=root, capture_output=True, text=True).stdout
    for (family, decoding), line in zip(running.items(), told.splitlines()[-len(running) :], strict=True):
        poison(decoding)
        hand_off = HandOff(**json.loads(line))
        assert hand_off.num_tokens == num_tokens[family]
        assert decoding.take_over(hand_off, LONG) == num_tokens[family]
        request = decoded(decoding)
        compare([request], reference_of(family, [LONG], NUM_NEW))
        assert sum(request.num_loaded_tokens.values()) == num_tokens[family]
    request = decoded(LLM(make_model("llama"), config(tmp_path / "ended")))
    compare([request], reference_of("llama", [LONG], NUM_NEW))
    assert sum(request.num_loaded_tokens.values()) == 64


def test_what_was_not_handed_over_is_computed(tmp_path: Path) -> None:
    """A negative control, and the reason for a hand-off: a store does not look for what others wrote later."""
    model = make_model("llama")
    decoding, prefilling = LLM(model, config(tmp_path)), LLM(model, config(tmp_path))
    prefilling.generate([LONG], PARAMS)
    hand_off = prefilling.hand_over(LONG)
    assert (hand_off.num_tokens, hand_off.run_tokens) == (64, 32)
    assert [[number for number, _ in runs] for runs in hand_off.runs.values()] == [[0, 1]]
    decoding.generate([LONG], PARAMS)
    assert decoding.tier_statistics()[0].num_loaded_tokens == 0


def test_another_fingerprint_a_shorter_prompt_or_no_tier_is_refused(tmp_path: Path) -> None:
    model = make_model("llama")
    prefilling = LLM(model, config(tmp_path))
    prefilling.generate([LONG], PARAMS)
    hand_off = prefilling.hand_over(LONG)
    other = LLM(make_model("mistral"), config(tmp_path / "other"))
    with pytest.raises(ConfigurationError, match="both need the same weights"):
        other.take_over(hand_off, LONG)
    same = LLM(model, config(tmp_path))
    with pytest.raises(ConfigurationError, match="64 tokens of its prompt, and this prompt has 20"):
        same.take_over(hand_off, LONG[:20])
    bare = replace(config(tmp_path), tiers=())
    with pytest.raises(ConfigurationError, match="a hand-off needs a tier that both engines have"):
        LLM(model, bare).take_over(hand_off, LONG)
    with pytest.raises(ConfigurationError, match="a hand-off needs a tier"):
        LLM(model, bare).hand_over(LONG)
    with pytest.raises(ConfigurationError, match="and this engine has \\['host'\\]"):
        LLM(model, replace(bare, tiers=(HostTier("16MiB"),))).take_over(hand_off, LONG)
    with pytest.raises(ConfigurationError, match="hand_off"):
        same.take_over(asdict(hand_off), LONG)  # type: ignore[arg-type]


def test_another_salt_finds_nothing_and_the_same_one_does(tmp_path: Path) -> None:
    model = make_model("llama")
    decoding, prefilling = LLM(model, config(tmp_path)), LLM(model, config(tmp_path))
    prefilling.generate([LONG], PARAMS, Intent(salt=b"a"))
    assert prefilling.hand_over(LONG).num_tokens == 0
    hand_off = prefilling.hand_over(LONG, salt=b"a")
    decoding.take_over(hand_off, LONG, salt=b"b")
    decoding.generate([LONG], PARAMS, Intent(salt=b"b"))
    assert decoding.tier_statistics()[0].num_loaded_tokens == 0, "announced under names that are not there"
    assert decoding.take_over(hand_off, LONG, salt=b"a") == 64
    decoding.generate([LONG], PARAMS, Intent(salt=b"a"))
    assert decoding.tier_statistics()[0].num_loaded_tokens == 64


def test_what_has_no_room_is_not_announced_and_nothing_is_deleted(tmp_path: Path) -> None:
    model = make_model("llama")
    prefilling = LLM(model, config(tmp_path))
    prefilling.generate([LONG], PARAMS)
    hand_off = prefilling.hand_over(LONG)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    tiny = replace(config(tmp_path), tiers=(FolderTier(tmp_path / "tiny", "20KiB", deadline_s=SECONDS),))
    assert LLM(model, tiny).take_over(hand_off, LONG) < 64, "the tier of its own medium has less room"
    assert set(files) <= set(tmp_path.rglob("*"))
