"""``pagedkv serve --replicas 2`` as a newcomer runs it: one command, a page, a killed replica, Ctrl-C."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

pytestmark = pytest.mark.ray

PATIENCE_S: Final = 240.0
PROMPT: Final = (
    "blue lamp: shelf 12. green cup: drawer 3. grey hat: closet 9. old map: shelf 4. red kite: locker 7. "
    "new pen: drawer 8. Where? red kite:"
)
"""More than a block, so that it can be hit."""


@dataclass(frozen=True)
class Command:
    """The command while it runs."""

    url: str
    process: subprocess.Popen[bytes]

    def routes(self) -> dict[str, Any]:
        """Return what its page shows."""
        told: dict[str, Any] = httpx.get(f"{self.url}/inspect/routes", timeout=PATIENCE_S).json()
        return told

    def ask(self) -> httpx.Response:
        """Ask the demonstration's question."""
        body = {"model": "demo", "temperature": 0, "max_tokens": 2, "prompt": PROMPT}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port: int = any_port.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    port = free_port()
    words = [sys.executable, "-m", "pagedkv", "serve", "--replicas", "2", "--num-blocks", "200", "--port", str(port)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    told = Command(f"http://127.0.0.1:{port}", process)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                if httpx.get(f"{told.url}/ready").is_success:
                    break
            except httpx.TransportError:
                assert process.poll() is None, (process.stderr or sys.stdin.buffer).read().decode()
            assert time.monotonic() < until
            time.sleep(0.3)
        yield told
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_one_command_serves_with_two_replicas_and_survives_one(command: Command) -> None:
    replicas = command.routes()["replicas"]
    assert [each["has_inspector"] for each in replicas] == [False, False], "it was not asked for"
    assert httpx.get(f"{command.url}/replicas/{replicas[0]['name']}/inspect").status_code == 404
    first = command.ask()
    assert first.json()["choices"][0]["text"].strip() == "locker 7"
    again = command.ask()
    assert again.headers["x-pagedkv-replica"] == first.headers["x-pagedkv-replica"]
    assert again.headers["x-pagedkv-routing"] == "it has most of the prompt"
    told = command.routes()
    assert len(told["replicas"]) == 2
    where = {each["name"]: each["process"] for each in told["replicas"]}
    os.kill(where[first.headers["x-pagedkv-replica"]], signal.SIGKILL)
    after = command.ask()
    assert after.json()["choices"][0]["text"].strip() == "locker 7"
    assert after.headers["x-pagedkv-replica"] != first.headers["x-pagedkv-replica"]


def test_control_c_ends_all_of_it(command: Command) -> None:
    until = time.monotonic() + PATIENCE_S
    while len(replicas := command.routes()["replicas"]) < 2:
        assert time.monotonic() < until, "there is no replacement"
        time.sleep(0.1)
    processes = [each["process"] for each in replicas]
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(PATIENCE_S) == 0
    until = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{each}").exists() for each in processes):
        assert time.monotonic() < until, "replicas outlive the command"
        time.sleep(0.1)
    assert command.process.stderr is not None
    lines = command.process.stderr.read().decode().splitlines()
    changes = [line for line in lines if " can serve" in line]
    assert [line.split()[4] for line in changes] == ["gone", "joined"], lines
    assert all(line.startswith("pagedkv: replica ") for line in changes), lines
