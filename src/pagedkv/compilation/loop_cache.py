"""Machine code that outlives the process: the cache that a loop reads before it compiles, and writes afterwards.

Numba's own cache considers a loop fresh while the loop's own file is unchanged, although the loops that it calls are
compiled into it; and it stops the program if no folder can be written. So each loop gets this cache instead, through
the interface of Numba's dispatcher; other users of Numba in the process keep Numba's.

The name of an entry is made of the loop, the digest of all sources that the loop can reach, the types of its arguments,
and the processor. So a loop with changed sources finds no entry, sources that are restored (an earlier branch) find
their former entry, and two processes never write different content under one name. Code for this machine's processor is
looked up first, then code for a class of processors (``targets.py``).

Numba compiles the loops that a loop calls, and the constants that it names, into its machine code. All of them are in
the loop's own module or in modules that this one imports, directly or not, or are bound to the classes of its arguments
(:func:`~pagedkv.compilation.compiled.chosen`). So the machine code is valid as long as none of these files changes.
Files elsewhere in the package do not matter. Imports are found by a pattern in the text, since parsing all files would
take 100 ms instead of 11. Text that looks like an import and is none (in a docstring) adds an unneeded file, which is
harmless.

The folder of the entries is the first one that can be written. An entry is a file that is written atomically and has a
checksum, so any number of processes may read and write at once. Faults of a folder cost only time: an entry that cannot
be read is compiled again, and one that cannot be written causes one warning.
"""

import hashlib
import inspect
import os
import pickle
import re
import stat
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np
from numba.core import serialize, types
from numba.core.caching import _Cache
from numba.misc import appdirs

from pagedkv.compilation.loop import packed, restored
from pagedkv.compilation.notice import NOTICE
from pagedkv.compilation.targets import Processor, runnable

Opaque: TypeAlias = Any
"""Objects that Numba passes in and takes back: types, code generators, results of its compiler."""


class LoopCache(_Cache):
    """The cache of one loop. Nothing is read or created before the loop is first called.

    Args:
        function: the loop's Python function.
    """

    def __init__(self, function: Opaque) -> None:
        self._source = Path(inspect.getfile(function))
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._line = function.__code__.co_firstlineno
        self._is_enabled = True

    @property
    def cache_path(self) -> str | None:
        """The folder of the entries, for ``dispatcher.stats``."""
        folder = find_cache_folder(PACKAGE_FOLDER)
        return None if folder is None else str(folder.path)

    def enable(self) -> None:
        """Read and write from now on, which is the default."""
        self._is_enabled = True

    def disable(self) -> None:
        """Neither read nor write from now on."""
        self._is_enabled = False

    def flush(self) -> None:
        """Remove all entries of this loop, for any types and sources, as ``dispatcher.recompile`` requires."""
        if (folder := find_cache_folder(PACKAGE_FOLDER)) is not None:
            folder.remove(self._name + "-")

    def load_overload(self, sig: Opaque, target_context: Opaque) -> Opaque:
        """Return the machine code for arguments of these types, or None if it must be compiled."""
        target_context.refresh()  # as Numba's own caches do before a look-up
        if (digest := self._digest(sig)) is None:
            return None
        for processor in runnable(target_context.codegen().magic_tuple()):
            key = self._key(sig, processor)
            name = CacheFolder.named(self._name, digest, key)
            for folder in folders_to_read(PACKAGE_FOLDER):
                if (entry := folder.read(name)) is not None:
                    with NOTICE.loading():
                        parts = _parts(entry, key)
                        found = None if parts is None else restored(target_context, parts)
                    if found is not None:
                        return found
        return None

    def save_overload(self, sig: Opaque, data: Opaque) -> None:
        """Write machine code, unless it contains addresses of this process."""
        if (digest := self._digest(sig)) is None or (folder := find_cache_folder(PACKAGE_FOLDER)) is None:
            return
        key = self._key(sig, data.codegen.magic_tuple())
        if not data.library.has_dynamic_globals:
            folder.write(folder.named(self._name, digest, key), cast("Any", serialize).dumps((key, packed(data))))

    def _key(self, sig: Opaque, processor: Processor) -> Opaque:
        # The line number distinguishes two functions of one name, one of which is defined by a condition.
        return sig, processor, self._line

    def _digest(self, sig: Opaque) -> str | None:
        """Return the digest of the loop's sources and of loops bound to classes; None if nothing is read or written."""
        if not self._is_enabled:
            return None
        try:
            return digest_of_sources(self._source, *_sources_of_classes(sig))
        except OSError:
            warn_once(f"pagedkv compiles its loops anew in each process: there are no sources in {PACKAGE_FOLDER}.")
            return None


