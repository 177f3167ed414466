"""A large trace to measure memory and time with: generated conversations, block ids written out.

    python -m benchmarks.large_trace trace.jsonl --gib 1

Conversations are those of :class:`pagedkv.planner.traces.ConversationWorkload`, of 8 turns in the mean, ten new ones
each second. Ids are of full blocks of 64 tokens: those of the system prompt are shared, the others the session's own.
1 GiB is about 1.5 million requests, and takes some minutes.
"""

import argparse
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from pagedkv.planner.traces import ConversationWorkload, TokenizedRequest

BLOCK_SIZE: Final = 64
MOST_SESSIONS: Final = 10**8
TOKENS_TOLD_APART: Final = 8
GIB: Final = 2**30


class BlockIds:
    """Names the full blocks of prompts, in the order in which they first appear."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._of_session: dict[str | None, list[int]] = {}
        self._of_system: dict[bytes, list[int]] = {}

    def of(self, request: TokenizedRequest, num_system_blocks: int) -> list[int]:
        """Give the ids of a request's full blocks."""
        ids = self._of_session.get(request.session)
        if ids is None:
            begin = request.prompt_token_ids[:TOKENS_TOLD_APART].tobytes()
            if begin not in self._of_system:
                self._of_system[begin] = self._new(num_system_blocks)
            ids = self._of_session[request.session] = list(self._of_system[begin])
        ids += self._new(request.input_length // BLOCK_SIZE - len(ids))
        return ids

    def _new(self, count: int) -> list[int]:
        first = self._num_blocks
        self._num_blocks += max(0, count)
        return list(range(first, self._num_blocks))


def write(file: BinaryIO, num_bytes: int) -> int:
    """Write requests until a file has so many bytes; return how many."""
    encode = msgspec.json.Encoder().encode
    workload = ConversationWorkload(
        num_sessions=MOST_SESSIONS, mean_turns=8.0, sessions_per_s=10.0, system_prompt_lengths=(1024,) * 4
    )
    num_system_blocks = workload.system_prompt_lengths[0] // BLOCK_SIZE
    num_written = file.write(encode({"format": "pagedkv-trace", "version": 1, "block_size": BLOCK_SIZE}) + b"\n")
    ids, num_requests = BlockIds(), 0
    for request in workload.requests():
        row: dict[str, Any] = {
            "arrival_s": round(request.arrival_s, 3),
            "session": request.session,
            "input_length": request.input_length,
            "output_length": len(request.output_token_ids),
            "block_ids": ids.of(request, num_system_blocks),
        }
        num_written += file.write(encode(row) + b"\n")
        num_requests += 1
        if num_written >= num_bytes:
            break
    return num_requests


def main() -> None:
    """Write the trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    given = parser.parse_args()
    with given.output.open("wb") as file:
        num_requests = write(file, int(given.gib * GIB))
    print(f"{num_requests:,} requests, {given.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
