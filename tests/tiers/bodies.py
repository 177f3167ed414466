"""Bodies for tests: every real one, and wrappers that are slow, hang, or fail."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import pytest

from pagedkv.tiers.body import Body, HostBody, Stored, Usage
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import Buffer
from pagedkv.tiers.object_body import ObjectBody
from pagedkv.tiers.redis_body import RedisBody

KINDS: Final = (
    "host",
    "folder",
    "folder past the page cache",
    "redis",
    "object in a folder",
    "object in memory",
    "object in S3",
)
LASTING: Final = tuple(kind for kind in KINDS if kind not in {"host", "object in memory"})
"""Those whose content another body, or another process, finds again."""
LARGE_CAP: Final = 2**40
CLOSED_WITHIN_S: Final = 30.0
MOTO: Final = Path(sys.prefix) / "moto" / "bin"
BUCKET: Final = "tiers"
SERVERS: Final = {"redis": "redis_url", "object in S3": "s3_url"}
"""The fixture of each kind that has a server."""


def unmount(folder: Path) -> None:
    """Unmount a file system, once this process has closed all files there.

    Raises AssertionError: files stay open. Whoever else looks at it for a moment (an indexer, a backup) may go on: the
    mount is detached, and ends with the last one.
    """
    until = time.monotonic() + CLOSED_WITHIN_S
    while opened := _opened_below(folder):
        assert time.monotonic() < until, f"left open: {opened}"
        threading.Event().wait(0.01)
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)  # noqa: S607


def _opened_below(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open, or has mapped."""
    found: list[str] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    found += [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [path for path in found if path.startswith(f"{folder}/")]


class Server:
    """A server of our own, which a test may stop and kill."""

    def __init__(self, command: list[str], address: tuple[socket.AddressFamily, Any], log: Path) -> None:
        self._command = command
        self._address = address
        self._log = log
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        family, address = self._address
        for _ in range(6000):
            assert self._process.poll() is None, f"{self._command[0]} ended: {self._log.read_text()[-500:]}"
            with socket.socket(family) as probe:
                if probe.connect_ex(address) == 0:
                    return
            threading.Event().wait(0.005)
        raise AssertionError(f"{self._command[0]} does not answer")

    def stop(self) -> None:
        """Stop the process: calls get no answer until it goes on."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a stopped process go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process; what it had is lost."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the server."""
        self.kill()


class RedisServer(Server):
    """A Redis server on a socket of its own. Skips the test where there is none."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        self._path = tempfile.mkdtemp(prefix="pagedkv-redis-")  # the path of a socket is at most 107 bytes long
        path = f"{self._path}/s"
        self.url = f"unix://{path}"
        command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", str(folder), *options]
        super().__init__(command, (socket.AF_UNIX, path), folder / "redis.log")

    def close(self) -> None:
        """End the server and remove its socket."""
        super().close()
        shutil.rmtree(self._path, ignore_errors=True)


class S3Server(Server):
    """Moto's S3 on a port of its own, with one bucket. Skips the test where there is none."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("moto_server", path=f"{MOTO}{os.pathsep}{os.environ.get('PATH', '')}")
        if program is None:
            pytest.skip("moto's S3 is not installed (make test-s3)")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [program, "-H", "127.0.0.1", "-p", str(port)]
        super().__init__(command, (socket.AF_INET, ("127.0.0.1", port)), folder / "moto.log")

    def start(self) -> None:
        """Start the server, and make its bucket."""
        super().start()
        urlopen(Request(f"{self.url}/{BUCKET}", method="PUT")).close()  # noqa: S310 - an address of our own


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """Run a Redis server; skip the test where there is none."""
    with closing(RedisServer(folder, *options)) as server:
        yield server.url


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run moto's S3; skip the test where there is none."""
    with closing(S3Server(folder)) as server:
        yield server.url


def s3_options(address: str) -> dict[str, Any]:
    """Return the options of an object store for a server of ours."""
    return {
        "endpoint": address,
        "access_key_id": "any",
        "secret_access_key": "any",
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    }


def make_body(kind: str, folder: Path, url: str, fingerprint: bytes, cap_nbytes: int = LARGE_CAP) -> Body:
    """Make a body of a kind; those that last find what is below ``folder``, or at ``url``."""
    if kind == "host":
        return HostBody()
    if kind.startswith("folder"):
        return FolderBody(folder / "root", fingerprint, cap_nbytes, direct=kind != "folder")
    if kind == "redis":
        return RedisBody(url, fingerprint, prefix=folder.name, timeout_s=5.0)
    if kind == "object in memory":
        return ObjectBody("memory:///", fingerprint)
    if kind == "object in S3":
        return ObjectBody(f"s3://{BUCKET}/{folder.name}", fingerprint, **s3_options(url))
    (folder / "objects").mkdir(exist_ok=True)
    return ObjectBody(f"file://{folder}/objects", fingerprint)


class TroubledBody:
    """A body around another one, with trouble to be set by a test.

    Attributes:
        gate: calls wait while it is clear, as for a server that hangs.
        error: raised by each call; None: none.
        delay_s: of each call.
        num_reads, num_writes: calls so far.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.medium = body.medium
        self.is_trusted = body.is_trusted
        self.is_immediate = False
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.delay_s = 0.0
        self.num_reads = 0
        self.num_writes = 0

    def _suffer(self) -> None:
        self.gate.wait()
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error

    def scan(self) -> Iterator[Stored]:
        """List the entries of the inner body."""
        return self.body.scan()

    def read(self, key: bytes, nbytes: int, timeout_s: float) -> Buffer | None:
        """Read after the trouble."""
        self.num_reads += 1
        self._suffer()
        return self.body.read(key, nbytes, timeout_s)

    def write(self, key: bytes, pieces: Sequence[Buffer], timeout_s: float) -> None:
        """Write after the trouble."""
        self.num_writes += 1
        self._suffer()
        self.body.write(key, pieces, timeout_s)

    def delete(self, key: bytes, timeout_s: float) -> bool:
        """Delete after the trouble."""
        self._suffer()
        return self.body.delete(key, timeout_s)

    def usage(self) -> Usage:
        """Measure the inner body."""
        return self.body.usage()

    def close(self) -> None:
        """Close the inner body."""
        self.body.close()
