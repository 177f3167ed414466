"""Watch: one snapshot for all watchers that come at about the same time, and none that is old."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.serving.server.inspector import watch
from pagedkv.serving.server.inspector.watch import PERIOD_S, REST_PER_WORK, Watch


async def at_once(work: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the work returns
    """Do at once what may wait for the end of a step."""
    return work()


@pytest.mark.parametrize("cost_s", [0.0, 0.1])
def test_a_snapshot_is_shared_until_the_next_may_be_taken(cost_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=50.0)

    def take(version: int, *_: object) -> object:
        clock.now_s += cost_s
        return SimpleNamespace(version=version, now_s=clock.now_s, maps=())

    monkeypatch.setattr(watch, "take_snapshot", take)
    nothing: Any = None
    watched = Watch(nothing, at_once, history=nothing, inspection=nothing, clock=lambda: clock.now_s)
    rest_s = max(PERIOD_S, REST_PER_WORK * cost_s)

    async def main() -> None:
        first = await watched.latest(0)
        clock.now_s += 0.99 * rest_s
        assert await watched.latest(0) is first, "of two watchers that come together"
        clock.now_s += 0.02 * rest_s
        second = await watched.latest(0)
        assert second.version == first.version + 1, "the first one is old by now"

    asyncio.run(main())
