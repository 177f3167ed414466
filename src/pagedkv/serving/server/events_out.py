"""EventsOut: the KV events of an engine of this process, handed to a publisher after each step.

The engine's thread copies what was stored, and nothing else; an engine without a publisher has no events. Events of an
engine that makes no steps, as of a cache that was reset, are handed over before the next heartbeat.
"""

from contextlib import suppress
from typing import Final, final

from pagedkv.memory.contract.errors import EngineError
from pagedkv.memory.sockets import CacheSnapshot, EventPublisher
from pagedkv.serving.engine import LLM, StepRecord
from pagedkv.serving.server.engines import LocalEngine

__all__ = ["EventsOut"]

STEP_S: Final = 30.0
"""How long a request for a snapshot waits for the end of a step."""


@final
class EventsOut:
    """Hands events over. Add :meth:`stepped` to the callbacks of steps.

    Args:
        engine: the engine; its configuration has ``events=True``.
        publisher: publishes them, and gets snapshots from here.
    """

    def __init__(self, engine: LocalEngine, publisher: EventPublisher) -> None:
        self._engine = engine
        self._publisher = publisher
        self._space = engine.llm.core.space
        publisher.serve_snapshots(self._take, before_beat=self._ask)

    def stepped(self, record: StepRecord) -> None:  # noqa: ARG002 - as it is called
        """Hand over the events of a step. The engine's thread calls it."""
        self._publish()

    def _publish(self) -> None:
        if self._space.has_events:
            self._publisher.publish(self._space.drain_events(), self._space)

    # Called by the publisher's thread

    def _take(self) -> CacheSnapshot:
        """Let the engine's thread take a snapshot, and wait for it. Raises EngineError, TimeoutError."""
        return self._engine.call_soon(lambda _: self._publisher.snapshot(self._space)).result(STEP_S)

    def _ask(self) -> None:
        """Let the engine's thread hand over what waits; do not wait for it."""

        def publish(llm: LLM) -> None:  # noqa: ARG001 - as it is called
            self._publish()

        with suppress(EngineError):  # it has not started yet, or has ended
            self._engine.call_soon(publish)
