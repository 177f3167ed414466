"""A model whose context is larger than the memory for keys and values: answers end where the pool does."""

from collections.abc import Iterator

import httpx
import pytest

from tests.server.conftest import Running
from tests.server.serving import Script, make_service, running

CONTEXT = 131_072
HELD = 599 * 16
"""Tokens in the blocks of the pool, without the null block."""


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Run a server whose pool holds less than a sequence may have."""
    script = Script()
    service = make_service(script, longest=CONTEXT)
    with running(service) as url:
        yield Running(url, service, script)


def test_a_chat_without_max_tokens_is_answered(small: Running) -> None:
    small.script.write("open", "fine")
    chat = {"model": "small", "messages": [{"role": "user", "content": "open"}]}
    for n in (1, 3):
        answer = httpx.post(f"{small.url}/v1/chat/completions", json={**chat, "n": n}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert {each["message"]["content"] for each in answer.json()["choices"]} == {"fine"}
    large = httpx.post(f"{small.url}/v1/chat/completions", json={**chat, "max_tokens": CONTEXT - 100}, timeout=60)
    assert large.status_code == 200


def test_models_promise_what_the_pool_holds(small: Running) -> None:
    assert httpx.get(f"{small.url}/v1/models").json()["data"][0]["max_model_len"] == HELD
    assert small.service.engine.facts.context == CONTEXT


def test_an_answer_ends_where_the_pool_does(small: Running) -> None:
    for num_left in (3, 1):
        wish = {"model": "small", "prompt": [7] * (HELD - num_left), "max_tokens": 100, "ignore_eos": True}
        answer = httpx.post(f"{small.url}/v1/completions", json=wish, timeout=60).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == num_left
    refused = httpx.post(f"{small.url}/v1/completions", json={**wish, "prompt": [7] * HELD}, timeout=60)
    assert refused.status_code == 400
    assert f"the longest sequence {HELD:,}" in refused.json()["error"]["message"]
