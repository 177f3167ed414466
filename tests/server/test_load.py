"""Many clients at once, some of which leave, read slowly or send what is no request: a part of benchmarks/server."""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any, Final, cast

import pytest

from benchmarks.server.load import MAX_TOKENS, Mix, ask_all
from pagedkv import Receipt
from pagedkv.engine import LLM, EngineConfig
from pagedkv.engine.demo.serving import decode, draw_questions
from pagedkv.engine.demo.trained import load_demo
from pagedkv.engine.prompts import chat_token_ids
from pagedkv.probe import compat
from pagedkv.server import LocalEngine, OpenAccess, Served, ServerConfig, Service
from tests.server.serving import local_engine, running
from tests.server.test_exchange import wait_until_idle

NUM_CONNECTIONS: Final = 60
NUM_PROMPTS: Final = 10
MOST_GROWN: Final = 100 * 2**20


def resident_nbytes() -> int:
    """Return the memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_open() -> int:
    """Count open descriptors."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("num_requests", [100, pytest.param(300, marks=pytest.mark.long)])
def test_load_leaves_nothing_behind(num_requests: int) -> None:
    """Answers are those of dense generation, usage is that of the receipts, all blocks and descriptors come back."""
    model, tokenizer = load_demo()
    prompts = [decode(question.prompt.tolist()[1:]) for question in draw_questions(NUM_PROMPTS, 4, 1)]
    ends = compat.end_token_ids(model)
    right = {}
    for prompt in prompts:
        token_ids, _ = compat.dense_generate(
            model, chat_token_ids(tokenizer, [{"role": "user", "content": prompt}]), MAX_TOKENS
        )
        length = next((place for place, token in enumerate(token_ids) if token in ends), len(token_ids))
        right[prompt] = cast("Any", tokenizer).decode(token_ids[:length], skip_special_tokens=True)
    config = EngineConfig(num_blocks=1000, self_test=False, leases=True, beyond_context="clip")
    service = Service(
        LocalEngine(LLM(model, config, tokenizer=tokenizer)), ServerConfig("demo"), OpenAccess(), tokenizer=tokenizer
    )
    served: list[Served] = []
    service.on_served.append(served.append)
    with running(service) as url:
        asyncio.run(ask_all(url, prompts, NUM_CONNECTIONS, Mix(), seed=2))
        wait_until_idle(service)
        num_descriptors, nbytes = num_open(), resident_nbytes()
        served_before = len(served)
        heard = asyncio.run(ask_all(url, prompts * (num_requests // NUM_PROMPTS), NUM_CONNECTIONS, Mix()))
        wait_until_idle(service)
        gc.collect()
        assert num_open() <= num_descriptors + 5
        assert resident_nbytes() <= nbytes + MOST_GROWN
    assert set(heard.statuses) == {200, 400}
    assert heard.num_left > num_requests // 10
    assert {prompt: {right[prompt]} for prompt in heard.answers} == heard.answers
    core = local_engine(service).llm.core
    core.space.check()
    assert core.space.num_live_blocks() == 0
    outputs = [output for each in served for output in each.outputs]
    assert sum((output.receipt for output in outputs), Receipt()) == core.space.statistics().receipts
    read = [each for each in served[served_before:] if each.request.request_id in heard.request_ids]
    assert len(read) == len(heard.request_ids)
    receipts = sum((output.receipt for each in read for output in each.outputs), Receipt())
    assert heard.num_cached == receipts.num_hit > 0
    assert heard.num_prompt + heard.num_generated - len(read) == receipts.num_hit + receipts.num_computed
