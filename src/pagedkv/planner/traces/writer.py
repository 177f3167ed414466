"""Writes requests in the pagedkv trace format, in its canonical form: equal requests give equal bytes.

A header has the block size, so rows wait until it is known: a foreign trace has it only in its first row with ids. Rows
wait in memory up to a bound, then in a temporary file. The caller opens and compresses the file.
"""

import shutil
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Final, Protocol, Self

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.formats.parsing import FORMAT_NAME, FORMAT_VERSION, MAX_ARRIVAL_S, TraceHeader, row_of
from pagedkv.planner.traces.request import Request

with needing("cli", "writing traces"):
    import msgspec


MAX_WAITING_NBYTES: Final = 2**20


class ByteSink(Protocol):
    """A sink of bytes: a binary file, plain or compressed."""

    def write(self, data: bytes, /) -> object:
        """Write all of ``data``."""
        ...


class TraceWriter:
    """Writes one trace; use it as a context manager. Leaving it without an error writes the waiting rows.

    Args:
        sink: receives the bytes; it stays open.
    """

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self._encoder = msgspec.json.Encoder()
        self._waiting = SpooledTemporaryFile(max_size=MAX_WAITING_NBYTES)  # noqa: SIM115 - __exit__ closes it
        self._has_header = False
        self._block_size = 0
        self._num_requests = 0

    @property
    def num_requests(self) -> int:
        """Requests written so far."""
        return self._num_requests

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the header and the waiting rows, unless there was an error."""
        try:
            if kind is None and not self._has_header:
                self._write_header()
        finally:
            self._waiting.close()

    def write(self, request: Request) -> None:
        """Write the next request. O(tokens or ids).

        Raises:
            ConfigurationError: its blocks are of another size than those before, or its arrival is beyond the limit.
        """
        self._num_requests += 1
        self._learn_block_size(request)
        if request.arrival_s > MAX_ARRIVAL_S:
            reason = f"request {self._num_requests} arrives at {request.arrival_s} s, beyond {MAX_ARRIVAL_S}"
            raise ConfigurationError(f"{reason}: use a higher rate of sessions, or fewer of them")
        line = self._encoder.encode(row_of(request)) + b"\n"
        (self._sink if self._has_header else self._waiting).write(line)

    def _learn_block_size(self, request: Request) -> None:
        """Determine the block size, and so the header, at the first request that has one or cannot have one."""
        if not self._has_header:
            self._block_size = request.block_size
            if request.block_size or request.block_ids is None:
                self._write_header()
        elif request.block_size not in {0, self._block_size}:
            raise ConfigurationError(
                f"request {self._num_requests} has blocks of {request.block_size} tokens, those before it of "
                f"{self._block_size or 'no known size'}: a trace in the pagedkv format holds blocks of one size"
            )

    def _write_header(self) -> None:
        header = TraceHeader(FORMAT_NAME, FORMAT_VERSION, self._block_size or None)
        self._sink.write(self._encoder.encode(header) + b"\n")
        self._waiting.seek(0)
        shutil.copyfileobj(self._waiting, self._sink)
        self._has_header = True
