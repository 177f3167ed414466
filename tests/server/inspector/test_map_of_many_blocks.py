"""The map of a large pool, of which little is used, in a real browser: the page alone, with a pool that is made up."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import pytest

import pagedkv.server.inspector
from tests.browser.chromium import Tab, installed_browser, needs_browser
from tests.browser.waiting import until

pytestmark = needs_browser

STATIC: Final = Path(pagedkv.server.inspector.__file__).with_name("static")
STATES: Final = ["null", "free", "live", "cached", "leased", "deferred"]
NUM_BLOCKS: Final = 32_765
USED: Final = [*range(1, 120), *range(20_000, 20_105)]
"""Used blocks, in two places of the pool: 224."""


def snapshot() -> dict[str, object]:
    states = bytearray([STATES.index("free")] * NUM_BLOCKS)
    states[0] = STATES.index("null")
    for block in USED:
        states[block] = STATES.index("cached")
    counts = {state: states.count(place) for place, state in enumerate(STATES)}
    pool = {"name": "full", "num_blocks": NUM_BLOCKS, "counts": counts, "map": base64.b64encode(states).decode()}
    nothing: dict[str, object] = {"requests": [], "ended": [], "tiers": [], "loads": [], "shares": [], "causes": []}
    buckets = {"start_s": [], "misses": [], "width_s": 1}
    return {
        "now_s": 5.0,
        "unit_s": 1,
        "block_states": STATES,
        "pools": [pool],
        "model": "made up",
        "tenants": [""],
        **nothing,
        "num_requests": 0,
        "step": None,
        "replay": None,
        "buckets": buckets,
    }


class Page(BaseHTTPRequestHandler):
    """Serves the page's files, and one snapshot."""

    def do_GET(self) -> None:
        """Answer."""
        name = self.path.rpartition("/")[2]
        kind = {"page.js": "text/javascript", "page.css": "text/css", "events": "text/event-stream"}.get(
            name, "text/html"
        )
        if name == "events":
            body = f"event: snapshot\ndata: {json.dumps(snapshot())}\n\n".encode()
        else:
            file = STATIC / (name if name in {"page.js", "page.css"} else "page.html")
            body = file.read_bytes().replace(b'data-access="keys"', b'data-access="open"')
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with installed_browser() as opened:
        opened.open(f"http://127.0.0.1:{server.server_port}/inspect", 1400)
        yield opened
    server.shutdown()
    thread.join()
    server.server_close()


SHARE_COLOURED: Final = (
    "(() => { const map = document.getElementById('map'), pixels = map.getContext('2d')"
    ".getImageData(0, 0, map.width, map.height).data, shade = getComputedStyle(document.documentElement)"
    ".getPropertyValue('--cached').trim(), [r, g, b] = [1, 3, 5].map(at => parseInt(shade.slice(at, at + 2), 16));"
    "let drawn = 0, cached = 0; for (let at = 0; at < pixels.length; at += 4) { drawn += pixels[at + 3] > 0;"
    "cached += pixels[at + 3] > 0 && pixels[at] === r && pixels[at + 1] === g && pixels[at + 2] === b; }"
    "return cached / drawn; })()"
)


def test_the_map_shows_where_blocks_are_used_and_all_of_them_when_asked(tab: Tab) -> None:
    until(tab, "document.querySelector('#legend [data-state=cached]')?.dataset.number === '224'")
    assert tab.evaluate(SHARE_COLOURED) > 0.5, "what is used fills most of the map"
    assert tab.evaluate("document.getElementById('map-extent').textContent") == "32,445 unused blocks are left out."
    tab.evaluate("extent.value = 'all'; extent.dispatchEvent(new Event('change'))")
    until(tab, "document.getElementById('map-extent').textContent === ''")
    assert tab.evaluate(SHARE_COLOURED) < 0.05
    tab.evaluate("extent.value = 'used'; extent.dispatchEvent(new Event('change'))")
    until(tab, "document.getElementById('map-extent').textContent !== ''")


def test_pointing_finds_a_block_behind_those_that_are_left_out(tab: Tab) -> None:
    until(tab, "document.getElementById('map-extent').textContent !== ''")
    tab.evaluate(
        "document.getElementById('map').scrollIntoView({block: 'center'}); document.getElementById('map').focus()"
    )
    for _ in range(2):
        tab.press("ArrowRight")
    until(tab, "/^Block [12]\\b/.test(document.getElementById('block').innerText)")
    box = tab.evaluate("(box => [box.left, box.bottom])(document.getElementById('map').getBoundingClientRect())")
    tab.point_at(box[0] + 5, box[1] - 5)  # the last row
    until(tab, "/^Block (199|200|201)\\d\\d\\b/.test(document.getElementById('block').innerText)")
