"""KV events of a server: what its engine caches is what followers know, also while it makes no steps."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import httpx
import pytest

from pagedkv.cli.server_building import publish_events
from pagedkv.events import EventFollower, follow
from pagedkv.routing import IndexState, ReplicaIndex
from pagedkv.server import Service
from pagedkv.server.engine_process import EventEndpoints
from tests.server.serving import Script, local_engine, make_service, running

LOCAL: Final = "tcp://127.0.0.1:*"
PATIENCE_S: Final = 120.0


@dataclass(frozen=True)
class Published:
    """A server that runs and publishes its events.

    Args:
        url: its address; service: what serves; endpoints: of events, and of requests.
    """

    url: str
    service: Service
    endpoints: tuple[str, str]

    def complete(self, prompt: str) -> None:
        """Ask for an answer."""
        body = {"model": "small", "prompt": prompt, "max_tokens": 2}
        assert httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200

    @property
    def num_blocks(self) -> int:
        """Blocks that are cached."""
        space = local_engine(self.service).llm.core.space
        return local_engine(self.service).call_soon(lambda _: len(space.stored_blocks())).result(PATIENCE_S)


@pytest.fixture(scope="module")
def published() -> Iterator[Published]:
    service = make_service(Script(), events=True)
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.echo", lambda line, **_: told.append(line))
        with (
            publish_events(service, local_engine(service), EventEndpoints(LOCAL, LOCAL, "kv")),
            running(service) as url,
        ):
            events, requests = re.findall(r"are at (tcp://127.0.0.1:\d+)", "\n".join(told))
            yield Published(url, service, (events, requests))


class Watcher:
    """An index that follows a server."""

    def __init__(self, published: Published, follower: EventFollower) -> None:
        self.published, self.follower = published, follower
        self.index = ReplicaIndex(local_engine(published.service).llm.core.space.config.groups)
        self.index.add_replica("a")

    def watch_until(self, is_enough: Callable[[], bool]) -> None:
        """Poll until it is."""
        ends_at = time.monotonic() + PATIENCE_S
        while not is_enough():
            assert time.monotonic() < ends_at, self.index.view("a")
            for message in self.follower.poll(0.1):
                follow(self.index, "a", message, time.monotonic())

    def catch_up(self) -> None:
        """Poll until the index has as many blocks as the engine, and says that it is exact."""
        num_blocks = self.published.num_blocks
        self.watch_until(
            lambda: self.index.state("a") is IndexState.EXACT and self.index.view("a").num_blocks == num_blocks
        )


def test_followers_know_what_the_engine_has_cached(published: Published) -> None:
    published.complete("It begins with something that is cached before anybody follows. " * 3)
    groups = local_engine(published.service).llm.core.space.config.groups
    with EventFollower(*published.endpoints, groups, topic="kv") as follower:
        watcher = Watcher(published, follower)
        assert published.num_blocks > 10
        watcher.catch_up()
        prompt = "Another prompt, of which all whole blocks are cached once it was answered. " * 2
        published.complete(prompt)
        watcher.catch_up()
        tokens = published.service.encode(prompt)
        assert watcher.index.hits(watcher.index.hash([*tokens, 1]))["a"] == len(tokens) // 16 * 16


def test_a_reset_of_an_idle_engine_is_told_too(published: Published) -> None:
    published.complete("Something that is cached now, and not any more after the reset of the cache.")
    engine = local_engine(published.service)
    with EventFollower(*published.endpoints, engine.llm.core.space.config.groups) as follower:
        watcher = Watcher(published, follower)
        watcher.catch_up()
        assert watcher.index.view("a").num_blocks > 0
        engine.call_soon(lambda llm: llm.reset_prefix_cache()).result(PATIENCE_S)
        watcher.watch_until(lambda: watcher.index.view("a").num_blocks == 0)


def test_an_error_between_two_steps_is_the_callers(published: Published) -> None:
    with pytest.raises(ZeroDivisionError):
        local_engine(published.service).call_soon(lambda _: 1 // 0).result(PATIENCE_S)
