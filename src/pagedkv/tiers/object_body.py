"""A body in an object store, by obstore: S3, Google Cloud, Azure, or a folder for trials.

A frame is one object. It is put with ``create``: an object that is there already is kept, since equal keys mean equal
content, and a damaged one is deleted when its read is refused. Each call is sent once, with a timeout.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Final, TypeVar

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.body import Stored, Usage, brief, key_of_name, name_of_key, without_secrets
from pagedkv.tiers.frame import Buffer

R = TypeVar("R")

INNERMOST: Final = re.compile(r'message: "([^"\n]*)"')


class ObjectBody:
    """Frames in an object store, under paths ``FINGERPRINT/KK/KEY.frame``.

    Args:
        url: "s3://BUCKET/PATH", "gs://...", "az://...", "file:///FOLDER" or "memory:///".
        fingerprint: of the identity; the first part of every path.
        timeout_s: of one call, connecting included.
        options: further settings of the store, as obstore takes them (endpoint, region, credentials).

    Raises:
        ConfigurationError: the URL is not valid, or the store does not answer; the message has the URL and the reason.
        MissingExtraError: obstore is not installed.
    """

    medium = "object"
    is_trusted = False
    is_immediate = False

    def __init__(self, url: str, fingerprint: bytes, *, timeout_s: float = 5.0, **options: Any) -> None:  # noqa: ANN401 - obstore's
        with needing("tiers", "a tier in an object store"):
            self._obstore: Any = import_module("obstore")
            stores: Any = import_module("obstore.store")
            self._errors: Any = import_module("obstore.exceptions")
        self._begin = fingerprint.hex()[:32]
        settings = dict(options)
        if not url.startswith(("file:", "memory:")):
            wait = timedelta(seconds=timeout_s)
            settings["client_options"] = {
                "timeout": wait,
                "connect_timeout": wait,
                **settings.get("client_options", {}),
            }
            settings.setdefault("retry_config", {"max_retries": 0, "retry_timeout": wait})
        try:
            self._store: Any = stores.from_url(url, **settings)
            self._call(lambda: next(iter(self._obstore.list(self._store, prefix=self._begin)), None))
        except (OSError, ValueError, TypeError, self._errors.BaseError) as problem:
            raise ConfigurationError(
                f"the object store of a tier does not answer a list within {timeout_s} s: {without_secrets(url)}: "
                f"{_reason(problem, url)}"
            ) from None  # pages of Rust, perhaps with the password

    def scan(self) -> Iterator[Stored]:
        """List the entries by their modification times. Other objects are not touched. O(objects)."""
        for each in self._objects(self._begin):
            name = each["path"].rpartition("/")[2]
            key = key_of_name(name.removesuffix(".frame")) if name.endswith(".frame") else None
            if key is not None and each["path"] == self._path(key):
                yield Stored(key, each["size"], each["last_modified"].timestamp())

    def read(self, key: bytes, nbytes: int, timeout_s: float) -> Buffer | None:
        """Get an object; None if it does not exist."""
        del nbytes, timeout_s
        try:
            return memoryview(self._call(lambda: self._obstore.get(self._store, self._path(key)).bytes()))
        except FileNotFoundError:
            return None

    def write(self, key: bytes, pieces: Sequence[Buffer], timeout_s: float) -> None:
        """Put an object, unless it exists."""
        del timeout_s
        frame = b"".join(pieces)
        try:
            self._call(lambda: self._obstore.put(self._store, self._path(key), frame, mode="create"))
        except FileExistsError:
            return

    def delete(self, key: bytes, timeout_s: float) -> bool:
        """Delete an object."""
        del timeout_s
        try:
            self._call(lambda: self._obstore.delete(self._store, self._path(key)))
        except FileNotFoundError:
            return False
        return True

    def usage(self) -> Usage:
        """Sum the sizes of all objects of the store's path."""
        return Usage(sum(each["size"] for each in self._objects(None)), None)

    def close(self) -> None:
        """Nothing is kept open between calls."""

    def _path(self, key: bytes) -> str:
        name = name_of_key(key)
        return f"{self._begin}/{name[:2]}/{name}.frame"

    def _objects(self, prefix: str | None) -> Iterator[Any]:
        listing = iter(self._obstore.list(self._store, prefix=prefix))
        while (chunk := self._call(lambda: next(listing, None))) is not None:
            yield from chunk

    def _call(self, call: Callable[[], R]) -> R:
        """Call the client, and turn its errors into those of bodies."""
        try:
            return call()
        except (FileNotFoundError, self._errors.NotFoundError) as problem:
            raise FileNotFoundError(_reason(problem)) from None
        except self._errors.AlreadyExistsError as problem:
            raise FileExistsError(_reason(problem)) from None
        except self._errors.BaseError as problem:
            text = str(problem)
            if "timed out" in text or "Timeout" in text:
                raise TimeoutError(_reason(problem)) from None
            raise ConnectionError(_reason(problem)) from None


def _reason(problem: Exception, url: str = "") -> str:
    """Return the first line of an error of obstore, and the innermost message of the pages that follow it."""
    innermost = INNERMOST.findall(str(problem))
    return ": ".join([brief(problem, url), *innermost[-1:]])
