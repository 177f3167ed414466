"""Questions and events between two processes: each has one reply, and nothing is sent that nothing waits for."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final

import pytest

from pagedkv.errors import EngineError
from pagedkv.server import ApiError
from pagedkv.server.engine_process.inspection import InspectionChild, ProcessInspected
from pagedkv.server.inspector import LAST_EVENT

PATIENCE_S: Final = 60.0
LARGE: Final = b"x" * 3_000_000


class Data:
    """An engine's data, as a test wrote them; counts what is asked for.

    Attributes:
        num_made: events that were made; num_closed: watchers that were closed.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self.num_closed = 0

    async def events(self, title: str, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield events without end; those of the title "silent" never come."""
        try:
            while not is_over():
                if title == "silent":
                    await asyncio.Event().wait()
                if title == "ended":
                    raise EngineError("the engine is closed")
                if title == "faulty":
                    raise ZeroDivisionError("by zero")
                self.num_made += 1
                yield f"{title} {self.num_made}".encode()
        finally:
            self.num_closed += 1

    async def block(self, pool: str, block_id: int, tenant: str | None) -> dict[str, Any]:
        """Give back the arguments."""
        return {"pool": pool, "block": block_id, "tenant": tenant}

    async def prefixes(self, pool: str | None) -> dict[str, Any]:
        """Fail as a pool's name says."""
        problems = {"other": ApiError(404, "no such pool"), "ended": EngineError("the engine is closed")}
        if pool is not None:
            raise problems.get(pool, ZeroDivisionError("by zero"))
        return {"large": LARGE}

    async def history(self, from_s: float, to_s: float) -> dict[str, Any]:
        """Answer the longer span later."""
        await asyncio.sleep(0.01 * (to_s - from_s))
        return {"span": to_s - from_s}


@contextmanager
def linked() -> Iterator[tuple[Data, ProcessInspected]]:
    """Connect both ends, as two processes do."""
    ours, others = socket.socketpair()
    data, inspected = Data(), ProcessInspected(ours)
    child = InspectionChild(data, others)
    child.start()
    yield data, inspected
    child.close()
    inspected.close()


def run(scenario: Callable[[Data, ProcessInspected], Any]) -> None:
    async def main(data: Data, inspected: ProcessInspected) -> None:
        inspected.start()
        await asyncio.wait_for(scenario(data, inspected), PATIENCE_S)
        inspected.end()

    with linked() as (data, inspected):
        asyncio.run(main(data, inspected))


def test_each_question_has_its_own_reply_in_whatever_order_they_are_ready() -> None:
    async def scenario(data: Data, inspected: ProcessInspected) -> None:  # noqa: ARG001 - as run calls it
        answers = await asyncio.gather(
            *(inspected.history(0.0, float(length)) for length in (9, 1, 5)),
            inspected.prefixes(None),
            inspected.block("full", 7, "a"),
        )
        assert [each.get("span") for each in answers[:3]] == [9.0, 1.0, 5.0]
        assert answers[3] == {"large": LARGE}
        assert answers[4] == {"pool": "full", "block": 7, "tenant": "a"}

    run(scenario)


def test_errors_are_those_of_an_inspector_in_the_servers_process() -> None:
    async def scenario(data: Data, inspected: ProcessInspected) -> None:  # noqa: ARG001 - as run calls it
        with pytest.raises(ApiError, match="no such pool") as refused:
            await inspected.prefixes("other")
        assert refused.value.status == 404
        with pytest.raises(EngineError, match="the engine is closed"):
            await inspected.prefixes("ended")
        for fault in (inspected.prefixes("faulty"), anext(inspected.events("faulty", lambda: False))):
            with pytest.raises(RuntimeError, match="failed in the engine's process: ZeroDivisionError: by zero"):
                await fault
        assert [each async for each in inspected.events("ended", lambda: False)] == [LAST_EVENT]

    run(scenario)


def test_an_event_is_made_only_when_the_one_before_it_was_taken() -> None:
    async def scenario(data: Data, inspected: ProcessInspected) -> None:
        async with aclosing(inspected.events("lively", lambda: False)) as events:
            for number in (1, 2, 3):
                assert await anext(events) == b"lively %d" % number
                await inspected.history(0.0, 1.0)  # the other end has had time for more
                assert data.num_made == number
        await until_closed(data, inspected)
        assert data.num_made == 3
        is_over = [False, True].pop
        assert [each async for each in inspected.events("over", is_over)] == [b"over 4", LAST_EVENT]

    run(scenario)


async def until_closed(data: Data, inspected: ProcessInspected) -> None:
    """Wait for the other end to close a watcher."""
    while not data.num_closed:
        await inspected.history(0.0, 1.0)


def test_a_client_that_leaves_while_it_waits_ends_its_watcher_alone() -> None:
    async def scenario(data: Data, inspected: ProcessInspected) -> None:
        silent = inspected.events("silent", lambda: False)
        waiting = asyncio.ensure_future(anext(silent))
        question = asyncio.ensure_future(inspected.history(0.0, 5.0))
        assert (await inspected.block("full", 1, None))["block"] == 1
        waiting.cancel()
        question.cancel()
        await asyncio.wait([waiting, question])
        await until_closed(data, inspected)
        assert (await inspected.history(0.0, 8.0)) == {"span": 8.0}, "the reply that comes for no question is dropped"

    run(scenario)


def test_the_end_of_the_other_process_fails_what_waits() -> None:
    async def main() -> None:
        ours, others = socket.socketpair()
        inspected = ProcessInspected(ours)
        child = InspectionChild(Data(), others)
        inspected.start()
        early = asyncio.ensure_future(inspected.block("full", 1, None))
        await asyncio.sleep(0)
        child.start()
        question = asyncio.ensure_future(inspected.history(0.0, 1e6))
        silent = inspected.events("silent", lambda: False)
        event = asyncio.ensure_future(anext(silent))
        assert (await early)["block"] == 1, "a question that came before the other end was ready"
        await inspected.block("full", 1, None)
        child.close()
        with pytest.raises(EngineError, match="has ended"):
            await asyncio.wait_for(question, PATIENCE_S)
        assert await asyncio.wait_for(event, PATIENCE_S) == LAST_EVENT
        with pytest.raises(EngineError, match="has ended"):
            await inspected.prefixes(None)
        inspected.end()
        inspected.close()

    asyncio.run(main())
