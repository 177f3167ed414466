"""Ends: of the engine's process, of the server's process, of an engine that cannot be built."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pagedkv.engine import AnswerStream, EngineConfig, Intent, SamplingParams, StepRecord
from pagedkv.errors import ConfigurationError, EngineError, QueueFullError
from pagedkv.server.engine_process import EventEndpoints, ProcessEngine, ProcessSpec
from tests.server.engine_process.conftest import CONFIG

SPEC = ProcessSpec(None, "float32", CONFIG)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
PATIENCE_S = 60


@asynccontextmanager
async def started(max_waiting: int = 8) -> AsyncIterator[tuple[ProcessEngine, list[StepRecord]]]:
    """Start an engine in a process of its own; yield it with the records of its steps."""
    records: list[StepRecord] = []
    with ProcessEngine(SPEC) as engine:
        engine.start(max_waiting, records.append)
        yield engine, records
        await engine.stop()


def submit(engine: ProcessEngine, params: SamplingParams = LONG) -> AnswerStream:
    return engine.generate([5, 6, 7, 8], params, intent=Intent(), deadline_s=None)


def test_a_killed_engine_ends_requests_and_nothing_waits() -> None:
    async def main() -> None:
        async with started() as (engine, _):
            streams = [submit(engine) for _ in range(3)]
            await streams[0].take()
            os.kill(engine.process_id, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineError, match="process has ended, with exit code -9"):
                    await stream.output()
            assert not engine.is_alive
            assert (await engine.numbers()).num_blocks > 0
            with pytest.raises(EngineError, match="has ended"):
                submit(engine)

    asyncio.run(main())


async def a_stream_without_references_ends_its_request(engine: ProcessEngine) -> None:
    stream = submit(engine)
    await stream.take()
    del stream
    async with asyncio.timeout(PATIENCE_S):
        while (await engine.numbers()).num_running:
            pass


async def a_full_queue_refuses(engine: ProcessEngine) -> None:
    streams = [submit(engine, SamplingParams(max_tokens=2)) for _ in range(40)]
    refused = 0
    for stream in streams:
        try:
            await stream.accepted()
        except QueueFullError:
            refused += 1
    assert 0 < refused <= 40 - 2


async def stopping_ends_requests_with_their_tokens(engine: ProcessEngine) -> None:
    stream = submit(engine)
    first = await stream.take()
    await engine.stop()
    output = await stream.output()
    assert output.completions[0].finish_reason == "aborted"
    assert len(output.token_ids) >= len(first[0].token_ids) > 0
    assert output.token_ids[: len(first[0].token_ids)] == first[0].token_ids
    with pytest.raises(ProcessLookupError):
        os.kill(engine.process_id, 0)


@pytest.mark.long
def test_requests_end_as_in_this_process() -> None:
    """Several scenarios of one process, since it takes seconds to start."""

    async def main() -> None:
        async with started(max_waiting=2) as (engine, records):
            with pytest.raises(EngineError, match="one event loop"):
                engine.start(8, records.append)
            await a_stream_without_references_ends_its_request(engine)
            await a_full_queue_refuses(engine)
            await stopping_ends_requests_with_their_tokens(engine)
            assert [record.step_id for record in records] == sorted({record.step_id for record in records})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            ProcessSpec(None, "float32", EngineConfig(num_blocks=1)), "at least 2 blocks", marks=pytest.mark.long
        ),
        (ProcessSpec(None, "float32", CONFIG, events=EventEndpoints("tcp://nowhere", None, "")), "tcp://nowhere"),
    ],
)
def test_an_engine_that_cannot_be_built_is_refused_as_in_this_process(spec: ProcessSpec, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ProcessEngine(spec)


BUILD_AND_DIE = """
import os, signal, sys
from pagedkv.server.engine_process import ProcessEngine, ProcessSpec
from tests.server.engine_process.conftest import CONFIG
engine = ProcessEngine(ProcessSpec(None, "float32", CONFIG))
print(engine.process_id, flush=True)
sys.stdin.read()
"""


def test_the_engines_process_ends_with_the_servers() -> None:
    """Whatever ended that one: the kernel closes its socket."""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", BUILD_AND_DIE], stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=root
    ) as server:
        assert server.stdout is not None
        engine = os.pidfd_open(int(server.stdout.readline()))
        try:
            assert not select.select([engine], [], [], 0)[0], "the engine's process has ended too early"
            server.kill()
            assert select.select([engine], [], [], PATIENCE_S)[0], "the engine's process outlives the server's"
        finally:
            os.close(engine)
