"""Files of measured steps: CSV, records of steps as JSON lines, a vLLM log, a result of its benchmark.

The first line determines the kind of file. CSV has a header with ``num_new_tokens`` and ``seconds``, and optionally
``num_attended_pairs``, ``num_context_tokens`` and ``num_sequences``, in any order; other columns are ignored. JSON
lines have the fields of :class:`pagedkv.engine.StepRecord`, for steps that computed tokens.
"""

import csv
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import numpy as np

from pagedkv.contract.arrays import Int64Array
from pagedkv.contract.extras import needing
from pagedkv.errors import TraceError
from pagedkv.planner.traces.formats.parsing import check_range, converted, decoded
from pagedkv.planner.traces.lines import Line, LineReader
from pagedkv.simulation.calibration.bench_results import is_bench_result, steps_of_bench
from pagedkv.simulation.calibration.steps import MeasuredSteps
from pagedkv.simulation.calibration.vllm_log import is_vllm_log, steps_of_log

with needing("cli", "reading steps"):
    import msgspec

__all__ = ["bench_result_in", "read_steps"]

COLUMNS: Final = ("num_new_tokens", "seconds", "num_attended_pairs", "num_context_tokens", "num_sequences")
NEEDED: Final = COLUMNS[:2]
MOST_TOKENS: Final = 2**31
MOST_PAIRS: Final = 2**62
LONGEST_S: Final = 10**5
LEAST_S: Final = 0
REMEDY: Final = (
    "Give a CSV file with the columns num_new_tokens and seconds, StepRecords as JSON lines, a vLLM log, or "
    "the result of vllm bench serve --save-result --save-detailed"
)


class _CsvRow(msgspec.Struct):
    num_new_tokens: int
    seconds: float
    num_attended_pairs: int = 0
    num_context_tokens: int = 0
    num_sequences: int = 0


class _RecordRow(msgspec.Struct):
    num_decoded: int
    num_prefilled: int
    num_admitted: int
    num_used_blocks: int
    schedule_seconds: float
    forward_seconds: float
    sample_seconds: float
    finish_seconds: float
    num_drafted: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decoded + self.num_prefilled + self.num_drafted

    @property
    def seconds(self) -> float:
        return self.schedule_seconds + self.forward_seconds + self.sample_seconds + self.finish_seconds


def bench_result_in(path: str) -> tuple[Line, dict[str, Any]] | None:
    """Return the result of ``vllm bench serve`` in a file, and its line; None if the file has other content.

    Raises:
        TraceError: the file cannot be read.
    """
    with LineReader(path) as reader:
        first = next(iter(reader), None)
        if first is None or not first.text.startswith("{"):
            return None
        result = decoded(first, dict[str, Any])
        return (first, result) if is_bench_result(result) else None


def read_steps(path: str, block_size: int = 16) -> MeasuredSteps:
    """Read measured steps. O(lines).

    Args:
        path: the file, plain or gzip.
        block_size: tokens of a block, for records, which count blocks instead of tokens.

    Raises:
        TraceError: the file cannot be read, or has no step.
    """
    with LineReader(path) as reader:
        lines = iter(reader)
        first = next(lines, None)
        if first is None:
            raise TraceError(path, None, "the file is empty", REMEDY)
        if first.text.startswith("{") and is_bench_result(keys := decoded(first, dict[str, Any])):
            steps = steps_of_bench(first, keys)
        elif first.text.startswith("{") and not keys.keys() & set(_RecordRow.__struct_fields__):
            raise first.fault("the row has no field of a step", REMEDY)
        elif first.text.startswith("{"):
            steps = _of_records(chain([first], lines), block_size)
        elif is_vllm_log(first):
            steps = steps_of_log(chain([first], lines))
        else:
            steps = _of_csv(first, lines)
    if not len(steps):
        raise TraceError(path, None, "; ".join(["the file has no steps", *steps.notes[:1]]), REMEDY)
    return steps


def _of_csv(first: Line, lines: Iterator[Line]) -> MeasuredSteps:
    names = [name.strip() for name in next(csv.reader([first.text]))]
    missing = [name for name in NEEDED if name not in names]
    if missing or len(set(names)) < len(names):
        what = f"no column {missing[0]}" if missing else "a column twice"
        raise first.fault(f"a header with {what}: {', '.join(names):.100}", REMEDY)
    rows = [_csv_row(line, names) for line in lines]

    def counted(name: str) -> Int64Array | None:
        return _array([getattr(row, name) for row in rows]) if name in names else None

    return MeasuredSteps(
        np.array([row.seconds for row in rows], np.float64),
        _array([row.num_new_tokens for row in rows]),
        counted("num_attended_pairs"),
        counted("num_context_tokens"),
        counted("num_sequences"),
        source="CSV of steps",
    )


def _csv_row(line: Line, names: list[str]) -> _CsvRow:
    cells = [cell.strip() for cell in next(csv.reader([line.text]))]
    if len(cells) != len(names):
        raise line.fault(f"{len(cells)} cells under {len(names)} columns", "Repair or remove the row")
    row = converted(line, {name: cell for name, cell in zip(names, cells, strict=True) if name in COLUMNS}, _CsvRow)
    _check_seconds(line, row.seconds)
    check_range(line, "num_new_tokens", row.num_new_tokens, 1, MOST_TOKENS)
    for name in COLUMNS[2:]:
        check_range(line, name, getattr(row, name), 0, MOST_PAIRS)
    return row


def _of_records(lines: Iterator[Line], block_size: int) -> MeasuredSteps:
    rows = []
    for line in lines:
        row = decoded(line, _RecordRow)
        check_range(line, "num_decoded", row.num_decoded, 0, MOST_TOKENS)
        check_range(line, "num_prefilled", row.num_prefilled, 0, MOST_TOKENS)
        check_range(line, "num_used_blocks", row.num_used_blocks, 0, MOST_TOKENS)
        _check_seconds(line, row.seconds)
        check_range(line, "num_drafted", row.num_drafted, 0, MOST_TOKENS)
        if row.num_tokens:
            rows.append(row)
    context = f"records count blocks: the context counts as {block_size} tokens for each block in use, shared ones once"
    return MeasuredSteps(
        np.array([row.seconds for row in rows], np.float64),
        _array([row.num_tokens for row in rows]),
        num_context_tokens=_array([row.num_used_blocks * block_size for row in rows]),
        num_sequences=_array([row.num_decoded + bool(row.num_prefilled) * max(1, row.num_admitted) for row in rows]),
        source="StepRecords as JSON lines",
        notes=(context,),
    )


def _check_seconds(line: Line, seconds: float) -> None:
    if not LEAST_S < seconds <= LONGEST_S:
        raise line.fault(f"a step of {seconds:g} seconds", f"Give positive seconds, at most {LONGEST_S:,}")


def _array(counts: list[int]) -> Int64Array:
    return np.array(counts, np.int64)
