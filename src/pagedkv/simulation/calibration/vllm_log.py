"""Steps from the throughput lines that vLLM logs every ten seconds, as far as they determine steps.

A line has means over an interval, not steps. If no prompt token was computed in the interval, and equally many requests
run at both its ends, the same sequences decoded all the time. Every step then made one token of each, so a step took
the number of sequences divided by the generated tokens a second. Intervals with prompts mix short steps and long ones,
and are left out, so such a log does not determine the cost of a prompt token.

The context is the mean usage of the cache at both ends of the interval, times the size that the engine logs at its
start; shared blocks count once.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.planner.traces.lines import Line
from pagedkv.simulation.calibration.steps import MeasuredSteps

__all__ = ["is_vllm_log", "steps_of_log"]

LOG_LINE: Final = re.compile(r"^(?:\([^)]*\) )?(?:INFO|DEBUG|WARNING|ERROR)\b")
THROUGHPUT: Final = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens/s, Running: (?P<running>\d+) reqs"
    r"(?:.*? KV cache usage: (?P<usage>[\d.]+)%)?"
)
CACHE_SIZE: Final = re.compile(r"KV cache size: (?P<tokens>[\d,]+) tokens")


@dataclass(frozen=True, slots=True)
class _Interval:
    """The figures of a line; ``usage`` is a share of the cache."""

    prompt_per_s: float
    generated_per_s: float
    num_running: int
    usage: float | None


def is_vllm_log(first: Line) -> bool:
    """Return whether vLLM wrote a file, by its first line."""
    return bool(LOG_LINE.match(first.text) or THROUGHPUT.search(first.text))


def steps_of_log(lines: Iterable[Line]) -> MeasuredSteps:
    """Extract the steps from a log: one for each interval in which the same sequences decoded."""
    seconds: list[float] = []
    sequences: list[int] = []
    shares: list[float | None] = []
    before: dict[str | None, _Interval] = {}
    num_tokens = None
    num_intervals = 0
    for line in lines:
        size = CACHE_SIZE.search(line.text)
        if size is not None:
            num_tokens = int(size["tokens"].replace(",", ""))
        for engine, interval in _intervals(line):
            num_intervals += 1
            previous = before.get(engine)
            before[engine] = interval
            if previous is None or not _is_of_same_sequences(previous, interval):
                continue
            seconds.append(interval.num_running / interval.generated_per_s)
            sequences.append(interval.num_running)
            usages = previous.usage, interval.usage
            shares.append(None if usages[0] is None or usages[1] is None else (usages[0] + usages[1]) / 2)
    known = [share for share in shares if share is not None]
    has_context = num_tokens is not None and len(known) == len(shares)
    counts = np.array(sequences, np.int64)
    taken = (
        f"steps come from {len(seconds):,} of {num_intervals:,} intervals between lines of throughput: those in "
        "which the same sequences decoded all the time; a step took their number divided by the tokens a second, so "
        "one token each (no speculation)"
    )
    return MeasuredSteps(
        np.array(seconds, np.float64),
        counts,
        num_context_tokens=(np.array(known) * (num_tokens or 0)).astype(np.int64) if has_context else None,
        num_sequences=counts,
        source="vLLM log, its lines of throughput",
        notes=(
            taken,
            *(() if has_context else ("the log does not state the size of the cache, so the context is unknown",)),
        ),
    )


def _intervals(line: Line) -> Iterator[tuple[str | None, _Interval]]:
    figures = THROUGHPUT.search(line.text)
    if figures is not None:
        usage = None if figures["usage"] is None else float(figures["usage"]) / 100
        yield (
            figures["engine"],
            _Interval(float(figures["prompt"]), float(figures["generation"]), int(figures["running"]), usage),
        )


def _is_of_same_sequences(previous: _Interval, interval: _Interval) -> bool:
    return (
        interval.prompt_per_s == 0 and interval.generated_per_s > 0 and interval.num_running == previous.num_running > 0
    )
