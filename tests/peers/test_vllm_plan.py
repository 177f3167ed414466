"""``pagedkv plan --engine`` with a real vLLM on a CPU: make test-peers VLLM_CPU=FOLDER."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pagedkv.planner.recording.engine_pool import EnginePool, read_engine
from tests.cli.command import run
from tests.peers.test_vllm_route import BLOCK_SIZE, NUM_BLOCKS, VllmServer, make_model

pytestmark = pytest.mark.skipif(
    "PAGEDKV_VLLM_CPU" not in os.environ or not os.environ["PAGEDKV_VLLM_CPU"], reason="no environment with vllm-cpu"
)


def test_a_plan_begins_with_the_cache_of_a_running_vllm(tmp_path: Path) -> None:
    model, trace = tmp_path / "model", tmp_path / "trace.jsonl"
    make_model(model)
    rows = [{"timestamp": 1000 * n, "input_length": 64, "output_length": 8, "hash_ids": [1]} for n in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = VllmServer(model, tmp_path / "log")
    try:
        server.await_health()
        assert read_engine(server.engine.url) == EnginePool(str(model), NUM_BLOCKS, BLOCK_SIZE, None)
        options = ("--engine", server.engine.url, "--eviction", "lru", "--load", 1, "--jobs", 1, "--json", "-")
        ended = run("plan", trace, *options)
    finally:
        server.kill()
    assert ended.exit_code == 0, ended.output
    plan: dict[str, Any] = json.loads(ended.stdout)
    nbytes = NUM_BLOCKS * BLOCK_SIZE * 2 * 2 * 32 * 4  # layers, keys and values, elements of one head, float32
    assert plan["settings"][0]["choices"]["memory"] == f"{nbytes / 2**30:g} GiB"
