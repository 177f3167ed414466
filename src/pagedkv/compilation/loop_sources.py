"""The sources of a compiled loop: all files that it can reach, as one digest.

Numba compiles the loops that a loop calls, and the constants that it names, into its machine code. All of them are in
the loop's own module or in modules that this one imports, directly or not. So the machine code is valid as long as none
of these files changes. Files elsewhere in the package do not matter.

Imports are found by a pattern in the text, since parsing all files would take 100 ms instead of 11. Text that looks
like an import and is none (in a docstring) adds an unneeded file, which is harmless.
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
