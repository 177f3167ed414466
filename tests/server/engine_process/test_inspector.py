"""The inspector of an engine in a process of its own: what it shows, who may see it, and what it never delays."""

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from pagedkv.engine import EngineConfig
from pagedkv.errors import ConfigurationError, EngineError
from pagedkv.server import ApiError, OpenAccess, ServerConfig, Service, add_inspected
from pagedkv.server.engine_process import ProcessEngine, ProcessSpec
from pagedkv.server.engines import tokenizer_of
from pagedkv.server.inspector import LAST_EVENT
from tests.server.engine_process.conftest import CONFIG, Shown
from tests.server.inspector.conftest import ask
from tests.server.serving import running

ROOT: Final = {"x-api-key": "root"}
CLIENT: Final = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
PRIVATE: Final = "the harbour keeps 41 boats in winter and every one of them has a name"
ASKED: Final = (
    (PRIVATE, "a"),
    (PRIVATE, "a"),
    (PRIVATE[:40] + "something else altogether", "a"),
    ("what operations ask, which fills two blocks", "root"),
    (PRIVATE, "root"),
)
TIMED: Final = frozenset({"version", "step", "may_be_longer"})
"""Fields that depend on when snapshots were taken."""
PATIENCE_S: Final = 60
VERSIONS: Final = re.compile(rb'event: \w+\ndata: {"version":(\d+)')


@pytest.fixture(scope="module")
def asked(shown: Shown) -> Shown:
    """Ask both servers the same."""
    for url in shown.urls:
        for text, key in ASKED:
            ask(url, text, key)
        while not has_sampled_the_end(read(url, "history")):
            pass
    return shown


def has_sampled_the_end(history: dict[str, Any]) -> bool:
    """Whether the blocks were sampled, as they are twice a second, after all requests had ended."""
    return bool(history["samples"]["time_s"][-1] > max(each["ended_s"] for each in history["requests"]))


def read(url: str, path: str) -> Any:  # noqa: ANN401 - JSON
    answer = CLIENT.get(f"{url}/inspect/{path}", headers=ROOT)
    assert answer.status_code == 200, answer.text
    return answer.json()


def watch(url: str, num_events: int) -> list[tuple[str, dict[str, Any]]]:
    """Read the first events."""
    with CLIENT.stream("GET", f"{url}/inspect/events", headers=ROOT) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        return [event_of(lines) for _ in range(num_events)]


def requests_under_way(url: str) -> list[dict[str, Any]]:
    """Watch until there are requests under way; the first snapshot may be older than they are."""
    with CLIENT.stream("GET", f"{url}/inspect/events", headers=ROOT) as answer:
        lines = answer.iter_lines()
        found = (requests for _ in range(40) if (requests := event_of(lines)[1]["requests"]))
        return list(next(found))


def event_of(lines: Iterator[str]) -> tuple[str, dict[str, Any]]:
    """Read one event."""
    name, data, blank = next(lines), next(lines), next(lines)
    assert blank == ""
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def without_times(told: Any) -> Any:  # noqa: ANN401 - JSON
    """Leave out what depends on time: seconds, and how numbers are spread over them."""
    if isinstance(told, list):
        return [without_times(each) for each in told]
    if not isinstance(told, dict):
        return told
    fields = {name: without_times(value) for name, value in told.items() if not name.endswith("_s")}
    if "misses" in fields:
        return summed(told)
    if "shares" in fields and "pools" in fields and "counts" not in str(fields["pools"]):  # samples, one a half second
        return {name: values[-1:] for name, values in fields.items()}
    return {name: value for name, value in fields.items() if name not in TIMED}


def summed(buckets: dict[str, Any]) -> dict[str, Any]:
    """Sum the buckets' counts."""
    missed: Counter[int] = Counter()
    for _, cause, tokens in buckets["misses"]:
        missed[cause] += tokens
    counts = ("steps", "decoded", "prefilled", "hit", "admitted", "swapped_out", "recomputed", "finished")
    return {"misses": missed, **{name: sum(buckets[name]) for name in counts}}


@pytest.mark.parametrize(
    "path", ["history", "history?from=0&to=1e9", "history?from=1e9", "prefixes", "prefixes?pool=full"]
)
def test_answers_are_those_of_an_engine_in_the_servers_process(asked: Shown, path: str) -> None:
    ours, others = (without_times(read(url, path)) for url in asked.urls)
    assert ours == others
    assert "from=1e9" in path or len(str(ours)) > 400, "there is something to compare"


