"""The page of a plan: its headline, its reasons, its figures; nothing outside itself, the same bytes each time."""

from typing import Any

import pytest

from pagedkv.report.plan_documents import Plan, PlanPointDocument
from pagedkv.report.plan_page import render_plan
from tests.report.page_reader import Page, read_page

TIMES = {"mean": 0.5, "p50": 0.4, "p90": 0.9, "p99": 1.5}


def point(memory: float, policy: str, load: float, traffic: float, *, is_chosen: bool = False) -> PlanPointDocument:
    figures: dict[str, Any] = {
        "num_requests": 100,
        "num_good": 80,
        "num_preemptions": 3,
        "hit_ratio": 0.25,
        "throughput_per_s": traffic + 0.5,
        "goodput_per_s": traffic,
        "output_tokens_per_s": 1234.5,
        "ttft_s": TIMES,
        "tpot_s": TIMES,
        "itl_s": TIMES,
    }
    return {
        "choices": {"memory": f"{memory:g} GiB", "policy": policy},
        "load": load,
        "is_chosen": is_chosen,
        "num_blocks": {"full": 100},
        "kv_gib": memory,
        "cost_model_name": "cost",
        "figures": figures,
    }


def plan(num_policies: int = 2) -> Plan:
    estimate = {"value": 2.1, "low": 2.0, "high": 2.2, "halves": (2.05, 2.15)}
    return {
        "trace": "trace<1>.jsonl",
        "command": "pagedkv plan trace",
        "read_as": "CSV",
        "model": "llama",
        "arrivals": "open loop",
        "bounds": {"ttft_s": 2.0, "tpot_s": None},
        "warnings": ["the seconds are assumed"],
        "headline": "Take 80 GiB, p0: 2.1 answers a second",
        "reasons": ["80 GiB instead of 40 GiB: 2.10x the traffic (2.00 to 2.20)"],
        "chosen": {"memory": "80 GiB", "policy": "p0"},
        "effects": [
            {
                "axis": "memory",
                "value": "80 GiB",
                "reference": "40 GiB",
                "num_pairs": 2,
                "traffic": estimate,
                "hit_ratio": None,
            }
        ],
        "points": [
            point(memory, f"p{number}", load, memory / 40, is_chosen=memory == 80 and number == 0)
            for memory in (40.0, 80.0)
            for number in range(num_policies)
            for load in (1.0, 2.0)
        ],
    }


@pytest.fixture(scope="module")
def page() -> Page:
    return read_page(render_plan(plan(), version="0.1.0"))


def test_the_decision_is_the_headline_and_its_reasons_follow(page: Page) -> None:
    assert page.texts("h1") == ["Take 80 GiB, p0: 2.1 answers a second"]
    assert page.texts("h2") == ["Why", "Over memory", "All settings", "Method"]
    assert "80 GiB instead of 40 GiB: 2.10x the traffic (2.00 to 2.20)." in page.texts("p")
    assert "Good answers have the first token within 2.00 s." in page.texts("p")
    assert page.texts("ul", class_="warnings")[0].strip() == "The seconds are assumed."


def test_effects_and_points_are_in_tables(page: Page) -> None:
    assert page.row("80 GiB instead of 40 GiB") == ["2.10x (2.00x to 2.20x)", "2.05x, 2.15x", "unknown", "unknown", "2"]
    assert page.row("40 GiB, p0")[:6] == ["40.0", "1x", "1.5", "80.00%", "1,234", "25.00%"]
    assert len(page.all("th", scope="row")) == 1 + 8


def test_drawings_come_wide_and_narrow_with_ids_of_their_own(page: Page) -> None:
    assert len(page.all("figure")) == 4
    assert len(set(page.ids)) == len(page.ids)
    assert len(page.all("div", class_="narrow")) == len(page.all("div", class_="roomy")) == 4


def test_the_page_stands_alone_and_is_the_same_each_time(page: Page) -> None:
    source = render_plan(plan(), version="0.1.0")
    assert source == page.source
    assert "trace&lt;1&gt;.jsonl" in source
    assert not [e for e in page.elements if e.attributes.get("src") or e.attributes.get("href", "#")[0] != "#"]


def test_more_lines_than_can_be_told_apart_are_left_to_the_table() -> None:
    many = read_page(render_plan(plan(5), version="0.1.0"))
    assert "Of 10 combinations the first 8 are drawn; the table has all." in many.texts("p")
    assert len(many.all("th", scope="row")) == 1 + 20
