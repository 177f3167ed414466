"""Traces that are compressed while they are written, if their name ends in .gz."""

from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from io import BufferedWriter
from pathlib import Path
from typing import BinaryIO, Final

from pagedkv.planner.traces.writer import ByteSink

__all__ = ["maybe_compressed"]

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
