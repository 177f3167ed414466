"""Files as numbered lines: plain, gzip, zst, one JSON array, or rows of Parquet.

:class:`LineReader` owns the open file. Every fault of a *file* (missing, a directory, cut short, damaged, not text)
becomes a :class:`~pagedkv.errors.TraceError` with the line at which reading stopped. At most one line is held in
memory.

A JSON array in any layout is split one object at a time, since the whole array may not fit in memory. Pieces of the
file may end anywhere. One regular expression finds strings and brackets; the caller parses the objects.

A folder is read as its JSON files behind one another, in order of their names, as agents and gateways write a file for
each session or hour: :class:`FolderReader`.

Rows of Parquet become lines of JSON, so that a Parquet file can have every format of JSON lines. A row's number serves
as its line number. Only a batch of rows is in memory.
"""

import codecs
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, Self

from pagedkv.contract.extras import needing, to_install
from pagedkv.errors import ConfigurationError, TraceError

PARQUET_MAGIC: Final = b"PAR1"
UNPACK: Final = "Unpack it, and name the file in it"
TO_UTF8: Final = "Write it as UTF-8: iconv -f UTF-16 -t UTF-8"
KINDS: Final = (
    (b"PK\x03\x04", "a zip archive", UNPACK),
    (b"PK\x05\x06", "an empty zip archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"BZh", "compressed by bzip2", "Decompress it: bunzip2"),
    (b"\xfd7zXZ\x00", "compressed by xz", "Decompress it: unxz"),
    (b"\xff\xfe", "UTF-16 text", TO_UTF8),
    (b"\xfe\xff", "UTF-16 text", TO_UTF8),
    (b"SQLite format 3\x00", "an SQLite database", "Export the table of requests as CSV: sqlite3 -csv -header"),
    (b"ARROW1", "an Arrow file", "Write it as Parquet: pyarrow.parquet.write_table"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "Write its rows as CSV or Parquet"),
    (b"\x93NUMPY", "a NumPy array", "Write its rows as CSV"),
)
PICKLE_PROTOCOL: Final = b"\x80"
PICKLE_PROTOCOLS: Final = frozenset(range(2, 6))
TAR_PLACE: Final = 257
TAR_MAGIC: Final = b"ustar"
FEWEST: Final = 16


def named_kind(head: bytes) -> tuple[str, str] | None:
    """Return the kind of a file that is not text.

    Args:
        head: the first bytes of the file, some hundred.

    Returns:
        the kind, and a remedy; None for a file that may be text.
    """
    for magic, name, remedy in KINDS:
        if head.startswith(magic):
            return name, remedy
    if head.startswith(PICKLE_PROTOCOL) and head[1:2] and head[1] in PICKLE_PROTOCOLS:
        return "a pickle", "Write its rows as JSON lines or Parquet; a pickle runs programs when it is read"
    if head[TAR_PLACE : TAR_PLACE + len(TAR_MAGIC)] == TAR_MAGIC:
        return "a tar archive", UNPACK
    if len(head) >= FEWEST and (_alternates(head[0::2]) or _alternates(head[1::2])):
        return "UTF-16 text", TO_UTF8
    return None


def _alternates(places: bytes) -> bool:
    """Return whether every second byte is 0, as in UTF-16 of plain letters without a mark at the beginning."""
    return not any(places[: FEWEST // 2])


ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
PIECE_NBYTES: Final = 2**17


def zstd_stream(file: IO[bytes]) -> io.BufferedReader:
    """Read a compressed file, of one frame or several.

    Returns:
        the stream. Reading raises EOFError where the file is cut short, OSError where it is damaged.

    Raises:
        ConfigurationError: the package is missing.
    """
    try:
        package: Any = import_module("zstandard")  # an optional package
    except ModuleNotFoundError as error:
        reason = f"reading .zst files needs the package zstandard: {to_install('zstd')}"
        raise ConfigurationError(f"{reason}, or decompress the file (zstd -d)") from error
    return io.BufferedReader(_Frames(file, package), PIECE_NBYTES)


class _Frames(io.RawIOBase):
    """The bytes of all frames, concatenated."""

    def __init__(self, file: IO[bytes], package: Any) -> None:  # noqa: ANN401 - a module, imported late
        super().__init__()
        self._file = file
        self._package = package
        self._frame: Any = None
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - as its base has it
        while not self._waiting:
            piece = self._file.read(PIECE_NBYTES)
            if not piece:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._waiting = self._decompressed(piece)
        taken, self._waiting = self._waiting[: len(buffer)], self._waiting[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def _decompressed(self, piece: bytes) -> bytes:
        parts = []
        while piece:
            if self._frame is None:
                self._frame = self._package.ZstdDecompressor().decompressobj()
            try:
                parts.append(self._frame.decompress(piece))
            except self._package.ZstdError as error:
                raise OSError(str(error)) from error
            piece = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        return b"".join(parts)


GZIP_MAGIC: Final = b"\x1f\x8b"
MAX_LINE_NBYTES: Final = 64 * 2**20
"""Longest line read, so that a damaged or foreign file without line ends cannot fill the memory."""
READ_NBYTES: Final = 2**20
PEEKED_NBYTES: Final = 256
HEAD_NBYTES: Final = 512
ARRAY: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*(?:\{|\]|\Z)|\{[ \t]*\r?\n)")
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

    def __exit__(self, *_: object) -> None:
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

    def rows(self) -> Iterator[Line]:
        """Yield the rows: lines, elements of an array, or rows of Parquet. Raises TraceError as iterating does."""
        if self.is_parquet:
            return parquet_rows(self._path)
        return array_elements(self.pieces()) if self.is_array else iter(self)

    @property
    def is_array(self) -> bool:
        """Whether the file is a JSON array of objects, or an object over several lines; reads only its beginning.

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
        while raw := self._taken(lambda: self._stream.read(READ_NBYTES), number):
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


def opened(path: str | os.PathLike[str]) -> "LineReader | FolderReader":
    """Open a file, or the files of a folder. Raises ConfigurationError and TraceError as :class:`LineReader` does."""
    return FolderReader(path) if Path(path).is_dir() else LineReader(path)


LOG_NAMES: Final = re.compile(r"[^.].*\.(?:jsonl|json|ndjson)(?:\.gz|\.zst)?")


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a folder and of the folders within that may be logs, by name; or the file itself.

    Raises:
        TraceError: a folder has no such file.
    """
    if not Path(path).is_dir():
        return [Path(path)]
    files = sorted(file for file in Path(path).rglob("*") if LOG_NAMES.fullmatch(file.name) and file.is_file())
    if not files:
        reason = "the folder has no file that ends in .jsonl or .json, also compressed"
        raise TraceError(os.fspath(path), None, reason, "Name a folder of session files or logs, or a file")
    return files


class FolderReader:
    """Streams the lines of all JSON files in a folder and in the folders within, by name; one file is open at a time.

    Args:
        path: the folder.

    Raises:
        TraceError: it has no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._files = files_of(path)
        self._reader: LineReader | None = None
        self._num_bytes_ended = 0

    @property
    def num_bytes(self) -> int:
        """Size of all files as stored."""
        return sum(file.stat().st_size for file in self._files)

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes read so far."""
        return self._num_bytes_ended + (0 if self._reader is None else self._reader.num_bytes_read)

    def __enter__(self) -> Self:
        """Hold the folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file that is open."""
        if self._reader is not None:
            self._reader.__exit__()

    def rows(self) -> Iterator[Line]:
        """Yield the lines, or the elements of arrays, of all files. Raises TraceError, which names the file."""
        for file in self._files:
            with LineReader(file) as self._reader:
                yield from self._reader.rows()
                self._num_bytes_ended += self._reader.num_bytes or 0
            self._reader = None


MARK: Final = re.compile(r'"(?:[^"\\]|\\.)*(?P<end>"|\\?\Z)|[{}]', re.DOTALL)
REMEDY: Final = "Give a whole JSON array of objects, or one object a line"


def array_elements(pieces: Iterable[Line]) -> Iterator[Line]:
    """Yield the objects of an array, each as a line of its own, with the number of the line where its piece began.

    Args:
        pieces: parts of the file in order, of any length; the first begins with ``[``.

    Raises:
        TraceError: an object does not end, or is over 64 MiB long.
    """
    text, depth, start, place = "", 0, 0, 0
    first: Line | None = None
    for piece in pieces:
        text, place, start = (text[start:] + piece.text, place - start, 0) if depth else (piece.text, 0, 0)
        if len(text) > MAX_LINE_NBYTES + len(piece.text):
            raise (first or piece).fault(f"an object is longer than {MAX_LINE_NBYTES} characters", REMEDY)
        while match := MARK.search(text, place):
            mark = match.group()
            if mark[0] == '"' and match["end"] != '"':  # continues in the next piece
                place = match.start()
                break
            place = match.end()
            if mark == "{":
                depth += 1
                if depth == 1:
                    start, first = match.start(), piece
            elif mark == "}":
                depth -= 1
                if depth == 0 and first is not None:
                    yield Line(first.path, first.number, text[start:place])
        else:
            place = len(text)
    if depth and first is not None:
        raise first.fault("an object does not end", REMEDY)


ROWS_AT_ONCE: Final = 256


def parquet_rows(path: str) -> Iterator[Line]:
    """Yield the rows of a file, each as an object.

    Raises:
        ConfigurationError: the package is missing.
        TraceError: the file cannot be read; may be raised while iterating.
    """
    try:
        parquet: Any = import_module("pyarrow.parquet")  # an optional package
    except ModuleNotFoundError as error:
        reason = f"reading Parquet files needs the package pyarrow: {to_install('parquet')}"
        raise ConfigurationError(f"{reason}, or write the rows as JSON lines") from error
    if not Path(path).is_file():
        raise TraceError(path, None, "a Parquet file cannot come through a pipe", "Save it to a file first")
    return _rows(path, parquet)


def _rows(path: str, parquet: Any) -> Iterator[Line]:  # noqa: ANN401 - a module, imported late
    with needing("cli", "reading traces"):
        import msgspec  # noqa: PLC0415 - lines of other files need none
    encoder = msgspec.json.Encoder(enc_hook=str)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield Line(path, number, encoder.encode(row).decode())
    except (OSError, ValueError) as error:  # base classes of pyarrow's errors
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, number + 1, f"not a whole Parquet file: {error}", "Fetch the file again") from error
