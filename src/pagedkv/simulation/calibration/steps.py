"""Measured steps: from files of steps, results of benchmarks, and an engine's log.

The first line determines the kind of file. CSV has a header with ``num_new_tokens`` and ``seconds``, and optionally
``num_attended_pairs``, ``num_context_tokens`` and ``num_sequences``, in any order; other columns are ignored. JSON
lines have the fields of :class:`pagedkv.engine.StepRecord`, for steps that computed tokens, and may have the tokens of
a block, as ``pagedkv serve --step-log`` writes them.

A result of ``vllm bench serve --save-result --save-detailed`` has the send time of each request, and the seconds to the
first token and between further ones (``start_times``, ``ttfts``, ``itls``). Two kinds of steps can be derived from
these:

* If no request waited for its first token, and none ended, all running requests decoded. Such a step took the time
  between two tokens, for all these sequences; the context of each was its prompt and its tokens until then. Only the
  request that began first is read, so that no step counts twice. Tokens that arrive together are one step with several
  tokens, as drafts make; where that took longer than a step, several steps travelled together, and are left out.
* If a request ran alone, its first token took the step of its prompt, and the server's work before and after that step.
  Prompts longer than an engine computes at once take several steps, and are left out.

All other times mix steps of several kinds.

Latencies that such a result states are compared with those of the same requests on the virtual clock. The file has the
send time and the lengths of each request, so it is itself a trace. Its percentiles of the first token (TTFT), of the
time per further token (TPOT) and between two tokens (ITL) were measured on the engine. They include the network, the
server and the hits of its cache. The virtual clock includes none of these, since the file does not show what prompts
share.

The throughput lines that vLLM logs every ten seconds have means over an interval, not steps. If no prompt token was
computed in the interval, and equally many requests run at both its ends, the same sequences decoded all the time. Every
step then made one token of each, so a step took the number of sequences divided by the generated tokens a second.
Intervals with prompts mix short steps and long ones, and are left out, so such a log does not determine the cost of a
prompt token. The context is the mean usage of the cache at both ends of the interval, times the size that the engine
logs at its start; shared blocks count once.
"""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Final

import numpy as np

