"""A front and its page of replicas, without Ray: a test sets the replicas, and a browser reads the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import httpx
import numpy as np
import pytest
from ray.serve.handle import DeploymentHandle

from pagedkv.cluster import ReplicatedEngine, add_routes
from pagedkv.cluster.messages import ReplicaFacts, RoutedRequest
from pagedkv.cluster.placements import Placements
from pagedkv.contract.answers import TierEvents
from pagedkv.contract.spec import FullAttention
from pagedkv.engine import Intent, SamplingParams
from pagedkv.routing import ReplicaIndex, RoutingReason
from pagedkv.server import EngineFacts, OpenAccess, ServerConfig, Service
from pagedkv.wire import Alive, Applied
from tests.browser.chromium import Tab, installed_browser, needs_browser
from tests.browser.layout import FAULTS
from tests.browser.waiting import until
from tests.server.serving import running

GROUPS: Final = (FullAttention(16),)
PROMPT: Final = np.arange(400, dtype=np.int32)
ENGINE: Final = EngineFacts(
    max_tokens=1000,
    context=1000,
    block_size=16,
    alignment=16,
    tenants=frozenset(),
    is_caching=True,
    uses_predictions=False,
    vocabulary_size=1000,
    end_ids=frozenset(),
    choices="",
)
ROWS: Final = "Array.from(document.querySelectorAll('#choices tr[tabindex]'))"
TITLE: Final = "document.querySelector('#details-title')?.textContent"


class UncalledHandle:
    """Stands for Serve's handle of replicas, which nothing here calls."""

    def options(self, **_: object) -> "UncalledHandle":
        """Return a handle with options."""
        return self


def facts_of(process: int) -> ReplicaFacts:
    return ReplicaFacts(ENGINE, GROUPS, "", process, "192.0.2.2", "tcp://192.0.2.2:1", "tcp://192.0.2.2:2")


FACTS: Final = {"a": facts_of(8081), "b": facts_of(8082)}


def request_of(number: int, prompt: np.ndarray = PROMPT, **fields: Any) -> RoutedRequest:  # noqa: ANN401 - its fields
    intent = Intent(answered=fields.pop("answered", ()))
    return RoutedRequest(number, prompt, SamplingParams(max_tokens=50), intent, **fields)


@dataclass
class Front:
    """A front's engine, its page, and the placements that are shown."""

    url: str
    engine: ReplicatedEngine
    placements: Placements

    def routes(self) -> dict[str, Any]:
        """Return what the page shows."""
        data: dict[str, Any] = httpx.get(f"{self.url}/inspect/routes").json()
        return data


@pytest.fixture
def front() -> Iterator[Front]:
    placements = Placements()
    placements.set_replicas(FACTS)
    for name in FACTS:
        placements.take(name, Alive("first life", 0))
    engine = ReplicatedEngine(cast("DeploymentHandle[Any]", UncalledHandle()), FACTS["a"])
    engine._link.take(placements)
    service = Service(engine, ServerConfig("demo"), OpenAccess())
    with running(service, adds=lambda app, service: add_routes(app, service, engine)) as url:
        yield Front(url, engine, placements)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with installed_browser() as opened:
        yield opened


def moved(placements: Placements) -> tuple[str, str]:
    """Place a request, and again after the loss of its replica; return both replicas."""
    first = placements.place(request_of(12), ["a", "b"])
    placements.ended(12)
    assert first is not None
    (other,) = set(FACTS) - {first.replica}
    placements.set_replicas({other: FACTS[other]})
    second = placements.place(request_of(12, attempt=2, answered=tuple(range(7))), ["a", "b"])
    assert second is not None
    return first.replica, second.replica


def test_each_attempt_has_a_row_and_an_unsent_choice_none(front: Front) -> None:
    placements = front.placements
    placements.place(request_of(11), ["a"])
    placements.place(request_of(10), ["a"])
    placements.place(request_of(11), ["b"])  # it was not sent to the first choice
    first, second = moved(placements)
    rows = [(each["request"], each["attempt"], each["replica"]) for each in front.routes()["choices"]]
    assert rows == [(12, 2, second), (12, 1, first), (11, 1, "b"), (10, 1, "a")]


