"""Publishes what an engine of this process has cached: after each step, and as snapshots between two steps."""

from contextlib import suppress
from typing import Final, final

from pagedkv.memory.contract.errors import EngineError
from pagedkv.memory.sockets import CacheSnapshot, EventPublisher
from pagedkv.serving.engine import LLM, StepRecord
from pagedkv.serving.server.engines import LocalEngine

__all__ = ["PublishedEvents"]

SNAPSHOT_S: Final = 30.0
"""Longest time for which a snapshot waits for a step to end."""


@final
class PublishedEvents:
    """Connects an engine with a publisher.

    Args:
        engine: whose configuration has ``events``.
        publisher: closed by its owner, after the engine was stopped.
    """

    def __init__(self, engine: LocalEngine, publisher: EventPublisher) -> None:
        self._engine = engine
        self._publisher = publisher
        publisher.serve_snapshots(self._take_snapshot, before_beat=self._publish_later)

    def stepped(self, record: StepRecord) -> None:  # noqa: ARG002 - as the engine calls it
        """Publish the events of a step, in the engine's thread."""
        self._publish(self._engine.llm)

    def _publish(self, llm: LLM) -> None:
        space = llm.core.space
        self._publisher.publish(space.drain_events(), space)

    def _publish_later(self) -> None:
        """Let the engine's thread publish what happened without a step, such as a reset."""
        with suppress(EngineError):  # it was closed
            self._engine.call_later(self._publish)

    def _take_snapshot(self) -> CacheSnapshot:
        taken: list[CacheSnapshot] = []
        done = self._engine.call_later(lambda llm: taken.append(self._publisher.snapshot(llm.core.space)))
        done.result(SNAPSHOT_S)
        return taken[0]