from pagedkv.contract.arrays import BoolArray, Float64Array, Int64Array
from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.results import Result
from pagedkv.planner.traces.formats.parsing import MAX_LENGTH, check_range, converted, decoded
from pagedkv.planner.traces.lines import Line, LineReader
from pagedkv.planner.traces.request import Request
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import RequestLog
from pagedkv.simulation.virtual_clock import VirtualClock
from pagedkv.space import BlockSpace


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSteps:
    """Steps of an engine, in the counts of :meth:`~pagedkv.simulation.cost.CostModel.step_s`.

    Args:
        seconds: float64 ``[steps]``, duration of each; all positive.
        num_new_tokens: int64 ``[steps]``, tokens computed.
        num_attended_pairs: int64 ``[steps]``, pairs of queries and keys; None: not counted.
        num_context_tokens: see :meth:`~pagedkv.simulation.cost.CostModel.step_s`.
        num_sequences: sequences with tokens, likewise.
        source: the kind of file from which the steps come, for users.
        notes: warnings about the steps, one sentence each.

    Raises:
        ConfigurationError: the arrays differ in length.
    """

    seconds: Float64Array
    num_new_tokens: Int64Array
    num_attended_pairs: Int64Array | None = None
    num_context_tokens: Int64Array | None = None
    num_sequences: Int64Array | None = None
    source: str = ""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check that there is one number for each step."""
        for name in ("num_new_tokens", "num_attended_pairs", "num_context_tokens", "num_sequences"):
            counts = getattr(self, name)
            if counts is not None and len(counts) != len(self.seconds):
                raise ConfigurationError(f"{name} has {len(counts)} steps, seconds {len(self.seconds)}: give one each")

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.seconds)

    def counts(self, name: str) -> Int64Array:
        """Return one of the counts; zeros if it was not counted."""
        counts: Int64Array | None = getattr(self, name)
        return np.zeros(len(self), np.int64) if counts is None else counts

    def chosen(self, places: Int64Array) -> "MeasuredSteps":
        """Return some of the steps, in the order of ``places``."""

        def of(counts: Int64Array | None) -> Int64Array | None:
            return None if counts is None else counts[places]

        return MeasuredSteps(
            self.seconds[places],
            self.num_new_tokens[places],
            of(self.num_attended_pairs),
            of(self.num_context_tokens),
            of(self.num_sequences),
            self.source,
            self.notes,
        )


with needing("cli", "reading steps"):
    import msgspec
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
    block_size: int | None = None

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
        block_size: tokens of a block, for records, which count blocks instead of tokens, and do not state it.

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
        if row.block_size is not None:
            check_range(line, "block_size", row.block_size, 1, MOST_TOKENS)
        if row.num_tokens:
            rows.append(row)
    sizes = {row.block_size or block_size for row in rows} or {block_size}
    stated = " or ".join(map(str, sorted(sizes)))
    context = f"records count blocks: the context counts as {stated} tokens for each block in use, shared ones once"
    return MeasuredSteps(
        np.array([row.seconds for row in rows], np.float64),
        _array([row.num_tokens for row in rows]),
        num_context_tokens=_array([row.num_used_blocks * (row.block_size or block_size) for row in rows]),
        num_sequences=_array([row.num_decoded + bool(row.num_prefilled) * max(1, row.num_admitted) for row in rows]),
        source="StepRecords as JSON lines",
        notes=(context,),
    )


def _check_seconds(line: Line, seconds: float) -> None:
    if not LEAST_S < seconds <= LONGEST_S:
        raise line.fault(f"a step of {seconds:g} seconds", f"Give positive seconds, at most {LONGEST_S:,}")


def _array(counts: list[int]) -> Int64Array:
    return np.array(counts, np.int64)


DETAILS: Final = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
TOGETHER: Final = 0.2
"""Share of the usual time between two tokens; tokens that are closer arrived together."""
LONGER: Final = 1.5
LONGEST_PROMPT: Final = 2048
"""Tokens that every engine computes in one step by default, at least."""
BENCH_REMEDY: Final = "Write it with --save-result --save-detailed"


def is_bench_result(keys: Mapping[str, object]) -> bool:
    """Return whether the keys of an object are those of such a result, with or without details."""
    return "total_input_tokens" in keys and ("ttfts" in keys or "request_throughput" in keys)


@dataclass(frozen=True, slots=True)
class _Served:
    """The answered requests, in order of their first tokens.

    Args:
        start_s, first_s, last_s: float64 ``[n]``: times of sending, of the first and of the last token.
        token_s: times of each token, by request.
        num_prompt: int64 ``[n]``, tokens of the prompt.
    """

    start_s: Float64Array
    first_s: Float64Array
    last_s: Float64Array
    token_s: tuple[Float64Array, ...]
    num_prompt: Int64Array


def steps_of_bench(
    line: Line, result: Mapping[str, Any], source: str = "result of vllm bench serve", overhead_s: float | None = None
) -> MeasuredSteps:
    """Extract the steps from a result. O(tokens log requests).

    Args:
        line: the line of the result.
        result: the result.
        source: where it comes from, for users.
        overhead_s: seconds of each first token that its step did not take; None: not known, and none are subtracted.

    Raises:
        TraceError: the result has no details, or they are inconsistent.
    """
    served, num_lumped = _served(line, result)
    decoding = _decoding_steps(served)
    prompts = _prompt_steps(served)
    prompts[0] = prompts[0] - (overhead_s or 0.0)
    if not len(prompts[0]):  # then no step may look like one of a prompt
        is_single = decoding[1] == decoding[4]
        decoding = [column[is_single] for column in decoding]
    columns = [np.concatenate(pair) for pair in zip(decoding, prompts, strict=True)]
    taken = (
        f"{len(decoding[0]):,} steps that only decode, and {len(prompts[0]):,} first tokens of requests that ran alone"
    )
    notes = [f"steps taken from {len(served.start_s):,} requests: {taken}"]
    if len(prompts[0]):
        notes.append(
            "the step of a first token includes the time of the network and the server"
            if overhead_s is None
            else f"{overhead_s * 1e3:.2g} ms of each first token are taken for those of the network and the server"
        )
    if num_lumped:
        notes.append(f"{num_lumped:,} requests were left out, since their tokens did not arrive one by one")
    num_new, num_pairs, num_context, num_sequences = (column.astype(np.int64) for column in columns[1:])
    return MeasuredSteps(
        columns[0],
        num_new,
        num_pairs,
        num_context,
        num_sequences,
        source=source,
        notes=tuple(notes),
    )


def _served(line: Line, result: Mapping[str, Any]) -> tuple[_Served, int]:
    """Check the details; return the requests whose tokens arrived one by one, and the number of all others."""
    missing = [name for name in DETAILS if not isinstance(result.get(name), list)]
    if missing:
        raise line.fault(f"the result has no {missing[0]}", BENCH_REMEDY)
    if len({len(result[name]) for name in DETAILS}) > 1:
        raise line.fault("the result has lists of different lengths", BENCH_REMEDY)
    taken: list[tuple[float, float, Float64Array, int]] = []
    num_lumped = 0
    for start_s, ttft_s, itl_s, num_prompt, num_output in zip(*(result[name] for name in DETAILS), strict=True):
        if not num_output or not ttft_s:
            continue  # a failed request
        if not isinstance(itl_s, list) or len(itl_s) != num_output - 1:
            num_lumped += 1
            continue
        check_range(line, "a length", num_prompt, 1, MOST_TOKENS)
        token_s = start_s + ttft_s + np.concatenate([[0.0], np.cumsum(itl_s, dtype=np.float64)])
        taken.append((start_s, token_s[0], token_s, num_prompt))
    taken.sort(key=lambda one: one[1])
    return _Served(
        np.array([one[0] for one in taken], np.float64),
        np.array([one[1] for one in taken], np.float64),
        np.array([one[2][-1] for one in taken], np.float64),
        tuple(one[2] for one in taken),
        np.array([one[3] for one in taken], np.int64),
    ), num_lumped


def _decoding_steps(served: _Served) -> list[Float64Array]:
    """Return seconds, new tokens, pairs, context and sequences of steps that only decode."""
    if not len(served.start_s):
        return [np.zeros(0)] * 5
    starts, lasts = np.sort(served.start_s), np.sort(served.last_s)
    all_tokens = np.sort(np.concatenate(served.token_s))
    by_last = np.argsort(served.last_s, kind="stable")
    num_tokens = np.array([len(token_s) for token_s in served.token_s])
    began = np.concatenate([[0], np.cumsum(served.num_prompt)])
    ended = np.concatenate([[0], np.cumsum((served.num_prompt + num_tokens)[by_last])])
    begins, ends, is_bundle = _token_intervals(served)
    num_first = np.searchsorted(served.first_s, begins, "right")
    num_over = np.searchsorted(lasts, begins, "right")
    is_none_waiting = np.searchsorted(starts, ends, "left") == num_first
    is_none_ending = np.searchsorted(lasts, ends, "left") == num_over
    kept = is_none_waiting & is_none_ending & (ends > begins)
    num_sequences = (num_first - num_over)[kept]
    emitted = np.searchsorted(all_tokens, begins[kept], "right")
    num_made = np.searchsorted(all_tokens, ends[kept], "right") - emitted
    num_new = np.where(is_bundle[kept], np.maximum(num_made, num_sequences), num_sequences)
    context = began[num_first[kept]] + emitted - ended[num_over[kept]]
    num_pairs = context * num_new // np.maximum(1, num_sequences)
    return [(ends - begins)[kept], num_new, num_pairs, context, num_sequences]


def _token_intervals(served: _Served) -> tuple[Float64Array, Float64Array, BoolArray]:
    """Return the times between tokens, and whether several end one; of the running request that began first."""
    usual_s = _usual_gap_s(served)
    begins, ends, bundles, read_until_s = [], [], [], -np.inf
    for token_s in served.token_s:
        is_first = np.concatenate([[True], np.diff(token_s) >= TOGETHER * usual_s])  # of its bundle
        firsts = np.flatnonzero(is_first)
        sizes = np.diff(firsts, append=len(token_s))
        lasts_s = token_s[firsts + sizes - 1]  # when a bundle was complete
        is_bundle = sizes[1:] > 1
        is_step = ~is_bundle | (np.diff(lasts_s) < LONGER * usual_s)
        is_taken = is_step & (lasts_s[:-1] >= read_until_s)
        begins.append(lasts_s[:-1][is_taken])
        ends.append(lasts_s[1:][is_taken])
        bundles.append(is_bundle[is_taken])
        read_until_s = max(read_until_s, token_s[-1])
    return np.concatenate(begins), np.concatenate(ends), np.concatenate(bundles)


def _usual_gap_s(served: _Served) -> float:
    """Return the median seconds between two tokens that did not arrive together."""
    gaps_s = np.concatenate([np.diff(token_s) for token_s in served.token_s])
    apart_s = gaps_s[gaps_s > TOGETHER / 2 * gaps_s.mean()] if len(gaps_s) else gaps_s
    return float(np.median(apart_s)) if len(apart_s) else 0.0


def _prompt_steps(served: _Served) -> list[Float64Array]:
    """Return the same for requests that ran alone until their first token."""
    starts, lasts = np.sort(served.start_s), np.sort(served.last_s)
    num_sent = np.searchsorted(starts, served.first_s, "left")
    num_over = np.searchsorted(lasts, served.start_s, "right")
    alone = (num_sent - num_over == 1) & (served.num_prompt <= LONGEST_PROMPT)
    lengths = served.num_prompt[alone]
    seconds = (served.first_s - served.start_s)[alone]
    return [seconds, lengths, lengths * (lengths + 1) // 2, lengths, np.ones(len(lengths))]


METRICS: Final = ("ttft", "tpot", "itl")
STATISTICS: Final = ("mean", "p50", "p90", "p99")
STATED: Final = {"mean": "mean", "p50": "median"}
"""Names in the file for statistics that are not percentiles there."""
MS_A_SECOND: Final = 1000
BLOCK_SIZE: Final = 16
MOST_BLOCKS: Final = 2**20


@dataclass(frozen=True, slots=True)
class ComparedLatency(Result):
    """One figure, stated and predicted.

    Args:
        metric: ttft, tpot or itl.
        statistic: mean, p50, p90 or p99.
        stated_s: seconds in the file.
        predicted_s: seconds of the same requests on the virtual clock.
    """

    DERIVED: ClassVar = ("error",)

    metric: str
    statistic: str
    stated_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted minus stated seconds, as a share of the stated ones."""
        return self.predicted_s / self.stated_s - 1 if self.stated_s else 0.0


