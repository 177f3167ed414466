"""The inspector's page in a real browser, without a window: what it shows is what the engine has.

Skipped where there is no Chromium: `apt-get install chromium` brings one.
"""

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Scheme, Tab, installed_browser, needs_browser
from tests.browser.inspector_page import LEGEND, WIDTHS
from tests.browser.layout import FAULTS
from tests.browser.waiting import until
from tests.server.conftest import Running
from tests.server.inspector.conftest import STORED, Tiered, ask, forget_device
from tests.server.serving import local_engine

pytestmark = needs_browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with installed_browser() as opened:
        yield opened


def shows_engine(server: Running, legend: dict[str, int]) -> bool:
    """Whether the numbers of the map are those of the engine."""
    (pool,) = local_engine(server.service).llm.core.space.statistics().pools
    leased = legend["leased"] + legend["cached"]
    return (legend["live"], leased, legend["free"], legend["deferred"]) == (
        *(pool.num_in_use, pool.num_cached, pool.num_free - pool.num_cached, pool.num_deferred),
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_the_map_has_the_engines_numbers_at_every_width(tab: Tab, watched: Running, width: int) -> None:
    schemes: dict[int, Scheme] = {400: "light", 800: "dark", 1400: "light"}
    tab.open(f"{watched.url}/inspect", width, scheme=schemes[width])
    ask(watched.url, f"a question of a page that is {width} pixels wide, and of some blocks")
    until(tab, f"document.querySelector('#requests tbody')?.textContent.includes('length') && {LEGEND}.live === 0")
    cached = local_engine(watched.service).llm.core.space.num_cached_blocks()
    legend = until(tab, f"{LEGEND}.cached === {cached} && {LEGEND}")
    assert shows_engine(watched, legend)
    drawn = tab.evaluate(
        "(map => map.getContext('2d').getImageData(0, 0, map.width, map.height).data.some(each => each))"
        "(document.getElementById('map'))"
    )
    assert drawn
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "no horizontal scrolling"
    tab.evaluate("document.getElementById('refresh').click()")
    until(tab, "document.querySelectorAll('.tree li').length > 1")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.querySelectorAll('#plots figure:not([hidden])').length") == 5
    assert tab.evaluate(FAULTS) == []
    assert tab.complaints == []
    assert {url.split("/")[2] for url in tab.requests if not url.startswith("data:")} == {watched.url.split("/")[2]}


def test_a_block_is_described_by_pointer_and_by_keys(tab: Tab, watched: Running) -> None:
    tab.open(f"{watched.url}/inspect", 800)
    until(tab, f"{LEGEND}.cached > 0")
    tab.evaluate("document.getElementById('map').focus()")
    tab.press("ArrowRight")
    assert "parent" in until(
        tab, "/^Block 1(?=\\D)/.test(document.getElementById('block').innerText) && block.innerText"
    )
    tab.press("ArrowRight")
    assert "cached" in until(
        tab, "/^Block 2(?=\\D)/.test(document.getElementById('block').innerText) && block.innerText"
    )
    tab.evaluate("document.getElementById('map').scrollIntoView({block: 'center'})")
    left, top = tab.evaluate("(box => [box.left, box.top])(document.getElementById('map').getBoundingClientRect())")
    tab.point_at(left + 3 * 18 + 5, top + 5)
    until(tab, "/^Block 3(?=\\D)/.test(document.getElementById('block').innerText)")
    assert not tab.evaluate("block.innerText.includes('harbour')")
    assert tab.complaints == []


def test_pause_and_the_slider_step_back(tab: Tab, watched: Running) -> None:
    tab.open(f"{watched.url}/inspect", 800)
    cached = until(tab, f"{LEGEND}.cached")
    tab.evaluate("document.getElementById('pause').click()")
    until(tab, "document.getElementById('pause').textContent === 'Resume'")
    ask(watched.url, "what comes while the page is paused, and is not shown before it goes on")
    now = local_engine(watched.service).llm.core.space.num_cached_blocks()
    assert now > cached
    until(tab, "document.getElementById('time').textContent === '1 s ago'")
    assert tab.evaluate(f"{LEGEND}.cached") == cached
    tab.evaluate("document.getElementById('pause').click()")
    until(tab, f"{LEGEND}.cached === {now}")
    slider = (
        "(slider => (slider.value = -1, slider.dispatchEvent(new Event('input'))))(document.getElementById('slider'))"
    )
    tab.evaluate(slider)
    until(tab, "/^[12] s ago$/.test(document.getElementById('time').textContent)")
    assert tab.complaints == []


@pytest.mark.parametrize("width", [400, 1400])
def test_tiers_have_a_panel_where_there_are_some(tab: Tab, tiered: Tiered, watched: Running, width: int) -> None:
    forget_device(tiered.service)
    tab.open(f"{tiered.url}/inspect", width)
    ask(tiered.url, STORED)
    row = until(tab, "document.querySelector('#tiers-table tr[data-tier=test]')?.innerText")
    assert row.startswith("test\tin service\t2\t")
    assert "64.0 MiB" in row
    until(
        tab, "document.querySelector('#requests tbody').innerText.includes('tokens 0 to 256 were in tier test: loaded')"
    )
    until(tab, "document.getElementById('tiers-note').innerText === 'No load is under way.'")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(FAULTS) == []
    assert tab.complaints == []
    tab.open(f"{watched.url}/inspect", width)
    until(tab, f"{LEGEND}.cached > 0")
    assert tab.evaluate("document.getElementById('tiers-panel').hidden")


def test_a_key_is_asked_for_and_in_no_address(tab: Tab, keyed: Running) -> None:
    tab.open(f"{keyed.url}/inspect", 400)
    until(tab, "!document.getElementById('key-form').hidden")
    assert [url.rpartition("/")[2] for url in tab.requests if url.startswith("http")] == [
        "inspect",
        "page.css",
        "page.js",
    ]
    tab.evaluate(
        "document.getElementById('key').value = 'root', document.querySelector('#key-form button').click()",
    )
    legend = until(tab, f"{LEGEND}.cached > 0 && {LEGEND}")
    assert shows_engine(keyed, legend)
    assert not any("root" in url for url in tab.requests)
    assert tab.evaluate("document.getElementById('tenants').innerText").splitlines()[0].startswith("a ")
    assert "no tenant 0" in until(tab, "document.querySelector('#plots figure:nth-child(5)').innerText")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    assert tab.complaints == []
