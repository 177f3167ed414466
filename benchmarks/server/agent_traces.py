"""Sessions of coding agents as files of Weka's format, scaled down so that a CPU serves them.

Lengths, and the tokens of a block, are divided by one number, times by another. Blocks keep their ids: what hits what
stays. Pauses within a session are cut before they are divided, as a night in the middle of a session would be all that
a short run sees of it.

The sessions are the rows of ``agentic_coding_sessions.jsonl.gz`` (``session``, ``block_size``, ``requests`` with ``t``,
lengths, ``hash_runs``, ``agent``), whose times are all on the session's clock. AIPerf 0.13 reads a subagent's times as
on that clock too, if they do not come before its begin (``_subagent_request_absolute_t`` in its
``dataset/loader/weka_trace.py``).
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

__all__ = ["Scale", "chosen", "scaled", "write_traces"]

MODEL: Final = "recorded"
FEWEST_REQUESTS: Final = 5
MOST_BLOCKS: Final = 120_000
"""Ids of blocks in a session, at most: longer sessions take AIPerf minutes to read."""
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """By what sessions are divided.

    Args:
        tokens: of lengths and of the block size, which it divides.
        times: of times; longest_pause_s: between two requests of a session, before it is divided.
    """

    tokens: int = 16
    times: float = 4.0
    longest_pause_s: float = 60.0


def chosen(file: Path, num: int, most_tokens: int, scale: Scale) -> Iterator[Row]:
    """Yield the first ``num`` sessions of a file that have some requests, and none longer than ``most_tokens``."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            row: Row = json.loads(line)
            requests = row["requests"]
            longest = max(each["input_length"] + each["output_length"] for each in requests)
            num_blocks = sum(each["input_length"] // row["block_size"] for each in requests)
            if len(requests) < FEWEST_REQUESTS or longest // scale.tokens > most_tokens or num_blocks > MOST_BLOCKS:
                continue
            yield row
            num -= 1
            if not num:
                return


def scaled(row: Row, scale: Scale) -> dict[str, Any]:
    """Make Weka's trace of a session: main agent and subagents in the order of their begins."""
    block_size, rest = divmod(row["block_size"], scale.tokens)
    if rest:
        raise ValueError(f"{row['block_size']} tokens a block cannot be divided by {scale.tokens}")
    clock = _clock([each["t"] for each in row["requests"]], scale)
    agents: dict[int, list[dict[str, Any]]] = {}
    for each in row["requests"]:
        agents.setdefault(each["agent"], []).append(_request(each, clock, scale))
    main = agents.pop(0, [])
    entries = [*main, *(_subagent(number, requests) for number, requests in agents.items())]
    # AIPerf asks for a first prompt that has the tools and the system's text whole, in blocks.
    most_shared = max(0, len(main[0]["hash_ids"]) - 1) * block_size if main else 0
    tool_tokens = min(row["tool_tokens"] // scale.tokens, most_shared)
    return {
        "id": row["session"],
        "models": [MODEL],
        "block_size": block_size,
        "hash_id_scope": "local",
        "tool_tokens": tool_tokens,
        "system_tokens": min(row["system_tokens"] // scale.tokens, most_shared - tool_tokens),
        "requests": sorted(entries, key=lambda entry: entry["t"]),
    }


def write_traces(rows: Sequence[Row], folder: Path, scale: Scale) -> None:
    """Write a file for each session."""
    for row in rows:
        Path(folder, f"{row['session']}.json").write_text(json.dumps(scaled(row, scale)), encoding="utf-8")


def _clock(times: Sequence[float], scale: Scale) -> dict[float, float]:
    """Give the scaled time of each time; the first is 0."""
    ordered = sorted(set(times))
    now, clock = 0.0, {ordered[0]: 0.0}
    for before, after in pairwise(ordered):
        now += min(after - before, scale.longest_pause_s) / scale.times
        clock[after] = now
    return clock


def _request(request: Row, clock: Mapping[float, float], scale: Scale) -> dict[str, Any]:
    def divided(seconds: float | None) -> float | None:
        return None if seconds is None else max(0.0, seconds) / scale.times

    return {
        "t": clock[request["t"]],
        "type": "s",
        "model": MODEL,
        "in": request["input_length"] // scale.tokens,
        "out": max(1, request["output_length"] // scale.tokens),
        "hash_ids": [first + place for first, count in request["hash_runs"] for place in range(count)],
        "api_time": divided(request["api_time"]),
        "think_time": divided(request["think_time"]),
    }


def _subagent(number: int, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    begin_s = requests[0]["t"]
    end_s = max(each["t"] + (each["api_time"] or 0.0) for each in requests)
    return {
        "t": begin_s,
        "type": "subagent",
        "agent_id": f"agent_{number:03}",
        "subagent_type": MODEL,
        "duration_ms": round(1e3 * (end_s - begin_s)),
        "total_tokens": sum(each["in"] + each["out"] for each in requests),
        "tool_use_count": len(requests),
        "status": "completed",
        "requests": list(requests),
        "models": [MODEL],
    }
