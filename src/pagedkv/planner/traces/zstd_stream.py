"""A file compressed by Zstandard, as a stream of its bytes."""

import io
from importlib import import_module
from typing import IO, Any, Final

from pagedkv.contract.extras import to_install
from pagedkv.errors import ConfigurationError

__all__ = ["ZSTD_MAGIC", "zstd_stream"]

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