def test_as_many_choices_are_kept_as_are_allowed(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.cluster.placements.MOST_CHOICES", 3)
    for number in range(5):
        front.placements.place(request_of(number), ["a", "b"])
    assert [each.number for each in front.placements.latest()] == [4, 3, 2]


def test_a_front_without_a_replica_is_alive_and_not_ready(front: Front) -> None:
    def statuses() -> tuple[int, int]:
        return httpx.get(f"{front.url}/health").status_code, httpx.get(f"{front.url}/ready").status_code

    assert statuses() == (200, 200)
    front.placements.set_replicas({})
    assert statuses() == (200, 503)
    front.placements.set_replicas({"c": facts_of(8083)})
    assert statuses() == (200, 200)


def test_a_lost_replica_and_its_replacement_are_logged(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    front.placements.set_replicas({"a": FACTS["a"]})
    front.placements.set_replicas({"a": FACTS["a"]})
    front.placements.set_replicas({"a": FACTS["a"], "c": facts_of(8083)})
    assert [each.getMessage() for each in caplog.records if each.name.startswith("pagedkv")] == [
        "replica b is gone (process 8082 on 192.0.2.2); 1 can serve",
        "replica c has joined (process 8083 on 192.0.2.2); 2 can serve",
    ]


@needs_browser
def test_each_row_of_a_moved_request_opens_its_own_choice_below_it(front: Front, tab: Tab) -> None:
    first, second = moved(front.placements)
    tab.open(f"{front.url}/inspect", 1200)
    until(tab, f"{ROWS}.length === 2")
    for row, replica in ((1, first), (0, second)):
        tab.evaluate(f"{ROWS}[{row}].click()")
        assert f"to {replica}: " in tab.evaluate(TITLE)
        assert tab.evaluate(f"{ROWS}.map(each => each.className)") == ["chosen" if row == at else "" for at in (0, 1)]
        assert tab.evaluate(f"{ROWS}[{row}].nextElementSibling.id") == "details"
    assert "continued after 7 tokens" in tab.evaluate(f"{ROWS}[0].textContent")
    front.placements.place(request_of(13), [second])
    until(tab, f"{ROWS}.length === 3")
    assert f"to {second}: " in tab.evaluate(TITLE)
    assert tab.evaluate(f"{ROWS}[1].nextElementSibling.id") == "details", "it stays at its row"
    assert tab.evaluate(FAULTS) == []
    tab.evaluate(f"{ROWS}[1].focus()")
    tab.press("Enter")
    until(tab, f"!{TITLE}")
    assert tab.complaints == []


@needs_browser
def test_selected_text_stays_selected_while_the_page_reads(front: Front, tab: Tab) -> None:
    front.placements.place(request_of(1), ["a"])
    tab.open(f"{front.url}/inspect", 1200)
    until(tab, f"{ROWS}.length === 1")
    tab.evaluate("getSelection().selectAllChildren(document.querySelector('#replicas tbody tr').cells[1])")
    for number in (2, 3):  # two readings, both with something new
        front.placements.place(request_of(number), ["a"])
        until(tab, f"{ROWS}.length === {number}")
    assert tab.evaluate("String(getSelection())") == "8081 on 192.0.2.2"
    tab.evaluate(f"getSelection().selectAllChildren({ROWS}[0].cells[5]), {ROWS}[0].click()")
    assert not tab.evaluate(TITLE), "text was selected, and no row clicked"
    assert tab.complaints == []


@needs_browser
def test_tokens_in_a_tier_are_shown_with_the_cached_ones(front: Front, tab: Tab) -> None:
    digests = ReplicaIndex(GROUPS).hash(PROMPT).digests[16]
    keys = digests[3:8:4].astype(">u4").view(np.uint8).reshape(-1, 32)
    front.placements.take("b", Applied("first life", 0, (TierEvents("FOLDER", 64, np.ones(2, np.int32), keys),)))
    choice = front.placements.place(request_of(1), ["a", "b"])
    assert choice is not None
    assert (choice.replica, choice.reason) == ("b", RoutingReason.MOST_CACHED)
    tab.open(f"{front.url}/inspect", 1200)
    until(tab, f"{ROWS}.length === 1")
    assert tab.evaluate(f"{ROWS}[0].cells[4].textContent") == "0, and 128 in FOLDER"
