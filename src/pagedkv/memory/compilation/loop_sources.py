"""What a compiled loop is made from: the sources that it can reach, as one digest.

Numba compiles the loops that a loop calls, and the constants that it names, into its machine code. All of them stand in
the loop's own module or in modules that this one imports, directly or not; so the machine code is good for as
long as none of these files changes. Files elsewhere in the package do not matter.

Imports are found by their shape in the text: parsing all files would take 100 ms instead of 11. What looks like an
import and is none (in a docstring) adds a file that need not be there, which is harmless.
"""

import hashlib
import re
import time
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np

__all__ = ["digest_of_sources", "sources_of"]

PACKAGE: Final = __name__.partition(".")[0]
PACKAGE_FOLDER: Final = Path(__file__).parents[__name__.count(".") - 1]
COMPILERS: Final = (EXTENSION_SUFFIXES[0], numba.__version__, llvmlite.__version__, np.__version__.rpartition(".")[0])
"""What machine code depends on: the interface of this Python to extensions, which all its patch releases share, the
compilers, and NumPy's, likewise."""
IMPORTED_NS: Final = time.time_ns()
"""When this process imported the loops, for all that we know."""

IMPORT: Final = re.compile(
    rf"^[ \t]*(?:from[ \t]+({PACKAGE}[\w.]*)[ \t]+import[ \t]*(\([^)]*\)|.*)|import[ \t]+(.*))", re.MULTILINE
)
MODULE: Final = re.compile(rf"\b{PACKAGE}[\w.]*")
NAME: Final = re.compile(r"\w+")
DIGEST_NBYTES: Final = 12


def digest_of_sources(*paths: Path) -> str | None:
    """Name all that loops in some files are made from: the sources they can reach, and the compilers.

    None if a source has changed since the process started: what was imported may be older than the file.
    O(number of sources); each is read once a process.

    Raises:
        OSError: a source cannot be read; the package may lie in an archive.
    """
    digest = hashlib.sha256(repr(COMPILERS).encode())
    for source in sources_of(*paths):
        if source.stat().st_ctime_ns > IMPORTED_NS:  # not st_mtime, which copying and unpacking set back
            return None
        digest.update(hashlib.sha256(_read(source)).digest())
    return digest.hexdigest()[: 2 * DIGEST_NBYTES]


@cache
def sources_of(*paths: Path) -> tuple[Path, ...]:
    """Find some files and all files of the package that these import, directly or not, sorted.

    Raises:
        OSError: one cannot be read.
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
    """Find what may be modules of the package, named in full as everywhere in it."""
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
