"""The page of a plan: its headline, its reasons, its figures; nothing outside itself, the same bytes each time."""

import pytest

from pagedkv.report.plan_page import render_plan
from tests.report.page_reader import Page, read_page
from tests.report.sample_plans import small_plan, unknown_plan

pytestmark = pytest.mark.plain_only


@pytest.fixture(scope="module")
def page() -> Page:
    return read_page(render_plan(small_plan(), version="0.1.0"))


def test_the_decision_is_the_headline_and_its_reasons_follow(page: Page) -> None:
    assert page.texts("div", class_="need") == ["KV memory needed: 1.25 GiB (100 blocks)."]
    assert page.texts("h1") == ["Take 80 GiB, p0: 2.1 answers a second"]
    assert page.texts("h2") == ["Why", "Over memory", "All settings", "Method"]
    assert "80 GiB instead of 40 GiB: 2.10x the traffic (2.00 to 2.20)." in page.texts("p")
    assert "Good answers have the first token within 2.00 s." in page.texts("p")
    assert page.texts("ul", class_="warnings")[0].strip() == "The seconds are assumed."


def test_effects_and_points_are_in_tables(page: Page) -> None:
    assert page.row("80 GiB instead of 40 GiB") == ["2.10x (2.00x to 2.20x)", "2.05x, 2.15x", "unknown", "unknown", "2"]
    assert page.row("40 GiB, p0")[:7] == ["1x", "yes", "40.0 GiB", "1", "80.00%", "1,234", "25.00%"]
    assert page.texts("caption")[1:] == [
        "Every setting under every load",
        "Why each holds or does not",
        "Latencies",
    ]
    assert len(page.all("th", scope="row")) == 1 + 3 * 8


def test_drawings_come_wide_and_narrow_with_ids_of_their_own(page: Page) -> None:
    assert len(page.all("figure")) == 4
    assert len(set(page.ids)) == len(page.ids)
    assert len(page.all("div", class_="narrow")) == len(page.all("div", class_="roomy")) == 4


def test_drawings_tell_values_at_each_memory() -> None:
    plan = small_plan()
    plan["points"] = [p for p in plan["points"] if (p["kv_gib"], p["choices"]["policy"]) != (80, "p1")]
    page = read_page(render_plan(plan, version="0.1.0"))
    traffic = next(e.attributes for e in page.elements if "data-values" in e.attributes)
    assert traffic["data-headings"] == "40.0 GiB|80.0 GiB"
    assert traffic["data-values"] == "1|2;1|none"


def test_a_plan_of_one_point_without_hits_or_times_has_a_page() -> None:
    page = read_page(render_plan(unknown_plan(), version="0.1.0"))
    assert "No bounds were given: every answer counts." in page.texts("p")
    assert page.row("40 GiB, lru chosen")[6:] == ["unknown", "3"]
    assert page.texts("td")[-6:] == ["none"] * 6
    assert page.texts("h3")[0] == "Traffic"
    assert len(page.all("figure")) == 1


def test_the_page_stands_alone_and_is_the_same_each_time(page: Page) -> None:
    source = render_plan(small_plan(), version="0.1.0")
    assert source == page.source
    assert "trace&lt;1&gt;.jsonl" in source
    assert not [e for e in page.elements if e.attributes.get("src") or e.attributes.get("href", "#")[0] != "#"]


def test_more_lines_than_can_be_told_apart_are_left_to_the_table() -> None:
    many = read_page(render_plan(small_plan(10), version="0.1.0"))
    assert len(many.all("figure")) == 2 * 4, "four lines a plot"
    assert len(many.all("ul", class_="legend")) == 2 * 4
    assert "Of 10 combinations the first 8 are drawn; the table has all." in many.texts("p")
    assert len(many.all("th", scope="row")) == 1 + 3 * 40


def test_the_page_shows_the_source_of_the_seconds_and_no_folder() -> None:
    plan = small_plan()
    plan["trace"] = "/home/me/trace.jsonl"
    plan["command"] = "pagedkv plan /home/me/trace.jsonl --results ~/plans/kept"
    page = read_page(render_plan(plan, version="0.1.0"))
    subtitle = "a plan for llama on trace.jsonl; seconds by cost, data sheet"
    assert page.texts("p", class_="soft")[0] == f"pagedkv 0.1.0, {subtitle}"
    assert page.texts("pre")[-1] == "pagedkv plan trace.jsonl --results kept"
    assert "/me" not in page.source


def test_a_line_goes_through_the_highest_load_that_holds_at_each_memory() -> None:
    plan = small_plan(1)
    for point in plan["points"]:
        point["figures"] = point["figures"] | {"goodput_per_s": point["load"] * point["kv_gib"]}
    plan["settings"][1]["held"] = 2.0
    page = read_page(render_plan(plan, version="0.1.0"))
    traffic = next(e.attributes for e in page.elements if "data-values" in e.attributes)
    assert traffic["data-values"] == "40|160"


def test_the_plot_shows_the_traffic_of_the_headline() -> None:
    """A run ends with its last answer, so its answers a second are fewer than those that it sustains."""
    plan = small_plan(1)
    for point in plan["points"]:
        steady = {"verdict": "holds", "num_good": 300, "measured_s": 60.0}
        point["figures"] = point["figures"] | {"goodput_per_s": 3.5, "steadiness": steady}
    page = read_page(render_plan(plan, version="0.1.0"))
    traffic = next(e.attributes for e in page.elements if "data-values" in e.attributes)
    assert traffic["data-values"] == "5|5"
