"""RequestLog: writes the served requests as a trace that ``pagedkv curve``, ``plan`` and ``replay`` read.

StepLog: writes the steps of the engine as ``pagedkv calibrate`` reads them.

A trace is in order of arrival, so a row is written once its request and all earlier requests have ended. A request that
delays too many rows is written before its end, with its tokens so far and the status ``under way``; its prompt, which
determines what later prompts hit, is complete. A prompt is written as ids of its blocks, which are digests under a
random key of the file: equal content has equal ids within a file, and the ids do not reveal the content. They depend on
the tenant's salt, as the blocks' identities do.
"""

import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import BufferedWriter
from pathlib import Path
from typing import Any, Final, final

import msgspec
import numpy as np

from pagedkv.engine import StepRecord
from pagedkv.errors import ConfigurationError
from pagedkv.server.generation import GenerationRequest
from pagedkv.server.service import Served

LOG: Final = logging.getLogger(__name__)
NUM_BYTES: Final = 8
LARGEST_ID: Final = 2**63 - 1
MOST_HELD: Final = 1024


@final
class RequestLog:
    """Writes a trace of the pagedkv format.

    Args:
        path: a file that does not exist yet.
        block_size: tokens of a block.
        writes_tokens: whether the tokens of prompts and answers are written, in place of block ids.
        num_so_far: returns the tokens of a request's longest answer while the request is under way.
        most_held: most rows of ended requests that an earlier request may delay.
        clock: returns monotonic seconds.

    Raises:
        ConfigurationError: the file cannot be written, or exists.
    """

    def __init__(  # noqa: PLR0913 - a file's form, a bound, and the clock, which tests replace
        self,
        path: Path,
        block_size: int,
        *,
        writes_tokens: bool = False,
        num_so_far: Callable[[GenerationRequest], int] = lambda _: 0,
        most_held: int = MOST_HELD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = _new_file(path, "request log")
        self._block_size = block_size
        self._writes_tokens = writes_tokens
        self._num_so_far = num_so_far
        self._most_held = most_held
        self._num_held = 0
        self._clock = clock
        self._start_s = clock()
        self._key = secrets.token_bytes(32)
        self._rows: OrderedDict[GenerationRequest, tuple[float, list[dict[str, Any]] | None]] = OrderedDict()
        header: dict[str, object] = {"format": "pagedkv-trace", "version": 1}
        self._write([header if writes_tokens else {**header, "block_size": block_size}])

    def arrived(self, request: GenerationRequest) -> None:
        """Record the arrival of a request."""
        self._rows[request] = (self._clock() - self._start_s, None)

    def served(self, served: Served) -> None:
        """Record a request that has ended, and write all rows that are no longer delayed. O(tokens)."""
        if served.request not in self._rows:
            return
        arrival_s, _ = self._rows[served.request]
        self._rows[served.request] = (arrival_s, self._rows_of(served, arrival_s))
        self._num_held += 1
        self._write_ended()
        while self._num_held > self._most_held:
            self._write_early()
            self._write_ended()

    def _write_ended(self) -> None:
        """Write the rows before the first request under way."""
        while self._rows:
            request = next(iter(self._rows))
            rows = self._rows[request][1]
            if rows is None:
                return
            del self._rows[request]
            self._num_held -= 1
            self._write(rows)

    def _write_early(self) -> None:
        """Write the earliest request under way, with its tokens so far; its end is not written."""
        request, (arrival_s, _) = self._rows.popitem(last=False)
        length = self._num_so_far(request)
        self._write(
            [self._row(request, place, arrival_s, length, "under way") for place in range(len(request.prompts))]
        )

    def close(self) -> None:
        """Write the ended requests, and close the file."""
        for _, rows in self._rows.values():
            self._write(rows or [])
        self._rows.clear()
        with self._naming_file():
            self._file.close()

    def _rows_of(self, served: Served, arrival_s: float) -> list[dict[str, Any]]:
        status = "left" if served.has_left else "answered"
        if served.problem is not None:
            status = f"error {served.problem.status}"
        rows = []
        for place in range(len(served.request.prompts)):
            output = served.outputs[place] if place < len(served.outputs) else None
            answers = [] if output is None else [each.token_ids for each in output.completions]
            row = self._row(served.request, place, arrival_s, max(map(len, answers), default=0), status)
            if output is not None:
                row["x_num_cached_tokens"] = output.num_cached_tokens
                if output.num_loaded_tokens:
                    row["x_hits_by_medium"] = output.receipt.hits_by_medium
            if place < len(served.routes):
                row["x_replica"] = served.routes[place].replica
                row["x_routing"] = served.routes[place].reason
            if self._writes_tokens and len(answers) == 1:
                row["output_token_ids"] = list(answers[0])
            rows.append(row)
        return rows

    def _row(
        self, request: GenerationRequest, place: int, arrival_s: float, output_length: int, status: str
    ) -> dict[str, Any]:
        prompt = request.prompts[place].token_ids
        row: dict[str, Any] = {
            "arrival_s": round(arrival_s, 6),
            "input_length": len(prompt),
            "output_length": output_length,
            "x_status": status,
        }
        if request.params.n > 1:
            row["num_samples"] = request.params.n
        if request.caller.tenant is not None:
            row["tenant"] = request.caller.tenant
        if self._writes_tokens:
            row["token_ids"] = list(prompt)
        else:
            row["block_ids"] = self._block_ids(prompt, request.caller.salt)
        return row

    def _block_ids(self, token_ids: Sequence[int], salt: bytes) -> list[int]:
        tokens = np.array(token_ids, np.int32)
        parent, block_ids = salt, []
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            content = parent + tokens[end - self._block_size : end].tobytes()
            parent = hashlib.blake2b(content, digest_size=NUM_BYTES, key=self._key).digest()
            block_ids.append(int.from_bytes(parent) & LARGEST_ID)
        return block_ids

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        with self._naming_file():
            for row in rows:
                self._file.write(msgspec.json.encode(row) + b"\n")
            self._file.flush()

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Let errors of the system name the file."""
        try:
            yield
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, self._file.name) from problem


@final
class StepLog:
    """Writes each step that computed tokens as a line of JSON: its ``StepRecord``, and ``block_size``.

    Args:
        path: a file that does not exist yet.
        block_size: tokens of a block, by which a reader converts blocks in use to tokens.

    Raises:
        ConfigurationError: the file cannot be written, or exists.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        self._file = _new_file(path, "step log")
        self._block_size = block_size

    def stepped(self, record: StepRecord) -> None:
        """Write a step at once; an error of the file, such as a full disk, is logged and ends no step. O(1)."""
        if not record.num_tokens:
            return
        try:
            self._file.write(msgspec.json.encode({**asdict(record), "block_size": self._block_size}) + b"\n")
            self._file.flush()
        except OSError as failure:
            LOG.error("a step was not logged: %s", failure)  # noqa: TRY400 - the message has the cause

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._file.close()


def _new_file(path: Path, what: str) -> BufferedWriter:
    """Make a file. Raises ConfigurationError: it exists, or cannot be made."""
    try:
        return path.open("xb")
    except FileExistsError as problem:
        raise ConfigurationError(f"the {what} {path} already exists: name a new file") from problem
    except OSError as problem:
        raise ConfigurationError(f"the {what} {path} cannot be written: {problem}") from problem
