"""Sleep and wake: requests end or are waited for, memory is given back, and afterwards answers are what they were."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedkv.engine import LLM, EngineConfig
from pagedkv.errors import EngineError
from pagedkv.tiers import FolderTier
from tests.server.conftest import Running
from tests.server.serving import Script, local_engine, make_service, running, small_model

PATIENCE_S = 60.0
PROMPT = "the same long question of everyone " * 8


@pytest.fixture
def fresh() -> Iterator[Running]:
    """Run a server of its own."""
    script = Script()
    service = make_service(script)
    with running(service) as url:
        yield Running(url, service, script)


def ask(url: str, **fields: Any) -> httpx.Response:  # noqa: ANN401 - JSON
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def post(url: str, path: str, **query: object) -> httpx.Response:
    return httpx.post(f"{url}/{path}", params=query, timeout=PATIENCE_S)  # type: ignore[arg-type] # texts and numbers


def is_sleeping(url: str) -> bool:
    return bool(httpx.get(f"{url}/is_sleeping").json()["is_sleeping"])


def test_a_server_that_woke_answers_as_before_without_its_cache(fresh: Running) -> None:
    before = ask(fresh.url).json()
    assert ask(fresh.url).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    slept = post(fresh.url, "sleep").json()
    pools = local_engine(fresh.service).llm.core.executor.storage.pools.values()
    assert slept == {"status": "sleeping", "level": 1, "released_bytes": sum(pool.device_nbytes for pool in pools)}
    assert not any(pool.is_awake for pool in pools)
    assert is_sleeping(fresh.url)
    refused = ask(fresh.url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert httpx.get(f"{fresh.url}/ready").status_code == 503
    assert httpx.get(f"{fresh.url}/health").status_code == 200
    assert post(fresh.url, "sleep").json()["released_bytes"] == 0
    assert post(fresh.url, "wake_up", tags="weights").json() == {"status": "sleeping", "tags": ["weights"]}
    assert post(fresh.url, "wake_up").json() == {"status": "awake", "tags": None}
    assert not is_sleeping(fresh.url)
    again = ask(fresh.url).json()
    assert again["choices"] == before["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    local_engine(fresh.service).llm.core.space.check()


def test_a_pause_keeps_the_cache(fresh: Running) -> None:
    ask(fresh.url)
    assert post(fresh.url, "sleep", level=0).json() == {"status": "sleeping", "level": 0, "released_bytes": 0}
    assert ask(fresh.url).status_code == 503
    post(fresh.url, "wake_up", tags="kv_cache")
    assert ask(fresh.url).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_under_way_are_aborted_or_waited_for(mode: str, fresh: Running) -> None:
    answers = []
    arrived = threading.Event()
    local_engine(fresh.service).llm.core.on_entered.append(lambda _: arrived.set())
    num_tokens = 40 if mode == "wait" else 1500
    thread = threading.Thread(target=lambda: answers.append(ask(fresh.url, max_tokens=num_tokens, ignore_eos=True)))
    thread.start()
    assert arrived.wait(PATIENCE_S)
    assert post(fresh.url, "sleep", mode=mode).status_code == 200
    assert is_sleeping(fresh.url)
    thread.join(PATIENCE_S)
    (answer,) = answers
    if mode == "wait":
        assert answer.json()["usage"]["completion_tokens"] == num_tokens
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")


@pytest.mark.parametrize(
    ("path", "query"), [("sleep", {"level": 2}), ("sleep", {"mode": "keep"}), ("wake_up", {"tags": "x"})]
)
def test_what_is_not_served_is_refused_with_its_name(path: str, query: dict[str, object], server: Running) -> None:
    answer = post(server.url, path, **query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in query
    assert not is_sleeping(server.url)


def test_tiers_have_what_an_engine_that_slept_had_cached(tmp_path: Path) -> None:
    config = EngineConfig(num_blocks=64, self_test=False, tiers=(FolderTier(tmp_path, 2**24),))
    llm = LLM(small_model(), config)
    prompt = list(range(1, 260))
    (before,) = llm.generate([prompt])
    assert llm.core.sleep() > 0
    with pytest.raises(EngineError, match="sleeps"):
        llm.core.step()
    assert not llm.core.has_work
    llm.core.wake()
    (after,) = llm.generate([prompt])
    assert after.completions == before.completions
    assert after.num_cached_tokens > 0
    llm.core.space.check()


def test_an_engine_with_requests_does_not_sleep() -> None:
    llm = LLM(small_model(), EngineConfig(num_blocks=64, self_test=False))
    (request,) = llm.submit([[1, 2, 3]])
    with pytest.raises(EngineError, match="1 requests are under way"):
        llm.core.sleep()
    while not request.is_finished:
        llm.step()
