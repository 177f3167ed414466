"""The page in a real browser, without a window: its layout is measured on what is drawn, at three widths.

Skipped where there is no Chromium: `apt-get install chromium` brings one.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from pagedkv.report import ReportRun
from pagedkv.report.documents import Plan
from pagedkv.report.plan_page import render_plan
from tests.browser.chromium import Scheme, Tab, installed_browser, needs_browser
from tests.browser.layout import FAULTS
from tests.report.rendering import render
from tests.report.sample_plans import sample_plan, small_plan, unknown_plan
from tests.report.sample_runs import empty_run, sample_run

pytestmark = [
    pytest.mark.plain_only,
    needs_browser,
]

WIDTHS: Final = (400, 800, 1400)
PLOT: Final = "document.querySelectorAll('figure')[{}].querySelector('.scroll')"
TIP: Final = "Array.from(document.querySelectorAll('.tip:not([hidden]) > *'), line => line.textContent)"


def pages() -> Mapping[str, list[ReportRun]]:
    warned = sample_run("/long/" + "folder/" * 30 + "trace.jsonl.gz")
    warned.replay["warnings"] = ["a warning of " + "many words " * 30]
    return {
        "one run": [sample_run()],
        "several pools": [sample_run(pools=("full", "window_1024", "mamba_state"))],
        "a long name and a warning": [warned],
        "nothing finished": [empty_run()],
        "three runs": [sample_run("a"), sample_run("b", seed=1, with_curve=False), sample_run("c" * 80, seed=2)],
    }


def plans() -> Mapping[str, Plan]:
    return {
        "a plan": small_plan(),
        "a plan of five axes": sample_plan(),
        "a plan of one point": unknown_plan(),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {name: render(*runs) for name, runs in pages().items()}
    texts |= {name: render_plan(plan, version="0.1.0") for name, plan in plans().items()}
    written = {name: folder / f"{number}.html" for number, name in enumerate(texts)}
    for name, text in texts.items():
        written[name].write_text(text)
    return written


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with installed_browser() as opened:
        yield opened


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [*pages(), *plans()])
def test_nothing_overlaps_and_nothing_is_cut_off(tab: Tab, files: Mapping[str, Path], name: str, width: int) -> None:
    tab.open(files[name], width)
    assert tab.evaluate(FAULTS) == []
    assert tab.complaints == []
    assert tab.requests == [files[name].as_uri()]  # nothing else was asked for


BROKEN: Final = {
    "overlap": "document.querySelector('h2').style.marginTop = '-200px'",
    "wide in a window": "document.querySelector('h1').style.whiteSpace = 'nowrap'",
    "is clipped by": "Object.assign(document.querySelector('.tile').style, {width: '40px', overflow: 'hidden'}), "
    "document.querySelector('.tile .value').style.whiteSpace = 'nowrap'",
    "leaves its drawing": "document.querySelector('.roomy text').setAttribute('transform', 'translate(50 -400)')",
    "pixels high": "document.querySelector('.roomy text').style.fontSize = '4px'",
    "is broken into": "document.querySelector('.tile dt').style.width = '3ch', "
    "document.querySelector('.tile dt').style.overflowWrap = 'anywhere'",
    "wide in a box": "document.querySelector('.scroll table').style.width = '3000px'",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_layout_would_be_found(tab: Tab, files: Mapping[str, Path], fault: str) -> None:
    tab.open(files["a long name and a warning"], 800)
    tab.evaluate(BROKEN[fault])
    found = tab.evaluate(FAULTS)
    assert any(fault in each for each in found), found


def test_what_a_page_complains_of_and_asks_for_is_noticed(tab: Tab, files: Mapping[str, Path]) -> None:
    tab.open(files["one run"], 800)
    tab.evaluate(
        "setTimeout(() => { throw new Error('broken') }), console.error('told'), new Image().src = 'file:///x.png'"
    )
    tab.evaluate("new Promise(done => setTimeout(done, 50))")
    assert any("broken" in each for each in tab.complaints)
    assert any("told" in each for each in tab.complaints)
    assert tab.requests[-1] == "file:///x.png"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_pointer_shows_values(tab: Tab, files: Mapping[str, Path], width: int) -> None:
    run = pages()["one run"][0]
    live = run.replay["timeline"]["pools"]["full"]["num_live"]
    tab.open(files["one run"], width)
    assert tab.evaluate(TIP) == []
    tab.evaluate(f"{PLOT.format(0)}.scrollIntoView({{block: 'center'}})")
    left, top, right, bottom = tab.evaluate(
        f"(box => [box.left, box.top, box.right, box.bottom])({PLOT.format(0)}.getBoundingClientRect())"
    )
    for share in (0.0, 0.5, 0.999):
        tab.point_at(left + 1 + share * (right - left - 2), (top + bottom) / 2)
        heading, *values = tab.evaluate(TIP)
        assert heading.endswith(" minutes")
        assert [value.partition(": ")[0] for value in values] == ["live", "cached", "free"]
        assert values[0].partition(": ")[2] in {f"{number:,.0f}" for number in live}
        assert tab.evaluate(FAULTS_OF_TIP) == []
    assert values[0] == f"live: {live[-1]:,.0f}"
    tab.point_at(left, top - 200)
    assert tab.evaluate(TIP) == []


FAULTS_OF_TIP: Final = """
Array.from(document.querySelectorAll('.tip:not([hidden]), .guide:not([hidden])'), each => each.getBoundingClientRect())
    .filter(box => box.left < 0 || box.right > document.documentElement.clientWidth || box.height < 5)
    .map(box => `${box.left} to ${box.right}, ${box.height} high`)
