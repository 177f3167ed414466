"""Numbered lines of a trace file, plain or gzip, as a stream.

Owns the open file. Knows nothing of what a line means; it makes sure that whatever can be wrong with a
*file* (missing, a directory, cut short, damaged, not text) becomes a :class:`~pagedkv.errors.TraceError`
with the line at which reading had to stop. At most one line is held in memory.
"""

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pagedkv.errors import TraceError

__all__ = ["MAX_LINE_NBYTES", "Line", "LineReader"]

GZIP_MAGIC: Final = b"\x1f\x8b"

MAX_LINE_NBYTES: Final = 64 * 2**20
"""Longest line read: a damaged or foreign file without line ends must not fill the memory."""

FETCH_AGAIN: Final = "Fetch or decompress the file again"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace.

    Args:
        path: the file, as the user named it.
        number: 1-based.
        text: without the line end.
    """

    path: str
    number: int
    text: str

    def fault(self, reason: str, remedy: str) -> TraceError:
        """Build the error that blames this line, for the caller to raise."""
        return TraceError(self.path, self.number, reason, remedy)


class LineReader:
    """Streams the lines of one file; use it as a context manager.

    Args:
        path: a plain or gzip file; its content tells which, not its name. Pipes work too.

    Raises:
        TraceError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115 - __exit__ closes it
            is_gzip = self._file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
        except OSError as error:
            reason = f"cannot be opened: {error.strerror or error}"
            raise TraceError(self._path, None, reason, "Name a readable trace file") from error
        self._stream = gzip.GzipFile(fileobj=self._file) if is_gzip else self._file

    @property
    def path(self) -> str:
        """The file, as the user named it."""
        return self._path

    @property
    def num_bytes(self) -> int | None:
        """Size of the file as stored (compressed), or None for a pipe."""
        status = os.fstat(self._file.fileno())
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    @property
    def num_bytes_read(self) -> int:
        """Stored (compressed) bytes read so far; 0 for a pipe, which cannot tell."""
        return self._file.tell() if self._file.seekable() else 0

    def __enter__(self) -> Self:
        """Hold the file open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        self._stream.close()
        self._file.close()

    def __iter__(self) -> Iterator[Line]:
        """Yield the lines that are not blank, with their numbers.

        Raises:
            TraceError: the file is cut short, damaged, not UTF-8, or has a line over ``MAX_LINE_NBYTES``.
        """
        number = 1
        while raw := self._read_line(number):
            text = self._decode(raw, number).strip()
            if text:
                yield Line(self._path, number, text)
            number += 1

    def _read_line(self, number: int) -> bytes:
        try:
            raw = self._stream.readline(MAX_LINE_NBYTES)
        except EOFError as error:
            raise TraceError(self._path, number, "the gzip file is cut short here", FETCH_AGAIN) from error
        except (OSError, zlib.error) as error:
            raise TraceError(self._path, number, f"cannot be read: {error}", FETCH_AGAIN) from error
        if len(raw) == MAX_LINE_NBYTES and not raw.endswith(b"\n"):
            reason = f"the line is longer than {MAX_LINE_NBYTES} bytes"
            raise TraceError(self._path, number, reason, "Give a file with one request or session a line")
        return raw

    def _decode(self, raw: bytes, number: int) -> str:
        try:
            return raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            reason = f"byte {error.start + 1} of the line is not UTF-8 (0x{raw[error.start]:02x})"
            raise TraceError(self._path, number, reason, "Give UTF-8 text, plain or gzip") from error