@dataclass(frozen=True, slots=True)
class BenchLatencies:
    """Result of a comparison.

    Args:
        num_requests: requests that were answered.
        compared: the figures.
    """

    num_requests: int
    compared: tuple[ComparedLatency, ...]


def compare_latencies(
    line: Line, result: Mapping[str, Any], model: CostModel, max_sequences: int, max_batched_tokens: int
) -> BenchLatencies:
    """Serve the requests of a result on the virtual clock, and compare latencies with the stated ones.

    Memory suffices for all of them; failed requests are left out.

    Args:
        line: the line of the result.
        result: the result.
        model: cost model of the virtual clock.
        max_sequences, max_batched_tokens: limits of a step of the measured engine.

    Raises:
        TraceError: a length or a time is invalid.
        ConfigurationError: a limit is out of range.
    """
    requests = _requests(line, result)
    log = _replayed(requests, model, max_sequences, max_batched_tokens)
    predicted = dict(zip(METRICS, _latencies_of(log), strict=True))
    stated = dict(zip(METRICS, _detailed(result), strict=True))
    compared = [
        ComparedLatency(metric, statistic, seconds, _statistic(predicted[metric], statistic))
        for metric in METRICS
        for statistic in STATISTICS
        if len(predicted[metric]) and (seconds := _stated(result, stated[metric], metric, statistic)) is not None
    ]
    return BenchLatencies(len(requests), tuple(compared))


