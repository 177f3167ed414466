"""Engines that share a tier: one finds while it runs what the other has stored."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.tiers import FolderTier
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, compare, reference

SECONDS: Final = 30.0
LONG: Final = list(range(20, 90))


def config(folder: Path, rescan_s: float | None) -> EngineConfig:
    tier = FolderTier(folder, "64MiB", loads="always", deadline_s=SECONDS, rescan_s=rescan_s)
    return replace(CONFIG, num_blocks=60, max_tokens=100, max_batched_tokens=64, warm_up=False, tiers=(tier,))


def test_an_engine_loads_what_another_one_has_stored_since_both_run(tmp_path: Path) -> None:
    model = make_model("llama")
    one, other, without = (LLM(model, config(tmp_path, rescan_s)) for rescan_s in (None, 0.01, None))
    one.generate([LONG], SamplingParams(max_tokens=1))
    assert one.flush_tiers(SECONDS)
    until, num_stored = time.monotonic() + SECONDS, one.tier_statistics()[0].store.num_entries
    while other.tier_statistics()[0].store.num_found < num_stored:
        assert time.monotonic() < until, "it is not found"
        threading.Event().wait(0.005)
    for llm, num_loaded in ((other, 64), (without, 0)):
        (request,) = llm.submit([LONG], SamplingParams(max_tokens=4))
        while llm.core.has_work:
            llm.step()
            llm.core.space.check()
        compare([request], reference(model, [LONG], 4))
        assert sum(request.num_loaded_tokens.values()) == num_loaded
