"""Where machine code is kept between processes: the first folder that can be written, and the entries in it.

An entry is a file that is there whole or not at all, and that knows when it is damaged; so any number of processes
may read and write at once. Whatever goes wrong with a folder costs time and nothing else: an entry that cannot be read
is compiled again, one that cannot be written is told of, once.
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

__all__ = ["SHIPPED", "CacheFolder", "find_cache_folder", "folders_to_read", "warn_once"]

FOLDER_NAME: Final = "pagedkv-loops"
SHIPPED: Final = "machine_code"
"""A folder in the package, with entries that were installed with it."""
SUFFIX: Final = ".nbc"
CHECKSUM_NBYTES: Final = 32
KEY_NBYTES: Final = 8
MAX_NBYTES: Final = 128 << 20
"""What a folder may hold. The loops of a replay take 5 MB: room for the sources of many branches."""


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder of entries.

    Args:
        path: where it is, or will be when it is first written.
        is_private: it lies where everybody may make folders, so it must be ours alone: who writes it makes us run it.
    """

    path: Path
    is_private: bool = False

    def make(self) -> None:
        """Make the folder unless it is there.

        Raises:
            OSError: it cannot be made, or what should be private belongs to, or is open to, other users.
        """
        self.path.mkdir(mode=0o700 if self.is_private else 0o777, parents=True, exist_ok=True)
        if self.is_private and sys.platform != "win32":
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise PermissionError("it is open to other users")

    def read(self, name: str) -> bytes | None:
        """Give what was last written under a name; None if nothing was, or if it is damaged."""
        try:
            self.make()  # each time: long after the start, another user may have made the folder anew
            content = self._file(name).read_bytes()
        except OSError:
            return None
        checksum, entry = content[:CHECKSUM_NBYTES], content[CHECKSUM_NBYTES:]
        return entry if checksum == hashlib.sha256(entry).digest() else None

    def write(self, name: str, entry: bytes) -> None:
        """Write under a name, in one step; warn once if that fails. A process's first call makes room, if need be."""
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
        """Name an entry by what it is of, the digest of its sources, and what else it depends on."""
        return f"{name}-{digest}-{hashlib.sha256(repr(key).encode()).hexdigest()[: 2 * KEY_NBYTES]}"

    def remove(self, prefix: str) -> None:
        """Remove every entry whose name begins so."""
        for file in self.path.glob(f"{prefix}*"):
            file.unlink(missing_ok=True)

    def make_room(self, max_nbytes: int) -> None:
        """Remove the entries that were not used for longest, until the others take no more than so many bytes."""
        files = []
        for file in self.path.iterdir():
            with suppress(FileNotFoundError):  # another process makes room too
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
    """Find and make the folder of this process; None, and one warning, if there is none that can be written.

    In this order: ``NUMBA_CACHE_DIR`` if it is set, ``__pycache__`` of the package, the user's folder for caches, the
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
    """Give the folders in which entries are looked for: the one that is written, then those that others have written.

    Whoever may write into the package makes us run what is in it anyway. So an image that was warmed up by one user
    serves all of them, and entries may be installed with the package. A chosen folder (``NUMBA_CACHE_DIR``) stands in
    for that of the package.
    """
    written = find_cache_folder(package_folder)
    is_chosen = bool(cast("Any", numba).config.CACHE_DIR)
    others = [package_folder / SHIPPED, *([] if is_chosen else [_beside(package_folder)])]
    found = [CacheFolder(path) for path in others if path.is_dir() and (written is None or path != written.path)]
    return (*([] if written is None else [written]), *found)


@cache
def warn_once(message: str) -> None:
    """Warn, the first time that this process is told so."""
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
    if of_user.is_absolute():  # not "~/.cache", of a user without a home
        yield CacheFolder(of_user)
    user = "" if sys.platform == "win32" else f"-{os.getuid()}"
    with suppress(FileNotFoundError):  # there is no folder for temporary files either
        yield CacheFolder(Path(tempfile.gettempdir(), FOLDER_NAME + user), is_private=True)


def _beside(package_folder: Path) -> Path:
    return package_folder / "__pycache__" / FOLDER_NAME
