"""The folder of machine code that is kept between processes: the first one that can be written, and its entries.

An entry is a file that is written atomically and has a checksum, so any number of processes may read and write at once.
Faults of a folder cost only time: an entry that cannot be read is compiled again, and one that cannot be written causes
one warning.
"""

import hashlib
import os
import stat
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import numba
from numba.misc import appdirs

FOLDER_NAME: Final = "pagedkv-loops"
SHIPPED: Final = "machine_code"
"""A folder in the package, for entries that are installed with it."""
SUFFIX: Final = ".nbc"
CHECKSUM_NBYTES: Final = 32
KEY_NBYTES: Final = 8
MAX_NBYTES: Final = 128 << 20
"""Largest size of a folder. The loops of a replay take 5 MB: there is room for the sources of many branches."""


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder of entries.

    Args:
        path: its path; it may not exist before the first write.
        is_private: it is in a folder where all users may create folders, so that it must belong to this user alone:
            entries are code that is executed.
    """

    path: Path
    is_private: bool = False

    def make(self) -> None:
        """Create the folder unless it exists.

        Raises:
            OSError: it cannot be created, or it must be private and others own it or have access to it.
        """
        self.path.mkdir(mode=0o700 if self.is_private else 0o777, parents=True, exist_ok=True)
        if self.is_private and sys.platform != "win32":
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise PermissionError("it is open to other users")

    def read(self, name: str) -> bytes | None:
        """Return the content last written under a name; None if there is none, or if it is damaged."""
        try:
            self.make()  # every time: long after the start, another user may have created the folder anew
            content = self._file(name).read_bytes()
        except OSError:
            return None
        checksum, entry = content[:CHECKSUM_NBYTES], content[CHECKSUM_NBYTES:]
        return entry if checksum == hashlib.sha256(entry).digest() else None

    def write(self, name: str, entry: bytes) -> None:
        """Write an entry atomically; warn once on failure. A process's first call also limits the folder's size."""
        partial = self.path / f"{name}.{uuid.uuid4().hex}.partial"
        try:
            self.make()
            try:
                partial.write_bytes(hashlib.sha256(entry).digest() + entry)
                partial.replace(self._file(name))
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            warn_once(f"the machine code of pagedkv's loops cannot be kept in {self.path}: {error.strerror or error}.")
        else:
            _make_room_once(self)

    @staticmethod
    def named(name: str, digest: str, *key: object) -> str:
        """Return the name of an entry, made of its subject, the digest of its sources, and the rest of its key."""
        return f"{name}-{digest}-{hashlib.sha256(repr(key).encode()).hexdigest()[: 2 * KEY_NBYTES]}"

    def remove(self, prefix: str) -> None:
        """Remove every entry with a name that begins with a prefix."""
        for file in self.path.glob(f"{prefix}*"):
            file.unlink(missing_ok=True)

    def make_room(self, max_nbytes: int) -> None:
        """Remove the least recently used entries, until the others take at most ``max_nbytes`` bytes."""
        files = []
        for file in self.path.iterdir():
            with suppress(FileNotFoundError):  # another process removes entries too
                status = file.stat()
                files.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, file))
        total = sum(nbytes for _, nbytes, _ in files)
        for _, nbytes, file in sorted(files):
            if total <= max_nbytes:
                break
            file.unlink(missing_ok=True)
            total -= nbytes

    def _file(self, name: str) -> Path:
        return self.path / (name + SUFFIX)


@cache
def find_cache_folder(package_folder: Path) -> CacheFolder | None:
    """Find and create the folder of this process; None, and one warning, if none can be written.

    The order is: ``NUMBA_CACHE_DIR`` if it is set, ``__pycache__`` of the package, the user's folder for caches, the
    system's folder for temporary files.
    """
    refusals = []
    for folder in _candidates(package_folder):
        try:
            folder.make()
            tempfile.TemporaryFile(dir=folder.path).close()
        except OSError as error:
            refusals.append(f"{folder.path} ({error.strerror or error})")
        else:
            return folder
    warn_once(
        "pagedkv compiles its loops anew in each process, which takes many seconds, since no folder to keep the "
        f"machine code in can be written: {', '.join(refusals)}. Set NUMBA_CACHE_DIR to a folder that can."
    )
    return None


@cache
def folders_to_read(package_folder: Path) -> tuple[CacheFolder, ...]:
    """Return the folders in which entries are looked up: the one that is written, then those of the package.

    Entries in the package are trusted, since a user who can write them can also change the package's code. So an image
    that was warmed up by one user serves all users, and entries may be installed with the package. A folder chosen by
    ``NUMBA_CACHE_DIR`` replaces the package's ``__pycache__``.
    """
    written = find_cache_folder(package_folder)
    is_chosen = bool(cast("Any", numba).config.CACHE_DIR)
    others = [package_folder / SHIPPED, *([] if is_chosen else [_beside(package_folder)])]
    found = [CacheFolder(path) for path in others if path.is_dir() and (written is None or path != written.path)]
    return (*([] if written is None else [written]), *found)


@cache
def warn_once(message: str) -> None:
    """Issue a warning, unless this process has issued it before."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@cache
def _make_room_once(folder: CacheFolder) -> None:
    folder.make_room(MAX_NBYTES)


def _candidates(package_folder: Path) -> Iterator[CacheFolder]:
    chosen = cast("Any", numba).config.CACHE_DIR  # NUMBA_CACHE_DIR
    if chosen:
        yield CacheFolder(Path(chosen).absolute() / FOLDER_NAME)
    yield CacheFolder(_beside(package_folder))
    of_user = Path(cast("Any", appdirs).user_cache_dir(FOLDER_NAME, appauthor=False))
    if of_user.is_absolute():  # it is "~/.cache" for a user without a home
        yield CacheFolder(of_user)
    user = "" if sys.platform == "win32" else f"-{os.getuid()}"
    with suppress(FileNotFoundError):  # there is no folder for temporary files either
        yield CacheFolder(Path(tempfile.gettempdir(), FOLDER_NAME + user), is_private=True)


def _beside(package_folder: Path) -> Path:
    return package_folder / "__pycache__" / FOLDER_NAME