def test_every_block_is_described_alike_with_the_callers_own_texts(asked: Shown) -> None:
    blocks = [[without_times(read(url, f"block/full/{number}")) for number in range(1, 25)] for url in asked.urls]
    assert blocks[0] == blocks[1]
    texts = ["".join(block.get("text", "") for block in blocks[0] if block["tenant"] == each) for each in ("root", "a")]
    assert "what operations ask" in texts[0]
    assert texts[1] == "", "an administrator's key does not show other tenants' texts"


def test_what_is_refused_is_refused_alike(asked: Shown) -> None:
    for path in ("block/full/0", "block/full/400", "block/other/1", "prefixes?pool=other", "history?from=nan"):
        ours, others = (CLIENT.get(f"{url}/inspect/{path}", headers=ROOT) for url in asked.urls)
        assert ours.status_code == others.status_code >= 400
        assert ours.json() == others.json()


def test_the_first_events_are_alike(asked: Shown) -> None:
    ours, others = (watch(url, 3) for url in asked.urls)
    assert [name for name, _ in ours] == ["snapshot", "delta", "delta"]
    assert ours[0][1]["model"] == "small"
    # the steps of the last seconds are those of each server's own last seconds
    for (name, told), (other_name, other_told) in zip(ours, others, strict=True):
        assert name == other_name
        assert without_times({**told, "buckets": 0}) == without_times({**other_told, "buckets": 0})


@pytest.mark.long
def test_a_request_under_way_has_its_hit_and_the_cause_in_both(asked: Shown) -> None:
    found = []
    for url in asked.urls:
        body = {"model": "small", "prompt": PRIVATE[:50] + " and more", "max_tokens": 1500, "ignore_eos": True}
        with CLIENT.stream(
            "POST", f"{url}/v1/completions", json={**body, "stream": True, "temperature": 0}, headers=ROOT
        ) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            next(lines)
            (request,) = requests_under_way(url)
            assert list(lines)[-2:] == ["data: [DONE]", ""], "to its end, so that both engines have the same blocks"
        found.append(
            {name: request[name] for name in ("state", "tenant", "prompt", "hit", "cause", "position", "most")}
        )
    assert found[0] == found[1]
    assert (found[0]["state"], found[0]["tenant"], found[0]["hit"]) == ("running", "root", 48)


def test_data_needs_an_administrators_key(asked: Shown) -> None:
    for path in ("events", "block/full/1", "prefixes", "history"):
        for key, status in (("", 401), ("unknown", 401), ("a", 403)):
            answer = CLIENT.get(f"{asked.url}/inspect/{path}", headers={"x-api-key": key} if key else {})
            assert answer.status_code == status
            assert "harbour" not in answer.text
    assert 'data-access="keys"' in CLIENT.get(f"{asked.url}/inspect").text


@pytest.mark.long
def test_there_is_no_inspector_unless_the_spec_asks_for_one() -> None:
    with pytest.raises(ConfigurationError, match="inspector must be"):
        ProcessSpec(None, "float32", CONFIG, inspector="all")  # type: ignore[arg-type]
    with ProcessEngine(ProcessSpec(None, "float32", CONFIG)) as engine:
        assert engine.inspected is None
        descriptors = Path(f"/proc/{engine.process_id}/fd")
        sockets = [each for each in descriptors.iterdir() if str(each.readlink()).startswith("socket:")]
        threads = {each.read_text().strip() for each in Path(f"/proc/{engine.process_id}/task").glob("*/comm")}
    assert len(sockets) == 1
    assert not any("inspector" in each for each in threads)


# The end


