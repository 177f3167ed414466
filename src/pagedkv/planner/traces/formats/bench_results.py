"""Results of ``vllm bench serve --save-result --save-detailed``: one object with all requests, as lists."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pagedkv.planner.traces.formats.calls import Call, Calls
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW
from pagedkv.planner.traces.formats.row_format import Reading
from pagedkv.planner.traces.lines import Line

__all__ = ["BenchLayout", "is_bench_result"]

KEYS: Final = frozenset({"start_times", "input_lens", "output_lens"})
FAILED: Final = "error"


def is_bench_result(keys: Mapping[str, object]) -> bool:
    """Return whether an object is such a result with details, by its keys."""
    return keys.keys() >= KEYS


class BenchLayout:
    """One run in each row. Its clock has no fixed origin, so the first request arrives at 0.

    Args:
        reading: unused, since there are no texts.
        calls: reads the times.
    """

    def __init__(self, reading: Reading, calls: Calls) -> None:
        del reading
        self._calls = calls

    @property
    def title(self) -> str:
        """Name of the log."""
        return "a result of vllm bench serve"

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the requests of a run, in order of arrival."""
        columns = [row[name] for name in ("start_times", "input_lens", "output_lens")]
        if len({len(column) if isinstance(column, list) else -1 for column in columns}) > 1 or not columns[0]:
            raise line.fault("its lists of requests differ in length, or are empty", FIX_THE_ROW)
        errors = row.get("errors")
        failures = errors if isinstance(errors, list) and len(errors) == len(columns[0]) else [""] * len(columns[0])
        rows = list(zip(*columns, failures, strict=True))
        for start_s, num_prompt, num_output, _ in rows:
            numbers = isinstance(start_s, int | float) and type(num_prompt) is int and type(num_output) is int
            if not numbers:
                raise line.fault("a request has no numbers for its start and lengths", FIX_THE_ROW)
        origin_s = min(start_s for start_s, *_ in rows)
        for start_s, num_prompt, num_output, error in sorted(rows, key=lambda one: one[0]):
            yield Call(
                line,
                self._calls.arrival_s(line, start_s - origin_s),
                num_prompt=num_prompt,
                num_answer=num_output,
                failure=FAILED if error else None,
            )
