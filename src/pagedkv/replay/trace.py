"""A trace file as a stream of requests.

Joins the two halves of reading: :mod:`~pagedkv.replay.lines`, which knows files, and
:mod:`~pagedkv.replay.formats`, which knows rows. Only the row being read is in memory.
"""

import os
from collections.abc import Iterator
from itertools import chain
from types import TracebackType
from typing import Self

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.replay.formats import detect_format
from pagedkv.replay.lines import LineReader
from pagedkv.replay.request import Request

__all__ = ["TraceReader"]


class TraceReader:
    """Reads one trace, in any known format; iterate over it once, inside a ``with`` block.

    Args:
        path: the file, plain or gzip; both the compression and the format are told by its content.
        block_size: tokens an id stands for, when the trace's own (or the inferred) value must not be used.

    Raises:
        ConfigurationError: ``block_size`` is not positive.
        TraceError: the file cannot be opened; while iterating, also whatever is wrong with its content.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int | None = None) -> None:
        if block_size is not None and block_size < 1:
            raise ConfigurationError(f"the trace's block size must be at least 1 token, got {block_size}")
        self._block_size = block_size
        self._lines = LineReader(path)

    @property
    def num_bytes(self) -> int | None:
        """Size of the file as stored, or None for a pipe."""
        return self._lines.num_bytes

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes read so far: how far the iteration has come."""
        return self._lines.num_bytes_read

    def __enter__(self) -> Self:
        """Hold the file open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        self._lines.__exit__(kind, error, traceback)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in file order."""
        lines = iter(self._lines)
        first = next(lines, None)
        if first is None:
            raise TraceError(self._lines.path, None, "the file is empty", "Name a trace with at least one request")
        row_format = detect_format(first, self._block_size)
        num_requests = 0
        for line in lines if row_format.starts_with_header else chain([first], lines):
            for request in row_format.requests(line):
                num_requests += 1
                yield request
        if num_requests == 0:
            raise first.fault("no request follows", "Name a trace with at least one request")
