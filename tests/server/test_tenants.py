"""Tenants: what one has cached is nothing to another, in hits, numbers and causes; its own it hits."""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from pagedkv.contract.space_config import TenantLimits
from pagedkv.server.config import ApiKeys, Caller
from tests.server.conftest import Running
from tests.server.serving import Script, local_engine, make_service, running

KEYS: Final = {"key of a": "a", "other key of a": "a", "key of b": "b"}
TEXT: Final = "the same long question of everyone " * 8


def salt(tenant: str) -> bytes:
    """Make a salt."""
    return hashlib.sha256(tenant.encode()).digest()


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """Run a server with keys of two tenants, one of which may have few blocks."""
    callers = {hashlib.sha256(key.encode()).hexdigest(): Caller(tenant, salt(tenant)) for key, tenant in KEYS.items()}
    callers[hashlib.sha256(b"key of admin").hexdigest()] = Caller("operations", salt("operations"), is_admin=True)
    script = Script()
    script.write("same long question", "yes")
    service = make_service(script, ApiKeys(callers, {"b": TenantLimits(cap=40)}))
    with running(service) as url:
        yield Running(url, service, script)


def ask(served: Running, key: str | None, text: str = TEXT, **more: object) -> httpx.Response:
    """Ask a question with a key."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "explain": True, **more}
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def cached(answer: httpx.Response) -> int:
    """Return how many tokens hit."""
    usage: dict[str, Any] = answer.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_hits_its_own_and_no_other_does(served: Running) -> None:
    first = ask(served, "key of a")
    assert cached(first) == 0
    other = ask(served, "key of b")
    assert cached(other) == 0
    told = other.json()["cache_explanation"]
    assert told == ask(served, "key of b", "never asked before " * 20).json()["cache_explanation"] | {
        "num_prompt_tokens": told["num_prompt_tokens"]
    }, "the answer to b does not differ from that about content that is not cached"
    assert cached(ask(served, "other key of a")) > 200
    assert cached(ask(served, "key of b")) > 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize"])
def test_without_a_key_nothing_is_served(path: str, served: Running) -> None:
    for headers in ({}, {"Authorization": "Bearer none of them"}, {"x-api-key": "key of c"}):
        answer = httpx.post(f"{served.url}{path}", json={}, headers=headers)
        assert answer.status_code == 401
        assert "none of them" not in answer.text


def test_health_needs_no_key(served: Running) -> None:
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert httpx.get(f"{served.url}/v1/models").status_code == 401


def test_a_salt_in_the_body_is_refused(served: Running) -> None:
    answer = ask(served, "key of b", cache_salt="a")
    assert answer.status_code == 400
    assert "API key" in answer.json()["error"]["message"]


def test_only_administrators_give_priorities(served: Running) -> None:
    assert ask(served, "key of a", priority=-1).status_code == 403
    assert ask(served, "key of admin", priority=-1).status_code == 200


def test_a_tenant_stays_within_its_cap(served: Running) -> None:
    for number in range(4):
        assert ask(served, "key of b", f"{number} fills the cache " * 12).status_code == 200
    shares = local_engine(served.service).llm.core.space.statistics().tenants
    share = next(each for each in shares if each.tenant == "b")
    assert 0 < share.num_cached <= 40
    assert ask(served, "key of b", "too long for its blocks " * 40).status_code in {400, 503}


def test_no_key_is_in_an_answer(served: Running) -> None:
    for text in (
        ask(served, "key of a").text,
        ask(served, "wrong key").text,
        httpx.get(f"{served.url}/openapi.json").text,
    ):
        assert "key of a" not in text
        assert "wrong key" not in text
        assert hashlib.sha256(b"key of a").hexdigest() not in text


def test_metrics_are_for_administrators(served: Running) -> None:
    def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{served.url}/metrics", headers=headers).status_code

    assert [status(key) for key in (None, "key of a", "key of admin")] == [401, 403, 200]
