"""The real media of the fault machine: damage at rest by other means than the store's, and outages of their own."""

import contextlib
import errno
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import redis

from pagedkv.tiers.body import Body
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.redis_body import RedisBody
from tests.tiers.bodies import RedisServer, unmount
from tests.tiers.faults.contents import IDENTITY
from tests.tiers.faults.faulty_body import FaultyBody

FINGERPRINT: Final = IDENTITY.fingerprint
CALL_TIMEOUT_S: Final = 0.15
NO_MEMORY: Final = "1"


class Medium(Protocol):
    """What a machine does to a medium behind a store's back."""

    outages: tuple[str, ...]

    def open(self) -> Body:
        """Open a body."""
        ...

    def files(self) -> dict[bytes, int]:
        """Return the bytes of each entry that is there."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """Return what is stored under a key."""
        ...

    def put(self, key: bytes, frame: bytes | None) -> bool:
        """Change what is stored under a key, if there is anything; return whether there was."""
        ...

    def spoil(self, key: bytes) -> None:
        """Put something that cannot be read in the place of an entry."""
        ...

    def begin(self, outage: str, body: FaultyBody) -> None:
        """Begin an outage."""
        ...

    def end(self, outage: str, body: FaultyBody) -> bool:
        """End an outage; return whether all content is lost."""
        ...

    def close(self) -> None:
        """Remove what the medium needs."""
        ...


class FolderMedium:
    """A folder. Files are changed in place, so that readers meet them while they are written.

    With ``disk_nbytes`` it is a file system of that size, which gets full before the cap.
    """

    def __init__(self, folder: Path, cap_nbytes: int, disk_nbytes: int = 0) -> None:
        self._folder = folder / "disk"
        self._folder.mkdir(mode=0o700)
        self._cap_nbytes = cap_nbytes
        self._is_mounted = False
        self.outages: tuple[str, ...] = ("dead server", "slow server", "emptied root")
        if disk_nbytes:
            options = f"size={disk_nbytes},mode=700"
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._folder)]
            self._is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
            if not self._is_mounted:
                raise OSError(errno.EPERM, "a small file system cannot be mounted here")

    def open(self) -> Body:
        """Open a body."""
        return FolderBody(self._folder / "root", FINGERPRINT, self._cap_nbytes)

    def files(self) -> dict[bytes, int]:
        """Return the bytes of each frame."""
        found: dict[bytes, int] = {}
        for path in (self._folder / "root").rglob("*.frame"):
            with contextlib.suppress(FileNotFoundError):
                if path.parent.name != "quarantine" and stat.S_ISREG((status := path.lstat()).st_mode):
                    found[bytes.fromhex(path.stem)] = status.st_size
        return found

    def get(self, key: bytes) -> bytes | None:
        """Return a frame."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: bytes, frame: bytes | None) -> bool:
        """Change a file in place, or delete it."""
        try:
            if frame is None:
                self._path(key).unlink()
            else:
                with self._path(key).open("r+b") as file:
                    file.write(frame)
                    file.truncate()
        except FileNotFoundError:
            return False
        return True

    def spoil(self, key: bytes) -> None:
        """Put a link, or a folder, in the place of a file."""
        self._path(key).unlink(missing_ok=True)
        self._path(key).symlink_to("/dev/zero") if key[1] % 2 else self._path(key).mkdir()

    def begin(self, outage: str, body: FaultyBody) -> None:
        """Let all calls fail, or wait, or delete all that is there."""
        if outage == "dead server":
            body.is_dead = True
        elif outage == "slow server":
            body.may_go_on.clear()
        else:
            for path in (self._folder / "root").iterdir():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def end(self, outage: str, body: FaultyBody) -> bool:
        """Let calls go on."""
        body.is_dead = False
        body.may_go_on.set()
        return outage == "emptied root"

    def close(self) -> None:
        """Unmount the file system, once calls that were given up have closed their files."""
        if self._is_mounted:
            unmount(self._folder)
            self._is_mounted = False

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / "root" / FINGERPRINT.hex()[:32] / name[:2] / f"{name}.frame"


class RedisMedium:
    """A Redis server of its own, which is stopped, killed, or out of memory for a while."""

    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(folder)
        self.outages: tuple[str, ...] = ("dead server", "slow server", "full server")

    def open(self) -> Body:
        """Open a body."""
        return RedisBody(self._server.url, FINGERPRINT, timeout_s=CALL_TIMEOUT_S)

    def files(self) -> dict[bytes, int]:
        """Return the bytes of each value."""

        def measured(client: Any) -> dict[bytes, int]:  # noqa: ANN401 - redis-py's
            names = list(client.scan_iter(count=1000))
            pipe = client.pipeline(transaction=False)
            for name in names:
                pipe.strlen(name)
            sizes = zip(names, pipe.execute(raise_on_error=False), strict=True)  # a value may be of another type
            return {bytes.fromhex(name[-64:].decode()): size for name, size in sizes if isinstance(size, int) and size}

        found: dict[bytes, int] = self._with_client(measured)
        return found

    def get(self, key: bytes) -> bytes | None:
        """Return a value."""
        value: bytes | None = self._with_client(lambda client: client.get(self._name(key)))
        return value

    def put(self, key: bytes, frame: bytes | None) -> bool:
        """Change a value, or delete it."""
        if frame is None:
            return bool(self._with_client(lambda client: client.delete(self._name(key))))
        return bool(self._with_client(lambda client: client.set(self._name(key), frame, xx=True)))

    def spoil(self, key: bytes) -> None:
        """Put a value of another type in the place of an entry."""
        self._with_client(lambda client: (client.delete(self._name(key)), client.lpush(self._name(key), b"another")))

    def begin(self, outage: str, body: FaultyBody) -> None:
        """Stop or kill the server, or take its memory away."""
        del body
        if outage == "dead server":
            self._server.kill()
        elif outage == "slow server":
            self._server.stop()
        else:
            self._with_client(lambda client: client.config_set("maxmemory", NO_MEMORY))

    def end(self, outage: str, body: FaultyBody) -> bool:
        """Let the server go on; one that was killed has lost all."""
        del body
        if outage == "dead server":
            self._server.start()
            return True
        if outage == "slow server":
            self._server.go_on()
        else:
            self._with_client(lambda client: client.config_set("maxmemory", "0"))
        return False

    def close(self) -> None:
        """End the server."""
        self._server.close()

    def _name(self, key: bytes) -> str:
        return f"pagedkv:{FINGERPRINT.hex()[:32]}:{key.hex()}"

    def _with_client(self, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - redis-py's
        client = redis.Redis.from_url(self._server.url)
        try:
            return call(client)
        finally:
            client.close()
