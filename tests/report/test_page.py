"""A page stands on its own: well-formed, accessible, without references to the outside, the same every time."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.report import ReportRun
from pagedkv.report.capacity import capacity_section
from pagedkv.report.page import render_report
from pagedkv.report.sections import memory_section, time_section
from tests.choosing import long_but
from tests.report.page_reader import Page, read_page
from tests.report.rendering import COMMAND, rendered, words_of
from tests.report.sample_runs import empty_run, sample_run

pytestmark = pytest.mark.plain_only

HOSTILE: Final = "<script>alert('1')</script> \"quoted\" & $\\frac$ \u65e5\u672c\u8a9e {{ 7 * 7 }} " + "long" * 200
MAX_NBYTES: Final = 1_000_000


def hostile_run() -> ReportRun:
    """A run in which every text that a user can choose is hostile."""
    run = sample_run(HOSTILE, pools=(HOSTILE, "window"), num_intervals=3, policy=HOSTILE)
    assert run.curve is not None
    policies, gaps = run.curve["policies"], run.curve["gaps"]["policy_gap"]
    policies[HOSTILE], gaps[HOSTILE] = policies.pop("lru"), gaps.pop("lru")
    return run


PAGES: Final[Mapping[str, Callable[[], tuple[ReportRun, ...]]]] = {
    "one run": lambda: (sample_run(),),
    "without curve and model": lambda: (sample_run(with_curve=False, with_model=False, num_intervals=20),),
    "two pools": lambda: (sample_run(pools=("full", "window"), num_intervals=9),),
    "one interval": lambda: (sample_run(num_intervals=1),),
    "nothing finished": lambda: (empty_run(),),
    "hostile": lambda: (hostile_run(),),
    "eight runs": lambda: (*(sample_run(seed=seed, num_intervals=12) for seed in range(7)), empty_run()),
    "hostile runs": lambda: (hostile_run(), hostile_run()),
    "empty runs": lambda: (empty_run(), empty_run("another")),
}


EACH_TIME: Final = frozenset({"one run", "two pools", "nothing finished", "hostile runs"})
"""Pages that are drawn in every run of the tests, some seconds each."""


@cache
def page_named(name: str) -> Page:
    """Render one of the pages above, once."""
    return rendered(*PAGES[name]())


@pytest.fixture(params=long_but(EACH_TIME, PAGES))
def page(request: pytest.FixtureRequest) -> Page:
    return page_named(request.param)


def test_pages_refer_to_nothing_outside(page: Page) -> None:
    for element in page.elements:
        assert element.tag not in {"link", "img", "iframe", "object", "embed", "image"}
        for name, value in element.attributes.items():
            assert not name.startswith("on")
            if name in {"href", "src"}:
                assert value.startswith("#")
            if name != "xmlns":
                assert "://" not in value
            assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", value))
    styles = "".join(page.texts("style"))
    assert "@import" not in styles
    assert "url(" not in styles


def test_ids_are_unique_and_every_reference_leads_to_one(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    referenced = {
        target
        for element in page.elements
        for name, value in element.attributes.items()
        for target in (
            *re.findall(r"url\(#([^)]*)\)", value),
            *([value.removeprefix("#")] if name == "href" else []),
            *(value.split() if name == "aria-labelledby" else []),
        )
    }
    assert referenced <= set(page.ids)
    assert referenced


def test_drawings_are_well_formed_named_and_in_the_colours_of_the_page(page: Page) -> None:
    drawings = page.drawings
    assert len(drawings) == len(page.all("svg"))
    for drawing in drawings:
        assert drawing.get("aria-label") or drawing.get("aria-hidden") == "true"
        assert "viewBox" in drawing.attrib
        for element in drawing.iter():
            looks = " ".join(element.get(name, "") for name in ("style", "fill", "stroke"))
            assert not re.search(r"#[0-9a-f]{3,6}\b(?!\))|font-family", re.sub(r"url\([^)]*\)", "", looks))
            assert "tspan" not in element.tag  # mathematics, which would have lost its text


def test_headings_and_tables_are_structured(page: Page) -> None:
    assert len(page.all("h1")) == 1
    assert len(page.all("html", lang="en")) == 1
    assert len(page.all("caption")) == len(page.all("table")) > 0
    for cell in page.all("th"):
        assert cell.attributes["scope"] in {"col", "row"}
        assert cell.text
    for figure_title in page.texts("h3"):
        assert figure_title
    assert all(page.texts("td"))


def test_pages_are_small(page: Page) -> None:
    assert len(page.source.encode()) < MAX_NBYTES


def test_the_page_of_one_run_has_every_part() -> None:
    page = page_named("one run")
    assert page.texts("h2") == [
        "Over time",
        "Capacity",
        "Memory",
        "Latency and preemption",
        "Reuse and eviction",
        "Configuration",
        "Method",
    ]
    assert page.texts("h3") == [
        "Blocks over time",
        "Requests over time",
        "Hit ratio over time",
        "Hit ratio over capacity",
        "Where misses come from",
        "Waste by block size",
        "Latencies",
        "Hits by age",
        "Evictions by age",
        "Command line",
        "Command line of this report",
    ]
    assert page.texts("pre") == [sample_run().replay["command"], COMMAND]
    assert "pagedkv 0.1.0" in page.texts("p")[0]


def test_names_are_text_wherever_they_stand() -> None:
    page = page_named("hostile")
    assert page.texts("p", class_="soft")[0] == f"pagedkv 0.1.0, report of a replay of {HOSTILE}"
    assert any(HOSTILE in text for text in page.texts("pre"))
    assert any(HOSTILE in text for text in page.texts("th"))
    assert any(HOSTILE in text for text in page.texts("h3"))
    assert len(page.all("script")) == page.source.count("<script") == 1  # the page's own
    # A drawing carries a user's text only in its label.
    for drawing in page.drawings:
        assert "script" not in "".join(drawing.itertext())


def test_an_unescaped_name_would_be_found() -> None:
    source = page_named("hostile").source
    with pytest.raises(AssertionError):
        read_page(source.replace("&lt;script&gt;", "<script>"))


def test_the_same_runs_give_the_same_bytes_in_any_process() -> None:
    program = (
        "from tests.report.rendering import render; from tests.report.sample_runs import sample_run; import sys; "
        "sys.stdout.buffer.write(render(sample_run()).encode())"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert finished.stdout == page_named("one run").source.encode()


def test_a_run_without_anything_says_so() -> None:
    page = page_named("nothing finished")
    paragraphs = page.texts("p")
    assert "No time passed: no request was served." in paragraphs
    assert "No capacity curve was measured for this run." in paragraphs
    assert "No token was decoded, so there is no waste to show." in paragraphs
    assert "No block was hit; none was evicted." in paragraphs
    assert page.row("first token") == ["none"] * 5
    assert page.drawings == []


def test_enormous_numbers_are_written_whole_and_drawn() -> None:
    run = sample_run(num_intervals=2)
    huge = 10**18
    run.replay["requests"]["num_requests"] = huge
    run.replay["pools"]["full"]["hits_by_age"]["num_blocks"] = [huge] * 15
    run.replay["latency"]["request_s"]["max"] = 1e12
    for values in (run.replay["timeline"]["num_running"], run.replay["timeline"]["pools"]["full"]["num_live"]):
        values[:] = [float(huge)] * 2
    page = rendered(run)
    assert page.texts("dd", class_="value")[0] == "1,000,000,000,000,000,000"
    assert page.row("end of the request")[-1] == "1,000,000,000,000 s"


def test_the_capacity_plot_has_the_runs_policy_the_best_other_the_optimum_and_the_ideal() -> None:
    """However many policies were measured; and the text begins with what memory brings."""
    run = sample_run()
    assert run.curve is not None
    curve = run.curve
    hits, refs = curve["policies"]["lru"], curve["num_block_refs"]
    sizes = [int(capacity) for capacity in hits]
    for name, factor in (("good", 1.01), ("fair", 1.0), ("worse", 0.5)):
        curve["policies"][name] = {size: int(factor * num) for size, num in hits.items()}
        curve["gaps"]["policy_gap"][name] = dict.fromkeys(hits, 0.01)
    curve["gains"] = [
        {"capacity": size, "factor": factor, "by_policy": {"lru": 0.0125 * factor, "lookahead": 0.9}}
        for size in sizes
        for factor in (2, 4)
    ]
    section = capacity_section(run)
    labels = [entry.label for entry in section.plots[0].legend]
    assert labels[:3] == ["lru", "lookahead", "optimal, offline"]
    assert len(labels) == len({*labels, "this replay"} - {"this replay"}) + ("this replay" in labels) <= 5
    assert section.sentences[0].startswith("2x the memory brings +2.50 points, 4x the memory brings +5.00 points")
    told = section.sentences[0].partition(" hits ")[2].partition(" of the")[0]
    (near,) = {size for size, num in hits.items() if f"{num / refs:.2%}" == told}
    points = 100 * (curve["policies"]["lookahead"][near] - hits[near]) / refs
    assert (
        f"Of the other policies lookahead hits the most at this size, {points:,.2f} points more" in section.sentences[1]
    )
    assert {"good", "worse"} <= set(section.tables[0].columns)


def test_a_trace_in_which_nothing_comes_again_says_so_first() -> None:
    run = sample_run()
    assert run.curve is not None
    run.curve["ideal_hits"] = 0
    (sentence,) = capacity_section(run).sentences
    assert sentence.startswith("No prompt begins with a block of an earlier one: no memory and no policy would hit.")


def test_a_curve_of_one_capacity_has_no_area_to_fill() -> None:
    run = sample_run(num_intervals=1)
    assert run.curve is not None
    run.curve["policies"] = {"lru": {"9699": 59_357}, "optimal": {"9699": 105_710}}
    run.curve["gaps"] |= {"capacity_gap": {"9699": 0.0}, "policy_gap": {"lru": {"9699": 0.16}}}
    section = capacity_section(run)
    assert [plot.title for plot in section.plots] == ["Hit ratio over capacity"]
    assert len(section.tables[0].rows) == 1


@pytest.mark.parametrize("num_runs", [0, 9])
def test_no_run_and_too_many_are_refused(num_runs: int) -> None:
    with pytest.raises(ConfigurationError, match=f"a report shows 1 to 8 runs, got {num_runs}"):
        render_report([empty_run()] * num_runs, version="0", command="")


def test_warnings_stand_above_everything_else() -> None:
    run = sample_run(num_intervals=1)
    run.replay["warnings"] = ["the seconds are those of <another>"]
    assert words_of(run).texts("li")[0] == "The seconds are those of <another>."
    assert words_of(run, run).texts("li")[2].endswith(": the seconds are those of <another>.")


def test_the_cost_model_is_named_beside_its_seconds() -> None:
    run = sample_run(num_intervals=1)
    run.replay["config"]["cost_model_name"] = "llama-3.1-8b/h100"
    assert "The seconds are those of the cost model llama-3.1-8b/h100." in words_of(run).texts("p")


def test_of_lengths_alone_no_hit_is_claimed_and_none_denied() -> None:
    run = sample_run(num_intervals=3, with_curve=False)
    run.replay["requests"]["num_with_content"] = 0
    run.replay["hits"] |= {"token_hit_ratio": None, "block_hit_ratio": None}
    page = words_of(run)
    values = dict(zip(page.texts("dt"), page.texts("dd", class_="value"), strict=False))
    assert values["Hit ratio by token"] == values["Hit ratio by block"] == "unknown"
    assert not {"Hit ratio over time", "Hits by age", "Evictions by age"} & set(page.texts("h3"))
    assert "The trace has lengths but no content: hits are unknown." in page.texts("p")


def test_every_plot_is_drawn_a_second_time_for_a_phone() -> None:
    page = page_named("one run")
    roomy, narrow = page.all("div", class_="roomy"), page.all("div", class_="narrow")
    assert len(roomy) == len(narrow) == len(page.all("figure"))
    widths = [
        float(drawing.attrib["viewBox"].split()[2]) for drawing in page.drawings if "aria-label" in drawing.attrib
    ]
    assert widths[1::2] == [350.0] * len(narrow)
    assert min(widths[::2]) >= 520
    assert "@media screen and (max-width: 40rem)" in page.source
    assert "min-width: 26rem" not in page.source  # which cut plots off


def test_sizes_of_blocks_and_reservations_have_scales_of_their_own() -> None:
    run = sample_run(num_intervals=1)
    (plot,) = memory_section(run).plots
    assert "80%" in plot.svg  # the reservation of the maximum length
    assert re.search(r">[1-9]\.?[0-9]?%<", plot.svg)  # and ticks for blocks, that waste little


def test_a_comparison_of_results_speaks_of_no_lines_that_are_not_there() -> None:
    without, with_curve = sample_run(num_intervals=1, with_curve=False), sample_run(num_intervals=1)
    told = "Each replay's own hit ratio, at the tokens that its pool holds; no capacity curve was measured."
    assert told in words_of(without, without).texts("p")
    assert told not in words_of(without, with_curve).texts("p")


def test_the_headline_is_an_answer_and_not_a_file_name() -> None:
    run = sample_run("trace.jsonl", num_intervals=3)
    run.replay["config"]["cost_model_name"] = "llama-3.1-8b/h100"
    told = "18.4% of the prompt tokens were in the cache; 99% of the answers began within"
    (headline,) = words_of(run).texts("h1")
    assert headline.startswith(told)
    assert headline.endswith("(seconds: llama-3.1-8b/h100)")
    run.replay["hits"] |= {"token_hit_ratio": None, "block_hit_ratio": None}
    assert words_of(run).texts("h1")[0].startswith("The hit ratio is unknown; 99% of the answers")
    (headline,) = words_of(empty_run()).texts("h1")
    assert headline.endswith("; no request was answered")
    two = words_of(sample_run("a", num_intervals=3), sample_run("b", num_intervals=3, seed=1))
    assert two.texts("h1") == ["2 runs compared; 2. b hits the most, 19.1% of the prompt tokens"]


def test_no_folder_of_whoever_made_a_page_is_on_it() -> None:
    def run() -> ReportRun:
        made = sample_run("/home/me/secret/trace.jsonl", num_intervals=3)
        made.replay["warnings"] = ["/home/me/secret/trace.jsonl is short"]
        made.replay["config"]["cost_model_name"] = "/home/me/secret/cost.json"
        return made

    command = "pagedkv report /home/me/secret/trace.jsonl -o '/home/me/secret/a b.html' --json=/home/me/secret/x.json"
    for runs in ([run()], [run(), run()]):
        source = render_report(runs, version="0", command=command)
        assert "secret" not in source
        assert "home" not in source
        assert "pagedkv report trace.jsonl -o &#39;a b.html&#39; --json=x.json" in source


def test_hits_over_time_are_one_line_with_a_dot_an_interval() -> None:
    """Where few intervals admit a prompt, levels of single intervals were dashes with nothing between."""
    run = sample_run(num_intervals=9)
    run.replay["timeline"]["token_hit_ratio"] = [None, 0.1, None, None, 0.4, None, 0.2, None, None]
    (hits,) = [plot for plot in time_section(run).plots if plot.title == "Hit ratio over time"]
    (path,) = [
        each for each in re.findall(r'<path d="([^"]*)"[^>]*style="fill: none', hits.svg) if each.count("L") == 2
    ]
    assert path.count("M") == 1
