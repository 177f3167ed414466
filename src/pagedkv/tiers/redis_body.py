"""A body in Redis: a frame is the value of one key, written by one SET, so it appears whole or not at all.

redis-py retries by default, which turns a deadline of half a second into ten. Here each call is sent once. A slow or
dead server costs one timeout, which the circuit breaker of the core counts.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, TypeVar

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.body import Stored, Usage, brief, key_of_name, name_of_key, without_secrets
from pagedkv.tiers.frame import Buffer

R = TypeVar("R")

SCAN_COUNT: Final = 1000


class RedisBody:
    """Frames in a Redis server, under names ``PREFIX:FINGERPRINT:KEY``.

    Args:
        url: "redis://HOST:PORT/DB", "rediss://..." or "unix://...".
        fingerprint: of the identity; part of every name.
        prefix: begins every name; the bytes of all such names count as the root.
        timeout_s: of connecting, of an answer, and of each piece of a frame that is sent.

    Raises:
        ConfigurationError: the URL is none, or the server does not answer; the message states what was tried.
        MissingExtraError: redis is not installed.
    """

    medium = "redis"
    is_trusted = False
    is_immediate = False

    def __init__(self, url: str, fingerprint: bytes, *, prefix: str = "pagedkv", timeout_s: float = 2.0) -> None:
        with needing("tiers", "a tier in Redis"):
            self._redis: Any = import_module("redis")
            retry: Any = import_module("redis.retry").Retry(import_module("redis.backoff").NoBackoff(), 0)
        self._root = f"{prefix}:"
        self._begin = f"{prefix}:{fingerprint.hex()[:32]}:"
        try:
            self._client: Any = self._redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry, decode_responses=False
            )
            self._call(self._client.ping)
        except (OSError, ValueError) as problem:
            raise ConfigurationError(
                f"the Redis server of a tier does not answer PING within {timeout_s} s: {without_secrets(url)}: "
                f"{brief(problem, url)}"
            ) from None  # what redis-py and urllib say may have the password

    def scan(self) -> Iterator[Stored]:
        """List the entries by SCAN; the order of use is OBJECT IDLETIME. Other names are not touched. O(names)."""
        for names in self._names(self._begin):
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.object("idletime", name)  # before its length is asked for, which is a use
                pipe.strlen(name)
            answers = self._call(partial(pipe.execute, raise_on_error=False))
            for name, nbytes, idle_s in zip(names, answers[1::2], answers[::2], strict=True):
                key = key_of_name(name.decode("ascii", "replace").removeprefix(self._begin))
                if key is not None and isinstance(nbytes, int) and nbytes:
                    yield Stored(key, nbytes, -float(idle_s) if isinstance(idle_s, int) else 0.0)

    def read(self, key: bytes, nbytes: int, timeout_s: float) -> Buffer | None:
        """Get a value; None if there is none."""
        del nbytes, timeout_s
        value: bytes | None = self._call(lambda: self._client.get(self._name(key)))
        return value

    def write(self, key: bytes, pieces: Sequence[Buffer], timeout_s: float) -> None:
        """Set a value. The pieces go to the socket as they are: joining them took as long as sending them."""
        del timeout_s
        name = self._name(key).encode()
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        begin = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, nbytes)
        self._call(partial(self._send, (begin, *pieces, b"\r\n")))

    def delete(self, key: bytes, timeout_s: float) -> bool:
        """Delete a value."""
        del timeout_s
        return bool(self._call(lambda: self._client.delete(self._name(key))))

    def usage(self) -> Usage:
        """Sum the lengths of all values below the prefix. Free is what is left of ``maxmemory``, if it is set."""
        nbytes = 0
        for names in self._names(self._root):
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.strlen(name)
            answers = self._call(partial(pipe.execute, raise_on_error=False))
            nbytes += sum(answer for answer in answers if isinstance(answer, int))
        memory = self._call(lambda: self._client.info("memory"))
        most = int(memory.get("maxmemory", 0))
        return Usage(nbytes, max(0, most - int(memory["used_memory"])) if most else None)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _send(self, command: Sequence[Buffer]) -> None:
        """Send one packed command in pieces, and read its answer.

        A connection on which anything but an answer of the server came is closed by the client itself.
        """
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command(command)
            connection.read_response()
        finally:
            pool.release(connection)

    def _name(self, key: bytes) -> str:
        return f"{self._begin}{name_of_key(key)}"

    def _names(self, begin: str) -> Iterator[list[bytes]]:
        cursor = 0
        while True:
            cursor, names = self._call(partial(self._client.scan, cursor, match=f"{begin}*", count=SCAN_COUNT))
            if names:
                yield names
            if not cursor:
                return

    def _call(self, call: Callable[[], R]) -> R:
        """Call the client, and turn its errors into those of bodies."""
        try:
            return call()
        except self._redis.exceptions.TimeoutError as problem:
            raise TimeoutError(str(problem)) from problem
        except self._redis.exceptions.OutOfMemoryError as problem:
            raise OSError(errno.ENOMEM, str(problem)) from problem
        except self._redis.exceptions.RedisError as problem:
            raise ConnectionError(str(problem)) from problem
