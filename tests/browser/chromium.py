"""A real browser without a window, as tests drive it: Chromium, by its DevTools protocol over a pair of pipes.

Needs no package of browsers: messages are JSON, each ended by a zero byte, written to the browser's descriptor 3 and
read from its descriptor 4 (``--remote-debugging-pipe``).
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pytest

__all__ = ["BROWSER", "Tab", "browser_tab", "installed_browser", "needs_browser"]

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER: Final = next(filter(None, map(shutil.which, NAMES)), None)
"""The browser of this machine, or None."""
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # the tests may run as root, on a page that they made
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--remote-debugging-pipe",
)
FIRST_FREE: Final = 10
LAUNCHER: Final = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PIECE_NBYTES: Final = 2**16

Scheme = Literal["light", "dark"]


@dataclass
class Tab:
    """One tab. What the page complained of, and what it asked the network for, is kept."""

    reading: int
    writing: int
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _session: str | None = None
    _last_id: int = 0
    _buffer: bytes = b""

    def begin(self) -> None:
        """Open the tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path | str, width: int, height: int = 900, scheme: Scheme = "light") -> None:
        """Open a page of a disk, or an address, at a width; wait until it is loaded and its fonts are there."""
        self.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._next()["method"] != "Page.loadEventFired":
            pass
        self.evaluate("document.fonts.ready.then(() => true)")

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page another size, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - whatever JavaScript gives
        """Evaluate an expression in the page; a promise is waited for. Raises RuntimeError for an exception."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, width: int, height: int) -> bytes:
        """Take a PNG of the page's top."""
        self.resize(width, height)
        data: str = self.call("Page.captureScreenshot", format="png")["data"]
        return base64.b64decode(data)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol. Raises RuntimeError if the browser refuses."""
        self._last_id += 1
        message: dict[str, object] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.writing, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self.reading, PIECE_NBYTES)
            if not piece:
                raise RuntimeError("the browser ended")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.setdefault("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "warning", "assert"}:
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextmanager
def installed_browser() -> Iterator[Tab]:
    """Open a tab of this machine's browser. At the end it shows no page, so that no server waits for its stream."""
    assert BROWSER is not None
    with browser_tab(BROWSER) as opened:
        yield opened
        opened.call("Page.navigate", url="about:blank")


@contextmanager
def browser_tab(browser: str) -> Iterator[Tab]:
    """Start a browser with a profile of its own, and open a tab; both are gone afterwards."""
    to_browser, from_us = map(_moved, os.pipe())
    to_us, from_browser = map(_moved, os.pipe())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", LAUNCHER, str(to_browser), str(from_browser)),
                *(browser, *FLAGS, f"--user-data-dir={profile}"),
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        tab = Tab(to_us, from_us)
        try:
            tab.begin()
            yield tab
        finally:
            os.close(from_us)  # which ends the browser
            os.close(to_us)
            process.terminate()
            process.wait()


def _moved(descriptor: int) -> int:
    """Move a descriptor out of the way of those that the browser wants."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
    os.close(descriptor)
    return moved
