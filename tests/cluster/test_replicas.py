"""Two real replicas on Ray Serve behind the HTTP front: what is routed where, and that a replica's death loses nothing.

The replicas are processes, and are killed by a signal.
"""

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from pagedkv.cluster import ClusterSpec, ReplicaSpec, ReplicatedEngine, add_routes, deploy, shut_down
from pagedkv.cluster.placements import Placements
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.engine.demo.trained import load_demo
from pagedkv.routing import IndexState
from pagedkv.server import OpenAccess, Served, ServerConfig, Service
from pagedkv.server.engines import tokenizer_of
from tests.browser.chromium import BROWSER, browser_tab, needs_browser
from tests.browser.inspector_page import LEGEND
from tests.browser.waiting import until
from tests.server.serving import PATIENCE_S, running

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

ENGINE: Final = EngineConfig(num_blocks=300, block_size=8, self_test=False, max_sequences=16)
NUM_NEW: Final = 24
PROMPTS: Final = [[place % 150 + 20 for place in range(first, first + 40)] for first in range(0, 120, 10)]


class Cluster:
    """Two replicas, and a front that serves HTTP."""

    def __init__(self, url: str, service: Service, engine: ReplicatedEngine, served: list[Served]) -> None:
        self.url, self.service, self.engine, self.served = url, service, engine, served

    def ask(self, prompt: list[int], **fields: Any) -> httpx.Response:  # noqa: ANN401 - of a body
        """Ask for a completion."""
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": NUM_NEW,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)

    def routes(self) -> dict[str, Any]:
        """Return what the page of replicas shows."""
        answer = httpx.get(f"{self.url}/inspect/routes")
        assert answer.status_code == 200
        told: dict[str, Any] = answer.json()
        return told

    def processes(self) -> dict[str, int]:
        """Return the process of each replica."""
        return {each["name"]: each["process"] for each in self.routes()["replicas"]}

    def wait_for_replicas(self, *, without: int = 0) -> None:
        """Wait until two replicas serve, none of them in process ``without``."""
        until = time.monotonic() + PATIENCE_S
        while True:
            processes = self.processes().values()
            if len(processes) == 2 and without not in processes:
                return
            assert time.monotonic() < until, f"no second replica came: {processes}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        engine = deploy(ClusterSpec(ReplicaSpec(None, "float32", ENGINE, inspector="texts"), 2))
        service = Service(engine, ServerConfig("demo"), OpenAccess(), tokenizer=tokenizer_of(None))
        served: list[Served] = []
        service.on_served.append(served.append)
        with running(service, adds=lambda app, service: add_routes(app, service, engine)) as url:
            told = Cluster(url, service, engine, served)
            assert len(told.routes()["replicas"]) == 2, "they are listed before the first request"
            yield told
    finally:
        shut_down()


@pytest.fixture(scope="module")
def alone() -> LLM:
    """An engine of its own, which says what is right."""
    model, tokenizer = load_demo()
    return LLM(model, ENGINE, tokenizer=tokenizer)


def right(alone: LLM, prompt: list[int], **wishes: Any) -> str:  # noqa: ANN401 - of parameters
    output = alone.generate([prompt], SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, **wishes))[0]
    return str(output.completions[0].text)


