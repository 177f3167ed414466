"""Output files of commands: written whole or not at all, as JSON or compressed; the command that they record.

The content goes to a temporary file in the same folder, which then replaces the target in one step. At any time a
reader sees the old file or the new one. ``-`` is the standard output. It receives the content at once, as do devices
and pipes.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from gzip import GzipFile
from io import BufferedWriter
from pathlib import Path
from typing import BinaryIO, Final

import typer

from pagedkv.errors import OutputError
from pagedkv.planner.traces.writer import ByteSink


def command_line() -> str:
    """Return the command of this process, quoted for a shell."""
    return shlex.join(["pagedkv", *sys.argv[1:]])


STANDARD_OUTPUT: Final = Path("-")


def require_writable(path: Path, *sources: str) -> None:
    """Refuse a target that cannot be written, before the work begins.

    Raises:
        OutputError: the folder is missing or not writable, or the target is a folder, or one of the sources.
    """
    if path == STANDARD_OUTPUT:
        return
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(f"{path}: cannot be written, there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(f"{path}: cannot be written, name a file in a writable folder")
    for source in map(Path, sources):
        if is_replaced_whole(path) and path.exists() and source.exists() and path.samefile(source):
            raise OutputError(f"{path}: would overwrite a file that it is made from, name another one")


def is_replaced_whole(path: Path) -> bool:
    """Return whether a target is an ordinary file, existing or not, rather than standard output, a device or a pipe."""
    return path != STANDARD_OUTPUT and (path.is_file() or not path.exists())


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a target for writing; it changes only when the block ends without an error.

    Raises:
        OutputError: writing failed; the target is unchanged, unless it is a device, a pipe or the standard output.
    """
    try:
        if path == STANDARD_OUTPUT:
            stream = typer.get_binary_stream("stdout")
            yield stream
            stream.flush()
        elif is_replaced_whole(path):
            with _replaced(path.resolve()) as file:
                yield file
        else:
            with path.open("wb") as file:
                yield file
    except BrokenPipeError:
        raise  # the reader of the output has closed it
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _replaced(target: Path) -> Iterator[BinaryIO]:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a document, its keys in their order.

    Raises:
        OutputError: writing failed; the target is unchanged.
    """
    text = json.dumps(document, indent=2) + "\n"
    with atomic_file(path) as file:
        file.write(text.encode())


GZIP_SUFFIX: Final = ".gz"
GZIP_LEVEL: Final = 6
"""zlib's own default: level 9 takes several times as long for a few per cent."""


@contextmanager
def maybe_compressed(file: BinaryIO, output: Path) -> Iterator[ByteSink]:
    """Compress a file whose name ends in .gz; equal content gives equal bytes."""
    if output.suffix != GZIP_SUFFIX:
        yield file
        return
    # The header has neither a name nor a time, so the same trace gives the same bytes.
    with GzipFile("", "wb", GZIP_LEVEL, file, 0) as compressed, BufferedWriter(compressed) as buffered:
        yield buffered
