"""The page of a replay in a real browser, without a window: its numbers are those of the report.

Skipped where there is no Chromium: `apt-get install chromium` brings one.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.browser.chromium import Scheme, Tab, installed_browser, needs_browser
from tests.browser.inspector_page import LEGEND, WIDTHS
from tests.browser.layout import FAULTS
from tests.browser.waiting import until
from tests.cli.command import run
from tests.cli.inspecting.pages import EXAMPLE, ShownReplay, events, replaying

pytestmark = [
    pytest.mark.plain_only,
    needs_browser,
]

OPTIONS: Final = ("--limit", 40, "--num-blocks", 500, "--max-sequences", 12)
FIGURES: Final = (
    "Object.fromEntries(Array.from(document.querySelectorAll('#figures > div'), "
    "each => [each.dataset.figure, each.querySelector('dd').textContent]))"
)
FEW_ROWS: Final = "document.querySelectorAll('#requests tbody tr:nth-child(n+3)').forEach(row => row.remove())"
"""Takes away what can only be seen by scrolling the table, which the search for faults takes for visible."""
STATUS: Final = "document.getElementById('status').textContent"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with installed_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def ended() -> Iterator[ShownReplay]:
    with replaying(EXAMPLE, *OPTIONS, "--inspect-speed", "max") as shown:
        shown.wait_for_end()
        yield shown


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("replay", EXAMPLE, *OPTIONS, "--json", "-").stdout)
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_shows_the_numbers_of_the_report(
    tab: Tab, ended: ShownReplay, report: dict[str, Any], width: int
) -> None:
    schemes: dict[int, Scheme] = {400: "light", 800: "dark", 1400: "light"}
    tab.open(ended.url, width, scheme=schemes[width])
    assert until(tab, f"{STATUS} === 'The replay has ended' && {STATUS}")
    figures = until(tab, f"{FIGURES}.requests && {FIGURES}")
    requests, hits, misses = report["requests"], report["hits"], report["misses"]
    assert figures["requests"] == figures["finished"] == str(requests["num_finished"]) == "40"
    assert figures["rejected"] == "0"
    assert figures["prompt"] == f"{requests['num_prompt_tokens']:,}"
    assert figures["hit"].startswith(f"{hits['num_hit_tokens']:,} ({100 * hits['token_hit_ratio']:.1f} %")
    assert figures["missed"] == f"{misses['num_tokens']:,}"
    missed = {tokens for tokens in misses["by_cause"].values() if tokens}
    assert {int(value.replace(",", "")) for value in list(figures.values())[7:]} == missed
    assert figures["time"] == f"{report['steps']['virtual_s']:.1f} s"
    cached = next(events(ended))[1]["pools"][0]["counts"]["cached"]
    legend = until(tab, f"{LEGEND}.cached && {LEGEND}")
    assert (legend["cached"], legend["live"]) == (cached, 0)
    until(tab, "document.querySelectorAll('#requests tbody tr').length === 30 && document.body")
    assert tab.evaluate("document.getElementById('hold').hidden")
    tab.evaluate("document.getElementById('refresh').click()")
    until(tab, "document.querySelectorAll('.tree li').length > 1")
    until(tab, "document.querySelector('#plots figure:last-child').innerText.includes('never stored')")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "no horizontal scrolling"
    assert tab.evaluate(f"({FEW_ROWS}, {FAULTS.strip().removesuffix(';')})") == []
    assert tab.complaints == []


def test_the_replay_pauses_and_the_page_steps_back(tab: Tab) -> None:
    with replaying(EXAMPLE, "--limit", 200, "--num-blocks", 900, "--inspect-speed", 0.5) as shown:
        tab.open(shown.url, 800)
        until(tab, f"{LEGEND}.live > 0")
        assert tab.evaluate(STATUS) == "Replaying, 0.5 s of the trace a second"
        until(tab, f"parseFloat({FIGURES}.time) > 1.5")
        until(tab, "document.querySelectorAll('#requests tbody tr.under-way').length > 1")
        tab.evaluate("document.getElementById('hold').click()")
        until(tab, f"{STATUS} === 'The replay is paused'")
        before = tab.evaluate(FIGURES)["time"]
        version = next(events(shown))[1]["version"]
        next(told for _, told in events(shown) if told["version"] > version + 2)
        assert tab.evaluate(FIGURES)["time"] == before
        back = "slider => (slider.value = -1, slider.dispatchEvent(new Event('input')))"
        tab.evaluate(f"({back})(document.getElementById('slider'))")
        until(tab, "document.getElementById('time').textContent === '1.00 s ago'")
        tab.evaluate("document.getElementById('pause').click()")
        tab.evaluate("document.getElementById('hold').click()")
        until(tab, f"{STATUS}.startsWith('Replaying')")
        until(tab, f"parseFloat({FIGURES}.time) > {before.split()[0]}")
        tab.call("Page.navigate", url="about:blank")
    assert tab.complaints == []
