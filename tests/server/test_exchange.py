"""Clients that go, deadlines, a full queue, large bodies, the end of the server: nothing is computed for them."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from pagedkv.engine import LLM
from pagedkv.errors import EngineError
from pagedkv.server import Service
from tests.server.conftest import Running
from tests.server.serving import PATIENCE_S, Script, local_engine, make_service, running

LONG: Final = {"model": "small", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
JSON: Final = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """Run a server with a short queue and small bodies."""
    script = Script()
    service = make_service(script, max_waiting=2, max_body_nbytes=20_000)
    with running(service) as url:
        yield Running(url, service, script)


def body(text: str, **more: object) -> dict[str, object]:
    """Ask for a long answer."""
    return {**LONG, "messages": [{"role": "user", "content": text}], **more}


def num_live_blocks(service: Service) -> int:
    """Count the blocks of sequences, between two steps: in the middle of one the space refuses to be read."""

    def count(llm: LLM) -> int:
        return llm.core.space.num_live_blocks()

    try:
        return asyncio.run(local_engine(service).between_steps(count))
    except EngineError:  # the engine's thread has ended
        return count(local_engine(service).llm)


def wait_until_idle(service: Service) -> None:
    """Wait until no sequence has blocks. Raises AssertionError where that never comes."""
    until = time.monotonic() + PATIENCE_S
    while local_engine(service).llm.core.has_work or num_live_blocks(service):
        assert time.monotonic() < until, "blocks of a request without a client are not free"
        threading.Event().wait(0.01)


def test_a_stream_that_is_left_ends_its_request(served: Running) -> None:
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json=body("left", stream=True), timeout=60
    ) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert [next(lines) for _ in range(5)]
        assert num_live_blocks(served.service) > 0
    wait_until_idle(served.service)


def test_a_whole_answer_that_is_left_ends_its_request(served: Running) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/chat/completions", json=body("left"), timeout=0.5)
    wait_until_idle(served.service)


def test_a_deadline_ends_an_answer(served: Running) -> None:
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body("late", deadline_s=0.05), timeout=60)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout"
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json=body("late", deadline_s=0.3, stream=True), timeout=60
    ) as streamed:
        events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
    assert events[-1]["error"]["type"] == "timeout"
    wait_until_idle(served.service)


def test_a_large_body_is_refused(served: Running) -> None:
    large = json.dumps(body("x" * 30_000)).encode()
    assert httpx.post(f"{served.url}/v1/chat/completions", content=large, headers=JSON).status_code == 413

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    answer = httpx.post(f"{served.url}/v1/chat/completions", content=pieces(), headers=JSON)
    assert answer.status_code == 413
    assert "20,000 bytes" in answer.json()["error"]["message"]


def test_a_full_queue_is_told_with_a_time_to_come_again(served: Running) -> None:
    """Each answer takes nearly all sequences, so that others wait."""
    num_sequences = local_engine(served.service).llm.core.config.max_sequences
    statuses: list[int] = []
    retries: list[str | None] = []

    def ask(number: int) -> None:
        wish = body(f"{number}", n=num_sequences, max_tokens=40)
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=wish, timeout=120)
        statuses.append(answer.status_code)
        retries.append(answer.headers.get("retry-after"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert set(statuses) == {200, 429}
    assert all(
        (retry is not None and 1 <= int(retry) <= 60) == (status == 429)
        for status, retry in zip(statuses, retries, strict=True)
    )
    wait_until_idle(served.service)


def test_the_end_of_a_server_drains() -> None:
    service = make_service(Script())
    answers: list[int] = []
    with running(service) as url:

        def ask() -> None:
            answers.append(
                httpx.post(f"{url}/v1/chat/completions", json=body("last", max_tokens=200), timeout=120).status_code
            )

        thread = threading.Thread(target=ask)
        thread.start()
        until = time.monotonic() + PATIENCE_S
        while not local_engine(service).llm.core.has_work:
            assert time.monotonic() < until, "the request did not begin"
            threading.Event().wait(0.005)
    thread.join(PATIENCE_S)
    assert answers == [200]
    assert not service.engine.is_alive
