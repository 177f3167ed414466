"""QueueFile: keeps requests far back in the queue in a file, so that a very long queue takes no memory.

Under more load than a machine can serve, its queue grows as long as the trace. Scheduling depends only on the head of
the queue. The rest is written to a private temporary file, and read in its turn.
"""

import os
import pickle
import weakref
from tempfile import TemporaryFile
from typing import IO

from pagedkv.planner.traces.request import Request, TokenizedRequest

__all__ = ["QueueFile"]


class QueueFile:
    """A first-in, first-out queue in a file, which exists while the queue is not empty. O(size of a request).

    >>> queue_file = QueueFile()
    >>> for seconds in (1.0, 2.0):
    ...     queue_file.push(Request(seconds, 8, 1))
    >>> len(queue_file), queue_file.pop().arrival_s, queue_file.pop().arrival_s, len(queue_file)
    (2, 1.0, 2.0, 0)
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._read_to = 0
        self._num_requests = 0

    def __len__(self) -> int:
        """Return the number of requests."""
        return self._num_requests

    def push(self, request: Request | TokenizedRequest) -> None:
        """Append a request."""
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 - open as long as a request waits
            weakref.finalize(self, self._file.close)
            self._read_to = 0
        self._file.seek(0, os.SEEK_END)
        pickle.dump(request, self._file, pickle.HIGHEST_PROTOCOL)
        self._num_requests += 1

    def pop(self) -> Request | TokenizedRequest:
        """Remove and return the first request. Removing the last one closes the file. Raises IndexError."""
        if self._file is None:
            raise IndexError("the queue is empty")
        self._file.seek(self._read_to)
        request: Request | TokenizedRequest = pickle.load(self._file)  # noqa: S301 - written by this process
        self._read_to = self._file.tell()
        self._num_requests -= 1
        if not self._num_requests:
            self._file.close()
            self._file = None
        return request
