"""Watch: one snapshot for all watchers that come at about the same time, and none that is old."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.server.inspector import inspected
from pagedkv.server.inspector.inspected import PERIOD_S, REST_PER_WORK, Watch


async def at_once(work: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the work returns
    """Do at once what may wait for the end of a step."""
    return work()


def never() -> bool:
    """Watch without an end."""
    return False


@pytest.mark.parametrize("cost_s", [0.0, 0.1])
def test_a_snapshot_is_shared_until_the_next_may_be_taken(cost_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=50.0)

    def take(version: int, *_: object) -> object:
        clock.now_s += cost_s
        return SimpleNamespace(version=version, now_s=clock.now_s, maps=())

    monkeypatch.setattr(inspected, "take_snapshot", take)
    nothing: Any = None
    watched = Watch(nothing, at_once, history=nothing, inspection=nothing, clock=lambda: clock.now_s)
    rest_s = max(PERIOD_S, REST_PER_WORK * cost_s)

    async def main() -> None:
        first = await watched.latest(0, never)
        clock.now_s += 0.99 * rest_s
        assert await watched.latest(0, never) is first, "of two watchers that come together"
        clock.now_s += 0.02 * rest_s
        second = await watched.latest(0, never)
        assert second.version == first.version + 1, "the first one is old by now"

    asyncio.run(main())


def test_the_end_does_not_wait_for_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that takes long, as with interpreted loops, is followed by a rest of up to a minute."""
    clock = SimpleNamespace(now_s=50.0)

    def take(version: int, *_: object) -> object:
        clock.now_s += 1.0
        return SimpleNamespace(version=version, now_s=clock.now_s, maps=())

    async def sleep(duration_s: float) -> None:
        assert duration_s <= PERIOD_S
        clock.now_s += duration_s

    monkeypatch.setattr(inspected, "take_snapshot", take)
    monkeypatch.setattr(inspected, "asyncio", SimpleNamespace(sleep=sleep, Lock=asyncio.Lock))
    nothing: Any = None
    watched = Watch(nothing, at_once, history=nothing, inspection=nothing, clock=lambda: clock.now_s)

    async def main() -> None:
        first = await watched.latest(0, never)
        ended_at = clock.now_s + 2 * PERIOD_S
        assert await watched.latest(first.version, lambda: clock.now_s >= ended_at) is first
        assert clock.now_s == ended_at < first.now_s + REST_PER_WORK

    asyncio.run(main())
