"""A replay with a page, as a process of its own, and the page's data over HTTP."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from tests.cli.command import start

__all__ = ["EXAMPLE", "ShownReplay", "events", "replaying"]

EXAMPLE: Final = Path(__file__).parents[3] / "examples" / "conversations.jsonl.gz"
CLIENT: Final = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class ShownReplay:
    """A replay under way.

    Args:
        process: the command; url: of its server; key: the key that it made, if any; lines: what it has said so far.
    """

    process: "subprocess.Popen[bytes]"
    url: str
    key: str | None
    lines: list[str]

    def get(self, path: str, **headers: str) -> Any:  # noqa: ANN401 - JSON
        """Read an answer."""
        answer = CLIENT.get(f"{self.url}/{path}", headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self, path: str, **headers: str) -> int:
        """Return the status of an answer."""
        with CLIENT.stream("GET", f"{self.url}/{path}", headers=headers) as answer:
            return answer.status_code

    def post(self, path: str, body: str, content_type: str = "application/json", **headers: str) -> httpx.Response:
        """Send a body."""
        headers["content-type"] = content_type
        return CLIENT.post(f"{self.url}/{path}", content=body, headers=headers)

    def wait_for_end(self) -> None:
        """Wait until all requests are served."""
        while not any("has ended" in line for line in self.lines):
            self.lines.append(self._line())

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Send a signal; return the exit code and what the command printed."""
        self.process.send_signal(number)
        printed, told = self.process.communicate(timeout=60)
        self.lines += told.decode().splitlines()
        return self.process.returncode, printed.decode()

    def _line(self) -> str:
        assert self.process.stderr is not None
        line = self.process.stderr.readline().decode()
        assert line, self.lines
        return line.strip()


def events(shown: ShownReplay, **headers: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of the page."""
    with CLIENT.stream("GET", f"{shown.url}/events", headers=headers) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        for name in lines:
            data, blank = next(lines), next(lines)
            assert blank == ""
            yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@contextmanager
def replaying(trace: Path, *options: object) -> Iterator[ShownReplay]:
    """Start a replay, and yield it once its page is served."""
    process = start("replay", trace, "--inspect", "--inspect-port", 0, *options)
    shown = ShownReplay(process, "", None, [])
    try:
        while not shown.url:
            shown.lines.append(shown._line())
            shown.url = shown.lines[-1].partition(" is shown at ")[2]
        if "--inspect-host" in options:
            shown.lines.append(shown._line())
            shown.key = shown.lines[-1].partition("key is ")[2] or None
        yield shown
    finally:
        process.kill()
        process.communicate()