@pytest.mark.long  # the end of the process: test_ends.py; of its inspector's link: test_inspection.py
def test_a_killed_engine_ends_the_stream_and_every_path_says_so(folder: Path) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(ProcessEngine(ProcessSpec(str(folder), "float32", CONFIG, inspector="blocks")))
        config = ServerConfig("small", outlives_engine=True)
        service = Service(engine, config, OpenAccess(), tokenizer=tokenizer_of(str(folder)))
        assert engine.inspected is not None
        inspected = engine.inspected
        url = stack.enter_context(running(service, adds=lambda app, _: add_inspected(app, service, inspected)))
        ask(url, PRIVATE)
        with CLIENT.stream("GET", f"{url}/inspect/events") as answer:
            lines = answer.iter_lines()
            assert [event_of(lines)[0] for _ in range(2)] == ["snapshot", "delta"]
            os.kill(engine.process_id, signal.SIGKILL)
            while (name := event_of(lines)[0]) != "end":
                assert name == "delta", "at most the one that was on its way"
            assert list(lines) == []
        body = {"model": "small", "prompt": PRIVATE, "max_tokens": 2}
        refused = CLIENT.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503
        for path in ("events", "block/full/1", "prefixes", "history"):
            answer = CLIENT.get(f"{url}/inspect/{path}")
            assert answer.status_code == 503
            assert answer.json() == refused.json()
        assert CLIENT.get(f"{url}/inspect").status_code == 200, "the page itself needs no engine"


@pytest.mark.long
def test_after_the_end_questions_fail_and_watchers_end() -> None:
    async def main() -> None:
        with ProcessEngine(ProcessSpec(None, "float32", CONFIG, inspector="blocks")) as engine:
            inspected = engine.inspected
            assert inspected is not None
            with pytest.raises(EngineError, match="has not been started"):
                await inspected.prefixes(None)
            engine.start(8, lambda _: None)
            assert (await inspected.prefixes(None))["roots"] == []
            with pytest.raises(ApiError, match="other"):
                await inspected.prefixes("other")
            async with aclosing(inspected.events("small", lambda: False)) as events:
                assert (await anext(events)).startswith(b"event: snapshot")
                await engine.stop()
                told = [each async for each in events]
            assert told[-1] == LAST_EVENT
            assert len(told) <= 2
            with pytest.raises(EngineError, match="has ended"):
                await inspected.history(0.0, 1.0)
            assert [each async for each in inspected.events("small", lambda: False)] == [LAST_EVENT]

    asyncio.run(main())


# Slow clients

LARGE: Final = EngineConfig(num_blocks=200_000, block_size=1, max_sequences=8, self_test=False)
"""A pool whose map is larger than what the server buffers for a client."""


@pytest.fixture(scope="module")
def large(folder: Path) -> Iterator[str]:
    """Run a server with an inspector of a large pool; yield its address."""
    with ProcessEngine(ProcessSpec(str(folder), "float32", LARGE, inspector="blocks")) as engine:
        service = Service(engine, ServerConfig("small"), OpenAccess(), tokenizer=tokenizer_of(str(folder)))
        assert engine.inspected is not None
        inspected = engine.inspected
        with running(
            service, adds=lambda app, service: add_inspected(app, service, inspected), send_nbytes=4096
        ) as url:
            yield url


def watcher_that_does_not_read(url: str) -> socket.socket:
    """Ask for events, and read nothing."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = url.removeprefix("http://").split(":")
    place.connect((host, int(port)))
    place.sendall(b"GET /inspect/events HTTP/1.1\r\nHost: here\r\n\r\n")
    return place


def versions_read(place: socket.socket) -> list[int]:
    """Read up to the second change; return the numbers of the snapshots that the events are of."""
    place.settimeout(PATIENCE_S)
    read = bytearray()
    while len(found := VERSIONS.findall(read)) < 3:
        piece = place.recv(2**16)
        assert piece, "the server closed the connection"
        read += piece
    return [int(version) for version in found]


@pytest.mark.long
def test_a_watcher_that_does_not_read_delays_neither_answers_nor_others(large: str) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(watcher_that_does_not_read(large)) for _ in range(3)]
        others = stack.enter_context(CLIENT.stream("GET", f"{large}/inspect/events"))
        lines = others.iter_lines()
        name, whole = event_of(lines)
        assert name == "snapshot"
        assert len(whole["pools"][0]["map"]) > 2**18
        for turn in range(3):
            ask(large, f"the question of turn {turn}, while three pages read nothing")
            assert event_of(lines)[0] == "delta"
        now = [event_of(lines)[1] for _ in range(4)][-1]
        assert now["pools"][0]["counts"]["cached"] > 100
        for place in slow:
            *kept, latest = versions_read(place)
            assert len(kept) == 2, "one event is in the connection's buffer, and one waits for it to empty"
            assert kept[-1] <= whole["version"] + 3 < now["version"]
            assert latest >= now["version"], "what happened meanwhile comes as one event"