"""


def test_arrow_keys_show_values(tab: Tab, files: Mapping[str, Path]) -> None:
    run = pages()["one run"][0]
    tab.open(files["one run"], 800)
    tab.evaluate(f"{PLOT.format(1)}.focus()")
    running = run.replay["timeline"]["num_running"]
    for number in range(3):
        tab.press("ArrowRight")
        assert tab.evaluate(TIP)[1] == f"running: {running[number]:,.1f}"
    tab.press("ArrowLeft")
    assert tab.evaluate(TIP)[1] == f"running: {running[1]:,.1f}"
    tab.press("Escape")
    assert tab.evaluate(TIP) == []


def test_every_plot_of_a_comparison_names_its_runs(tab: Tab, files: Mapping[str, Path]) -> None:
    tab.open(files["three runs"], 1400)
    told = tab.evaluate(
        "Array.from(document.querySelectorAll('figure:has(svg[data-values])'), f => f.querySelector('h3').textContent)"
    )
    assert len(told) == 3
    for number in range(len(told)):
        tab.evaluate(f"{PLOT.format(number)}.focus()")
        tab.press("ArrowRight")
        assert [line[:2] for line in tab.evaluate(TIP)[1:]] == ["1.", "2.", "3."]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_plots_of_a_plan_tell_their_values_by_memory(tab: Tab, files: Mapping[str, Path], width: int) -> None:
    tab.open(files["a plan of five axes"], width)
    for number in range(4):
        tab.evaluate(f"{PLOT.format(number)}.focus()")
        headings = []
        for _ in range(3):
            tab.press("ArrowRight")
            heading, *values = tab.evaluate(TIP)
            headings.append(heading)
            assert len(values) == 4
            policy = ("lru", "hazard")[number % 2]
            assert values[0].startswith(f"block 16, {policy}, split by need, 8,192 tokens a step: ")
            assert tab.evaluate(FAULTS_OF_TIP) == []
        assert headings == ["225.1 GiB", "512.4 GiB", "1,087.3 GiB"]
    tab.evaluate(f"{PLOT.format(0)}.focus()")
    tab.press("ArrowRight")
    assert tab.evaluate(TIP)[1].endswith(": 2.25")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_browser(tab: Tab, files: Mapping[str, Path], scheme: Scheme) -> None:
    tab.open(files["one run"], 800, scheme=scheme)
    background, ink = tab.evaluate("(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))")
    assert (background, ink) == {
        "light": ("rgb(255, 255, 255)", "rgb(27, 31, 36)"),
        "dark": ("rgb(20, 24, 29)", "rgb(232, 235, 238)"),
    }[scheme]
    drawn = tab.evaluate("getComputedStyle(document.querySelector('.roomy text')).fill")
    assert drawn == ink


@pytest.mark.parametrize("name", ["one run", "a plan", "a plan of five axes"])
def test_on_a_phone_the_first_plot_comes_before_the_tiles(tab: Tab, files: Mapping[str, Path], name: str) -> None:
    top = "document.querySelector('{}').getBoundingClientRect().top"
    for width in WIDTHS:
        tab.open(files[name], width)
        is_above = tab.evaluate(f"{top.format('figure')} < {top.format('.tiles')}")
        assert is_above == (width == WIDTHS[0])