def _requests(line: Line, result: Mapping[str, Any]) -> list[Request]:
    if any(not isinstance(result.get(name), list) for name in DETAILS):
        raise line.fault("the result has no times at which its requests were sent", BENCH_REMEDY)
    sent = sorted(
        (start_s, num_prompt, num_output)
        for start_s, ttft_s, num_prompt, num_output in zip(
            *(result[name] for name in ("start_times", "ttfts", "input_lens", "output_lens")), strict=True
        )
        if num_output and ttft_s
    )
    if not sent:
        raise line.fault("no request of the result was answered", "Name another result")
    for start_s, num_prompt, num_output in sent:
        check_range(line, "input_lens", num_prompt, 1, MAX_LENGTH)
        check_range(line, "output_lens", num_output, 1, MAX_LENGTH)
        if not math.isfinite(start_s):
            raise line.fault(f"start_times has {start_s}", BENCH_REMEDY)
    return [Request(start_s - sent[0][0], num_prompt, num_output) for start_s, num_prompt, num_output in sent]


def _replayed(requests: Sequence[Request], model: CostModel, max_sequences: int, max_batched_tokens: int) -> RequestLog:
    longest = sorted((each.input_length + each.output_length for each in requests), reverse=True)
    num_blocks = sum(-(-length // BLOCK_SIZE) + 2 for length in longest[:max_sequences])
    config = ServingConfig(
        num_blocks=max(-(-longest[0] // BLOCK_SIZE) + 2, min(MOST_BLOCKS, num_blocks)) + 1,
        block_size=BLOCK_SIZE,
        max_sequences=max_sequences,
        max_batched_tokens=max_batched_tokens,
        watermark=0.0,
    )
    log = RequestLog(config.scheduling_config())
    clock = VirtualClock(config, model, BlockSpace(config.space_config(is_watched=False)), log)
    for request in requests:
        clock.offer(request)
    clock.finish()
    return log


def _latencies_of(log: RequestLog) -> Iterator[Float64Array]:
    """Yield the times of each kind by request; for ITL those of each further token, as the mean of its request."""
    num_further = log.counts("num_output_tokens").astype(np.int64) - 1
    yield log.first_token_s - log.arrival_s
    has_further = num_further > 0
    tpot_s = (log.end_s - log.first_token_s)[has_further] / num_further[has_further]
    yield tpot_s
    yield log.between_tokens.times_s()


def _detailed(result: Mapping[str, Any]) -> Iterator[Float64Array]:
    """Yield the same from the details of a file."""
    answered = [
        (ttft_s, itl_s)
        for ttft_s, itl_s, num_output in zip(result["ttfts"], result["itls"], result["output_lens"], strict=True)
        if num_output and ttft_s
    ]
    yield np.array([ttft_s for ttft_s, _ in answered], np.float64)
    yield np.array([sum(itl_s) / len(itl_s) for _, itl_s in answered if itl_s], np.float64)
    yield np.array([seconds for _, itl_s in answered for seconds in itl_s], np.float64)


def _stated(result: Mapping[str, Any], detailed: Float64Array, metric: str, statistic: str) -> float | None:
    """Return a statistic that the file states, or else compute it from the details; None without either."""
    value = result.get(f"{STATED.get(statistic, statistic)}_{metric}_ms")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return value / MS_A_SECOND
    return _statistic(detailed, statistic) if len(detailed) else None


def _statistic(times_s: Float64Array, statistic: str) -> float:
    return float(times_s.mean() if statistic == "mean" else np.percentile(times_s, int(statistic[1:])))


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
