"""Kinds of files that are not text, recognised by their first bytes, each with a remedy."""

from typing import Final

__all__ = ["PARQUET_MAGIC", "named_kind"]

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