def _sources_of_classes(sig: Opaque) -> Iterator[Path]:
    """Find the sources of loops bound to the classes of arguments; ``sig``: a signature, or the types alone."""
    for kind in cast("tuple[Opaque, ...]", getattr(sig, "args", sig)):
        if isinstance(kind, types.BaseNamedTuple):
            yield from sources_of_bound(kind.instance_class)


def _parts(entry: bytes, key: Opaque) -> Opaque:
    """Return the content of an entry; None if it has another key and the same name."""
    kept_key, parts = pickle.loads(entry)  # noqa: S301  # written by pagedkv, where no other user can write
    return parts if kept_key == key else None


POLICY: Final = "policy"
"""The attribute of a class that binds loops: a dataclass with a field for each of them."""


def sources_of_bound(kind: type) -> Iterator[Path]:
    """Find the files of all loops that are bound to a class."""
    if (bound := getattr(kind, POLICY, None)) is not None:
        for loop in (getattr(bound, each.name) for each in fields(bound)):
            yield Path(inspect.getfile(getattr(loop, "py_func", loop)))


PACKAGE: Final = __name__.partition(".")[0]
PACKAGE_FOLDER: Final = Path(__file__).parents[__name__.count(".") - 1]
COMPILERS: Final = (EXTENSION_SUFFIXES[0], numba.__version__, llvmlite.__version__, np.__version__.rpartition(".")[0])
"""The versions that machine code depends on: Python's interface to extensions, which its patch releases share; the
compilers; and NumPy, up to its minor version."""
IMPORTED_NS: Final = time.time_ns()
"""An upper bound of the time when this process imported the loops."""

IMPORT: Final = re.compile(
    rf"^[ \t]*(?:from[ \t]+({PACKAGE}[\w.]*)[ \t]+import[ \t]*(\([^)]*\)|.*)|import[ \t]+(.*))", re.MULTILINE
)
MODULE: Final = re.compile(rf"\b{PACKAGE}[\w.]*")
NAME: Final = re.compile(r"\w+")
DIGEST_NBYTES: Final = 12


def digest_of_sources(*paths: Path) -> str | None:
    """Return the digest of all sources that the loops in these files can reach, and of the compilers' versions.

    None if a source has changed since the process started, as the imported code may be older than the file.
    O(number of sources); each is read once a process.

    Raises:
        OSError: a source cannot be read; the package may be in an archive.
    """
    digest = hashlib.sha256(repr(COMPILERS).encode())
    for source in sources_of(*paths):
        if source.stat().st_ctime_ns > IMPORTED_NS:  # not st_mtime, which copying and unpacking reset
            return None
        digest.update(hashlib.sha256(_read(source)).digest())
    return digest.hexdigest()[: 2 * DIGEST_NBYTES]


@cache
def sources_of(*paths: Path) -> tuple[Path, ...]:
    """Return these files and all files of the package that they import, directly or not, sorted.

    Raises:
        OSError: a file cannot be read.
    """
    found = set(paths)
    unread = list(found)
    while unread:
        new = set(_imported(unread.pop())) - found
        found |= new
        unread += new
    return tuple(sorted(found))


@cache
def _read(path: Path) -> bytes:
    return path.read_bytes()


@cache
def _imported(path: Path) -> tuple[Path, ...]:
    return tuple(file for file in map(_file_of, set(_imported_modules(_read(path).decode()))) if file is not None)


def _imported_modules(text: str) -> Iterator[str]:
    """Find possible modules of the package, by their full names as in all its imports."""
    for module, names, modules in IMPORT.findall(text):
        yield from [module] if module else MODULE.findall(modules)
        if names and _is_package(module):
            yield from (f"{module}.{name}" for name in NAME.findall(names))


@cache
def _is_package(module: str) -> bool:
    return _place_of(module).is_dir()


@cache
def _file_of(module: str) -> Path | None:
    file = _place_of(module) / "__init__.py" if _is_package(module) else _place_of(module).with_suffix(".py")
    return file if file.is_file() else None


def _place_of(module: str) -> Path:
    return PACKAGE_FOLDER.joinpath(*module.split(".")[1:])


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
