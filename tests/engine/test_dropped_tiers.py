"""Engines with tiers that are garbage-collected without having been closed: their stores are closed all the same."""

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from pagedkv.engine import LLM
from pagedkv.tiers.body import Stored
from tests.engine.test_tiers import PARAMS, PROMPTS, SECONDS, stored, with_tiers
from tests.engine.tier_bodies import TestBody, tier_over


class CollectedInAScan(TestBody):
    """A scan by the store's own thread waits until it may collect garbage, and collects it."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        self.may_collect, self.is_closed = threading.Event(), threading.Event()

    def scan(self) -> Iterator[Stored]:
        """List the entries."""
        if threading.current_thread().name.endswith("-scan"):
            assert self.may_collect.wait(SECONDS)
            gc.collect()
        return super().scan()

    def close(self) -> None:
        """Let the calls that are held up continue."""
        super().close()
        self.is_closed.set()


@pytest.mark.usefixtures("without_collector")
def test_an_engine_that_is_collected_in_a_thread_of_its_store_closes_it(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread cannot wait for itself: stores are closed in another one."""
    problems: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", problems.append)
    body = CollectedInAScan()
    before = threading.enumerate()
    circle: list[object] = [LLM(model, with_tiers(tier_over(body, rescan_s=0.001)))]
    circle.append(circle)
    started = [thread for thread in threading.enumerate() if thread not in before]
    names = {thread.name.rpartition("-")[2] for thread in started}
    assert "scan" in names
    del circle
    body.may_collect.set()
    assert body.is_closed.wait(SECONDS)
    for thread in started:
        thread.join(SECONDS)
        assert not thread.is_alive(), thread.name
    assert not problems


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Garbage is collected where a test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_a_main_thread_that_drops_an_engine_waits_for_its_stores(model: PreTrainedModel) -> None:
    """What was offered is written before the process can end."""
    closed, dropped = CollectedInAScan(), CollectedInAScan()
    stored(model, with_tiers(tier_over(closed)))
    llm = LLM(model, with_tiers(tier_over(dropped)))
    llm.generate(PROMPTS, PARAMS)
    circle: list[object] = [llm]
    circle.append(circle)
    del llm, circle
    gc.collect()
    assert dropped.is_closed.is_set()
    assert {each.key for each in dropped.scan()} == {each.key for each in closed.scan()} != set()
