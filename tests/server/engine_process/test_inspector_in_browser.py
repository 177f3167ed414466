"""The inspector's page of an engine in a process of its own, in a real browser: it shows what that engine has.

Skipped where there is no Chromium: `apt-get install chromium` brings one.
"""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.browser.chromium import Tab, installed_browser, needs_browser
from tests.browser.inspector_page import LEGEND, WIDTHS
from tests.browser.layout import FAULTS
from tests.browser.waiting import until
from tests.server.engine_process.conftest import Shown
from tests.server.inspector.conftest import ask

pytestmark = needs_browser

QUESTION: Final = "a question of a page, in some blocks, of an engine that is"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with installed_browser() as opened:
        yield opened


@pytest.mark.parametrize("place", ["in a process of its own", "in the server's process"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_shows_the_engine_wherever_it_is(tab: Tab, shown: Shown, width: int, place: str) -> None:
    url, other_url = shown.urls if "own" in place else shown.urls[::-1]
    tab.open(f"{url}/inspect", width, scheme="dark" if width == 800 else "light")
    until(tab, "!document.getElementById('key-form').hidden || document.getElementById('status').innerText === 'Live'")
    tab.evaluate("document.getElementById('key').value = 'root', document.querySelector('#key-form button').click()")
    for each in (url, other_url):
        ask(each, f"{QUESTION} {place}, {width} pixels wide", "root")
    cached = shown.local.llm.core.space.num_cached_blocks()
    legend = until(tab, f"{LEGEND}.cached === {cached} && {LEGEND}.live === 0 && {LEGEND}")
    assert sum(legend.values()) == 399
    drawn = (
        "(map => map.getContext('2d').getImageData(0, 0, map.width, map.height).data.some(each => each))"
        "(document.getElementById('map'))"
    )
    assert tab.evaluate(drawn)
    tab.evaluate("document.getElementById('map').focus()")
    tab.press("ArrowRight")
    until(tab, "/^Block 1(?=\\D)/.test(document.getElementById('block').innerText)")
    tab.evaluate("document.getElementById('refresh').click()")
    until(tab, "document.querySelectorAll('.tree li').length > 0")
    assert tab.evaluate("document.querySelectorAll('#plots figure:not([hidden])').length") == 6, "with that of tenants"
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "no horizontal scrolling"
    assert tab.evaluate(FAULTS) == []
    assert tab.complaints == []
    assert not any("root" in each for each in tab.requests), "the key is in no address"
