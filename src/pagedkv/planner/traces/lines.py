"""Numbered lines of a trace file, plain, gzip or zst, as a stream.

It owns the open file. Every fault of a *file* (missing, a directory, cut short, damaged, not text) becomes a
:class:`~pagedkv.errors.TraceError` with the line at which reading stopped. At most one line is held in
memory.
"""

import codecs
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pagedkv.errors import TraceError
from pagedkv.planner.traces.file_kinds import PARQUET_MAGIC, named_kind
from pagedkv.planner.traces.zstd_stream import ZSTD_MAGIC, zstd_stream

__all__ = ["MAX_LINE_NBYTES", "Line", "LineReader"]

GZIP_MAGIC: Final = b"\x1f\x8b"

MAX_LINE_NBYTES: Final = 64 * 2**20
"""Longest line read, so that a damaged or foreign file without line ends cannot fill the memory."""

PIECE_NBYTES: Final = 2**20
PEEKED_NBYTES: Final = 256
HEAD_NBYTES: Final = 512
ARRAY: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\{|\]|\Z)")

FETCH_AGAIN: Final = "Fetch or decompress the file again"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace.

    Args:
        path: the file, as the user named it.
        number: number of the line, from 1.
        text: the line without its end.
    """

    path: str
    number: int
    text: str

    def fault(self, reason: str, remedy: str) -> TraceError:
        """Build an error about this line, for the caller to raise."""
        return TraceError(self.path, self.number, reason, remedy)


class LineReader:
    """Streams the lines of one file; use it as a context manager.

    Args:
        path: a plain, gzip or zst file; its content determines which, not its name. Pipes work too.

    Raises:
        ConfigurationError: the file is a zst file, and the package for these is missing.
        TraceError: the file cannot be opened, or is not text.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115 - __exit__ closes it
            head = self._file.peek(HEAD_NBYTES)
        except OSError as error:
            reason = f"cannot be opened: {error.strerror or error}"
            raise TraceError(self._path, None, reason, "Name a readable trace file") from error
        self.is_parquet = head.startswith(PARQUET_MAGIC)
        """Whether it is a Parquet file, which has rows instead of lines."""
        try:
            self._stream = self._opened(head)
        except BaseException:
            self._file.close()
            raise

    def _opened(self, head: bytes) -> "gzip.GzipFile | io.BufferedReader":
        if head.startswith(GZIP_MAGIC):
            return gzip.GzipFile(fileobj=self._file)
        if head.startswith(ZSTD_MAGIC):
            return zstd_stream(self._file)
        kind = named_kind(head[:HEAD_NBYTES])
        if kind is not None:
            raise TraceError(self._path, None, f"it is {kind[0]}", kind[1])
        return self._file

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
        """Stored (compressed) bytes read so far; 0 for a pipe, which has no position."""
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

    @property
    def is_array(self) -> bool:
        """Whether the file is a JSON array of objects; reads only its beginning.

        Raises:
            TraceError: the file is cut short there, or damaged.
        """
        return ARRAY.match(self._taken(lambda: self._stream.peek(PEEKED_NBYTES), 1)) is not None

    def pieces(self) -> Iterator[Line]:
        """Yield the file in pieces of about a MiB, cut anywhere, each with the number of its first line.

        Raises:
            TraceError: as iterating does.
        """
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        number = 1
        while raw := self._taken(lambda: self._stream.read(PIECE_NBYTES), number):
            try:
                text = decoder.decode(raw)
            except UnicodeDecodeError as error:
                reason = f"not UTF-8 within the {PIECE_NBYTES} bytes from here (0x{error.object[error.start]:02x})"
                raise TraceError(self._path, number, reason, "Give UTF-8 text, plain or gzip") from error
            yield Line(self._path, number, text)
            number += text.count("\n")

    def _taken(self, take: Callable[[], bytes], number: int) -> bytes:
        """Take bytes from the stream; errors name the line."""
        try:
            return take()
        except EOFError as error:
            raise TraceError(self._path, number, "the compressed file is cut short here", FETCH_AGAIN) from error
        except (OSError, zlib.error) as error:
            raise TraceError(self._path, number, f"cannot be read: {error}", FETCH_AGAIN) from error

    def _read_line(self, number: int) -> bytes:
        raw = self._taken(lambda: self._stream.readline(MAX_LINE_NBYTES), number)
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
