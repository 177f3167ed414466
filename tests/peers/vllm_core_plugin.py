"""A pytest plugin under which vLLM's own suites of its KV-cache core run, as they are, on a `BlockSpace`.

It is loaded into a process of its own (:mod:`.test_vllm_core`), in which ``tests`` is vLLM's folder. Before any module
takes vLLM's `KVCacheManager`, ours is in its place (:mod:`vllm_core_adapter`), unless ``PAGEDKV_CORE=theirs``. Of each
case it tells what became of it, and how often rows of a space were allocated or grown for it. The configurations of
models that the suites ask a hub for lie in a folder in the hub's form, without weights.
"""

import json
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

OPT: Final = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072,
    "num_attention_heads": 12, "num_hidden_layers": 12, "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
    "vocab_size": 50272, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "do_layer_norm_before": True,
    "torch_dtype": "float16",
}  # fmt: skip
LLAMA: Final = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096, "vocab_size": 32064,
    "torch_dtype": "float16",
}  # fmt: skip
QWEN: Final = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 40960, "vocab_size": 151936, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS: Final = {
    "facebook/opt-125m": OPT,
    "facebook/opt-350m": {**OPT, "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16,
                          "num_hidden_layers": 24, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "llava-hf/llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000,
        "pad_token_id": 32001, "projector_hidden_act": "gelu", "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default", "vocab_size": 32064, "torch_dtype": "float16",
        "text_config": LLAMA,
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336,
                          "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
                          "patch_size": 14, "projection_dim": 768, "vocab_size": 32000},
    },
    "Qwen/Qwen3-0.6B": {**QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "Qwen/Qwen1.5-7B": {**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
}  # fmt: skip
"""What is asked of the models here: their shapes."""


def _write_models() -> None:
    revision = "0" * 40
    for name, config in MODELS.items():
        folder = Path(os.environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps(config))


def _put_in_place() -> Any:  # noqa: ANN401 - the adapter's class, which only this process can import
    """Put our class where modules that are imported from now on find vLLM's."""
    import vllm.v1.core.kv_cache_manager as theirs  # noqa: PLC0415 - before all others, but behind the models
    from vllm_core_adapter import KVCacheManager  # noqa: PLC0415

    theirs.KVCacheManager = KVCacheManager
    return KVCacheManager


_write_models()
OURS: Final = _put_in_place() if os.environ["PAGEDKV_CORE"] == "ours" else None


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Generator[pytest.LogCaptureFixture]:
    """Stand in for a fixture of vLLM's conftest, which imports what needs a GPU."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    before = logger.level
    logger.setLevel(logging.DEBUG)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(before)


@pytest.fixture
def default_vllm_config() -> Generator[object]:
    """Stand in for another fixture of vLLM's conftest."""
    from vllm.config import VllmConfig, set_current_vllm_config  # noqa: PLC0415

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note where the count of actions begins."""
    item.stash[BEFORE] = OURS.num_actions if OURS is not None else 0


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any]:
    """Tell what became of a case: its failure in any phase, or its call."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        why = "" if call.excinfo is None else call.excinfo.exconly().splitlines()[0][:300]
        actions = OURS.num_actions - item.stash[BEFORE] if OURS is not None else 0
        name = item.nodeid.removeprefix("tests/v1/")
        _tell({"case": name, "outcome": report.outcome, "why": why, "actions": actions})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Tell of files that cannot be collected."""
    if report.failed:
        why = str(report.longrepr).splitlines()[-1]
        _tell({"case": report.nodeid.removeprefix("tests/v1/"), "outcome": "failed", "why": why, "actions": 0})


def _tell(outcome: dict[str, object]) -> None:
    with Path(os.environ["PAGEDKV_OUTCOMES"]).open("a") as told:
        told.write(json.dumps(outcome) + "\n")


BEFORE: Final = pytest.StashKey[int]()
