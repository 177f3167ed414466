"""Two servers with an inspector: an open one without texts, and one with keys and texts."""

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import httpx
import pytest
from fastapi import FastAPI

from pagedkv.server import ApiKeys, Caller, Service, add_inspector
from tests.engine.tier_bodies import TestBody, tier_over
from tests.server.conftest import Running
from tests.server.serving import Script, local_engine, make_service, running

PRIVATE = "the harbour keeps 41 boats in winter and every one of them has a name"
"""What a tenant asks, which no other tenant is to see."""
STORED = "of this text a tier keeps the first 256 tokens, which are two of its entries. " * 4


def ask(url: str, text: str, key: str = "", num_tokens: int = 3) -> None:
    """Ask a question, and wait for some tokens."""
    body = {"model": "small", "prompt": text, "max_tokens": num_tokens, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-api-key": key} if key else {}, timeout=60)
    assert answer.status_code == 200, answer.text


def _add_inspector(app: FastAPI, service: Service, *, has_texts: bool = False) -> None:
    add_inspector(app, service, local_engine(service), has_texts=has_texts)


@pytest.fixture(scope="session")
def watched() -> Iterator[Running]:
    """Run a server without keys that has served some requests."""
    script = Script()
    service = make_service(script)
    with running(service, adds=_add_inspector) as url:
        for text in (PRIVATE, PRIVATE, PRIVATE[:40] + "something else altogether", "short"):
            ask(url, text)
        yield Running(url, service, script)


@dataclass(frozen=True)
class Tiered(Running):
    """A server with a tier."""

    body: TestBody


@pytest.fixture(scope="session")
def tiered() -> Iterator[Tiered]:
    """Run a server whose tier has what was asked, and whose device has none of it any more."""
    script, body = Script(), TestBody()
    service = make_service(script, tiers=(tier_over(body),))
    with running(service, adds=_add_inspector) as url:
        ask(url, STORED)
        forget_device(service)
        yield Tiered(url, service, script, body)


def forget_device(service: Service) -> None:
    """Wait until all is stored in the tiers, and empty device memory."""
    engine = local_engine(service)
    assert asyncio.run(engine.between_steps(lambda llm: llm.flush_tiers(60.0)))
    asyncio.run(engine.between_steps(lambda llm: llm.core.space.reset_prefix_cache()))


@pytest.fixture(scope="session")
def keyed() -> Iterator[Running]:
    """Run a server with keys whose inspector shows texts; the tenants "a" and "root", an administrator, have asked."""
    callers = {
        hashlib.sha256(name.encode()).hexdigest(): Caller(name, name.encode() * 8, name == "root")
        for name in ("a", "root")
    }
    script = Script()
    service = make_service(script, ApiKeys(callers))
    with running(service, adds=partial(_add_inspector, has_texts=True)) as url:
        ask(url, PRIVATE, "a")
        ask(url, "what operations ask, which fills two blocks", "root")
        yield Running(url, service, script)
