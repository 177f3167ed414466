"""EventsOut: passes the KV events of an engine in this process to a publisher after each step.

The engine's thread only copies the events; the publisher's thread encodes and sends them. An engine without a publisher
records no events. Events that arise without a step, such as those of a cache reset, are passed on before the next
heartbeat.
"""

from contextlib import suppress
from typing import Final, final

from pagedkv.engine import LLM, StepRecord
from pagedkv.errors import EngineError
from pagedkv.events import CacheSnapshot, EventPublisher
from pagedkv.server.engines import LocalEngine

__all__ = ["EventsOut"]

STEP_S: Final = 30.0
"""Most seconds that a request for a snapshot waits for the end of a step."""


@final
class EventsOut:
    """Passes events on. Add :meth:`stepped` to the callbacks of steps.

    Args:
        engine: the engine; its configuration has ``events=True``.
        publisher: publishes the events, and requests snapshots from this object.
    """

    def __init__(self, engine: LocalEngine, publisher: EventPublisher) -> None:
        self._engine = engine
        self._publisher = publisher
        self._core = engine.llm.core
        self._space = engine.llm.core.space
        publisher.serve_snapshots(self._take_snapshot, before_beat=self._request_publishing)

    def stepped(self, record: StepRecord) -> None:  # noqa: ARG002 - as it is called
        """Pass on the events of a step. Called by the engine's thread."""
        self._publish()

    def _publish(self) -> None:
        tiers = self._core.drain_tier_events()
        if self._space.has_events or tiers:
            self._publisher.publish(self._space.drain_events(), self._space, tiers)

    # Called by the publisher's thread

    def _take_snapshot(self) -> CacheSnapshot:
        """Take a snapshot in the engine's thread, and wait for it. Raises EngineError, TimeoutError."""

        def take(llm: LLM) -> CacheSnapshot:
            self._publish()
            return self._publisher.snapshot(self._space, llm.core.tier_entries())

        return self._engine.call_soon(take).result(STEP_S)

    def _request_publishing(self) -> None:
        """Schedule the publishing of waiting events in the engine's thread; do not wait for it."""

        def publish(llm: LLM) -> None:  # noqa: ARG001 - as it is called
            self._publish()

        with suppress(EngineError):  # the engine has not started yet, or has ended
            self._engine.call_soon(publish)
