"""RequestLog: the requests that were served, as a trace that ``pagedkv curve``, ``plan`` and ``replay`` read.

A row is written when its request and all earlier requests have ended, since a trace is in order of arrival. A prompt is
written as the identities of its blocks under a random key of the file: the same content has the same identity within a
file, and cannot be guessed from it. A tenant's salt is part of them, as it is of the blocks'.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any, Final, final

import msgspec
import numpy as np

from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.serving.server.generation import Ask
from pagedkv.serving.server.service import Served

__all__ = ["RequestLog"]

NUM_BYTES: Final = 8
LARGEST_ID: Final = 2**63 - 1


@final
class RequestLog:
    """Writes a trace of the pagedkv format.

    Args:
        path: a file that is not there yet.
        block_size: tokens of a block.
        tells_tokens: whether the tokens of prompts and answers are written, in place of block identities.
        clock: gives seconds, never backwards.

    Raises:
        ConfigurationError: the file cannot be written, or is there already.
    """

    def __init__(
        self, path: Path, block_size: int, *, tells_tokens: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            self._file: BufferedWriter = path.open("xb")
        except FileExistsError as problem:
            raise ConfigurationError(
                f"the request log {path} is there already, and a trace has one beginning: name a new file"
            ) from problem
        except OSError as problem:
            raise ConfigurationError(f"the request log {path} cannot be written: {problem}") from problem
        self._block_size = block_size
        self._tells_tokens = tells_tokens
        self._clock = clock
        self._start_s = clock()
        self._key = secrets.token_bytes(32)
        self._rows: OrderedDict[Ask, tuple[float, list[dict[str, Any]] | None]] = OrderedDict()
        header: dict[str, object] = {"format": "pagedkv-trace", "version": 1}
        self._write([header if tells_tokens else {**header, "block_size": block_size}])

    def arrived(self, ask: Ask) -> None:
        """Note a request that has come."""
        self._rows[ask] = (self._clock() - self._start_s, None)

    def served(self, request: Served) -> None:
        """Write a request that has ended, and what waited for it. O(tokens)."""
        if request.ask not in self._rows:
            return
        arrival_s, _ = self._rows[request.ask]
        self._rows[request.ask] = (arrival_s, self._rows_of(request, arrival_s))
        while self._rows:
            ask = next(iter(self._rows))
            rows = self._rows[ask][1]
            if rows is None:
                return
            del self._rows[ask]
            self._write(rows)

    def close(self) -> None:
        """Write what has ended, and close the file."""
        for _, rows in self._rows.values():
            self._write(rows or [])
        self._rows.clear()
        self._file.close()

    def _rows_of(self, request: Served, arrival_s: float) -> list[dict[str, Any]]:
        status = "left" if not request.outputs else "answered"
        if request.problem is not None:
            status = f"error {request.problem.status}"
        rows = []
        for place, prompt in enumerate(request.ask.prompts):
            output = request.outputs[place] if place < len(request.outputs) else None
            answers = [] if output is None else [each.token_ids for each in output.completions]
            row: dict[str, Any] = {
                "arrival_s": round(arrival_s, 6),
                "input_length": len(prompt.token_ids),
                "output_length": max(map(len, answers), default=0),
                "x_status": status,
            }
            if request.ask.params.n > 1:
                row["num_samples"] = request.ask.params.n
            if request.ask.caller.tenant is not None:
                row["tenant"] = request.ask.caller.tenant
            if output is not None:
                row["x_num_cached_tokens"] = output.num_cached_tokens
            if self._tells_tokens:
                row["token_ids"] = list(prompt.token_ids)
                if len(answers) == 1:
                    row["output_token_ids"] = list(answers[0])
            else:
                row["block_ids"] = self._block_ids(prompt.token_ids, request.ask.caller.salt)
            rows.append(row)
        return rows

    def _block_ids(self, token_ids: Sequence[int], salt: bytes) -> list[int]:
        tokens = np.array(token_ids, np.int32)
        parent, block_ids = salt, []
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            content = parent + tokens[end - self._block_size : end].tobytes()
            parent = hashlib.blake2b(content, digest_size=NUM_BYTES, key=self._key).digest()
            block_ids.append(int.from_bytes(parent) & LARGEST_ID)
        return block_ids

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()