def test_answers_are_those_of_one_engine(cluster: Cluster, alone: LLM) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(cluster.ask, PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.json()["choices"][0]["text"] == right(alone, prompt)
    drawn = cluster.ask(PROMPTS[0], temperature=0.9, seed=3, top_p=0.9, logit_bias={"5": -3}, n=2)
    assert len(drawn.json()["choices"]) == 2
    assert drawn.json()["choices"][0]["text"] == right(
        alone, PROMPTS[0], temperature=0.9, seed=3, top_p=0.9, logit_bias={5: -3.0}
    )


def test_a_prompt_goes_where_it_is_cached_and_says_why(cluster: Cluster) -> None:
    prompt = [7, 9, 11, 13] * 20
    first = cluster.ask(prompt)
    others = [cluster.ask([*prompt, 40 + place, 41, 42]) for place in range(4)]
    where = first.headers["x-pagedkv-replica"]
    assert {each.headers["x-pagedkv-replica"] for each in others} == {where}
    assert {each.headers["x-pagedkv-routing"] for each in others} == {"it has most of the prompt"}
    assert all(each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 72 for each in others)
    shown = cluster.routes()["choices"][0]
    assert shown["replica"] == where
    assert shown["candidates"][0]["num_hit_tokens"] == 80
    assert cluster.served[-1].routes[0].replica == where
    assert where in cluster.served[-1].routes[0].explanation


def test_the_index_is_exact_once_events_came(cluster: Cluster) -> None:
    until = time.monotonic() + PATIENCE_S
    while {each["state"] for each in cluster.routes()["replicas"]} != {str(IndexState.EXACT)}:
        assert time.monotonic() < until, cluster.routes()["replicas"]
        time.sleep(0.1)
    assert sum(each["num_cached_blocks"] for each in cluster.routes()["replicas"]) > 10
    page = httpx.get(f"{cluster.url}/inspect")
    assert "Replicas of" in page.text
    assert 'data-access="open"' in page.text


def first_event(url: str) -> dict[str, Any]:
    """Read the first event of an inspector, and leave."""
    with httpx.stream("GET", f"{url}/events", timeout=PATIENCE_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        name, data = itertools.islice(answer.iter_lines(), 2)
    assert name == "event: snapshot"
    snapshot: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return snapshot


def test_the_blocks_of_each_replica_are_shown(cluster: Cluster) -> None:
    """The page is that of one engine, and its data are those of the replica that its path names."""
    prompt = [21, 22, 23, 24] * 14
    where = cluster.ask(prompt).headers["x-pagedkv-replica"]
    (other,) = set(cluster.processes()) - {where}
    assert all(each["has_inspector"] for each in cluster.routes()["replicas"])
    lengths = {}
    for name in (where, other):
        url = f"{cluster.url}/replicas/{name}/inspect"
        assert "inspect/page.js" in httpx.get(url).text
        assert httpx.get(f"{url}/page.js").status_code == httpx.get(f"{url}/page.css").status_code == 200
        snapshot = first_event(url)
        assert snapshot["model"] == f"demo, replica {name}"
        assert snapshot["pools"][0]["num_blocks"] == ENGINE.num_blocks
        history = httpx.get(f"{url}/history").json()
        lengths[name] = {each["prompt"] for each in history["requests"]}
        assert httpx.get(f"{url}/prefixes").json()["num_blocks"]
    assert len(prompt) in lengths[where] - lengths[other]
    texts = [httpx.get(f"{cluster.url}/replicas/{where}/inspect/block/full/{block}").json() for block in range(1, 60)]
    assert prompt[:8] in [each.get("token_ids") for each in texts], "texts were wished"
    url = f"{cluster.url}/replicas/{where}/inspect"
    assert httpx.get(f"{url}/block/full/{ENGINE.num_blocks}").status_code == 404
    assert httpx.get(f"{url}/prefixes?pool=none").status_code == 404
    gone = httpx.get(f"{cluster.url}/replicas/none/inspect/prefixes")
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == "replica 'none' has ended"


@needs_browser
def test_a_browser_gets_from_a_choice_to_the_blocks_of_its_replica(cluster: Cluster) -> None:
    where = cluster.ask([31, 32, 33, 34] * 12).headers["x-pagedkv-replica"]
    assert BROWSER is not None
    with browser_tab(BROWSER) as tab:
        tab.open(f"{cluster.url}/inspect", 1200)
        until(tab, f"document.querySelector('#choices tbody')?.textContent.includes('{where}')")
        tab.evaluate("document.querySelector('#choices tbody tr').click()")
        until(tab, "document.querySelectorAll('#details:not([hidden]) #candidates tbody tr').length === 2")
        link = "Array.from(document.querySelectorAll('#replicas a')).find(each => each.textContent === '" + where + "')"
        until(tab, f"Boolean({link})")
        tab.evaluate(f"{link}.click()")
        until(tab, f"document.getElementById('status')?.textContent === 'Live' && {LEGEND}.cached > 0")
        assert tab.evaluate("document.getElementById('model').textContent") == f"demo, replica {where}"
        assert tab.complaints == []
        tab.call("Page.navigate", url="about:blank")


def test_what_one_engine_refuses_is_refused(cluster: Cluster) -> None:
    answer = cluster.ask([5] * 100_000)
    assert answer.status_code == 400
    assert "longest sequence" in answer.text
    answer = cluster.ask([10**6])
    assert answer.status_code == 400
    assert "token ids must be" in answer.text


BOUND_S: Final = 30.0
"""Serve itself notices a stopped replica after a minute or more; heartbeats are missed within four seconds."""


def test_a_stopped_replica_is_passed_over_by_fresh_prompts_within_a_bound(cluster: Cluster, alone: LLM) -> None:
    """Also by those that it has most of, and by those that are sent before it has missed its heartbeats."""
    prompt = [61, 62, 63, 64] * 12
    stopped = cluster.ask(prompt).headers["x-pagedkv-replica"]
    process = cluster.processes()[stopped]
    os.kill(process, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        with ThreadPoolExecutor(6) as pool:
            prompts = [prompt, *([70 + place] * 30 for place in range(5))]
            answers = list(pool.map(cluster.ask, prompts))
        took_s = time.monotonic() - began_s
        later = cluster.ask([*prompt, 7, 7])
        statuses = {each["name"]: each["is_silent"] for each in cluster.routes()["replicas"]}
    finally:
        os.kill(process, signal.SIGCONT)
    assert stopped not in {answer.headers["x-pagedkv-replica"] for answer in [*answers, later]}
    assert [each.json()["choices"][0]["text"] for each in answers] == [right(alone, each) for each in prompts]
    assert took_s < BOUND_S
    assert statuses == {name: name == stopped for name in statuses}
    assert later.headers["x-pagedkv-routing"] == "no other replica can take it now"
    assert "passed over, no message for" in cluster.served[-1].routes[-1].explanation
    cluster.wait_for_replicas()


def test_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    placements = cluster.engine.placements
    assert placements is not None
    body = {"model": "demo", "prompt": [9, 8, 7], "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    until = time.monotonic() + PATIENCE_S
    while placements.num_outstanding or cluster.routes()["replicas"][0]["numbers"]["num_running"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    placements.check()


def test_a_deadline_holds(cluster: Cluster) -> None:
    answer = cluster.ask([9, 8, 7], max_tokens=150, deadline_s=0.001)
    assert answer.status_code == 504


async def _stream(url: str, prompt: list[int], seed: int | None, begun: asyncio.Event) -> tuple[str, str | None]:
    """Read one stream; return its text, and its error."""
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": NUM_NEW,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    if seed is not None:
        body |= {"temperature": 1.0, "seed": seed}
    text, error = "", None
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            told = json.loads(line.removeprefix("data: "))
            if "error" in told:
                error = told["error"]["message"]
            for choice in told.get("choices", ()):
                text += choice["text"]
                begun.set()
    return text, error


async def _killed_once(cluster: Cluster) -> list[tuple[str, str | None]]:
    """Stream all prompts, and kill the replica that serves most as soon as one of them has begun."""
    begun = asyncio.Event()
    streams = [
        asyncio.create_task(_stream(cluster.url, prompt, None if place % 2 else place, begun))
        for place, prompt in enumerate(PROMPTS)
    ]
    await begun.wait()
    told = await asyncio.to_thread(cluster.routes)
    busiest = max(told["replicas"], key=lambda each: each["num_decoding"] + each["num_prefill_tokens"])
    os.kill(busiest["process"], signal.SIGKILL)
    answers = await asyncio.gather(*streams)
    await asyncio.to_thread(cluster.wait_for_replicas, without=busiest["process"])
    return answers


def num_again(placements: Placements) -> int:
    """Count the listed choices that were made after the loss of a replica."""
    return sum(each.attempt > 1 for each in placements.latest())


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_a_replica_that_is_killed_loses_nothing(cluster: Cluster, alone: LLM, kills: int) -> None:
    expected = [
        right(alone, prompt) if place % 2 else right(alone, prompt, temperature=1.0, seed=place)
        for place, prompt in enumerate(PROMPTS)
    ]
    placements = cluster.engine.placements
    assert placements is not None
    moved, again = placements.num_moved, num_again(placements)
    for _ in range(kills):
        cluster.wait_for_replicas()
        answers = asyncio.run(_killed_once(cluster))
        assert [error for _, error in answers] == [None] * len(PROMPTS)
        assert [text for text, _ in answers] == expected, "every stream is the answer of one engine, each token once"
    assert placements.num_moved > moved, "a negative control: requests were under way when replicas died"
    assert placements.num_moved - moved == num_again(placements) - again, "moves are counted, each of a request"
    placements.check()
    assert placements.num_outstanding == 0


def test_requests_wait_while_no_replica_is_left(cluster: Cluster, alone: LLM) -> None:
    cluster.wait_for_replicas()
    for process in cluster.processes().values():
        os.kill(process, signal.SIGKILL)
    until = time.monotonic() + PATIENCE_S
    while httpx.get(f"{cluster.url}/ready").status_code == 200:
        assert time.monotonic() < until, "the loss of both was not noticed"
        time.sleep(0.02)
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster.ask, PROMPTS[0])
        late = cluster.ask(PROMPTS[1], deadline_s=0.01)
        assert late.status_code == 504, "a deadline ends the wait"
        assert waiting.result().json()["choices"][0]["text"] == right(alone, PROMPTS[0])
    cluster.wait_for_replicas()
    assert httpx.get(f"{cluster.url}/ready").status_code == 200


def test_a_wait_ends_where_no_replica_comes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.cluster.replicated_engine.ACCEPT_S", 0.0)
    answer = cluster.ask(PROMPTS[0])
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no replica can serve: none accepted the request within 0 s"
    assert answer.json()["error"]["code"] == "no_replica"
    assert answer.headers["retry-after"]
