"""Latencies stated by a result of ``vllm bench serve``, beside those of the same requests on the virtual clock.

The file has the send time and the lengths of each request, so it is itself a trace. Its percentiles of the first token
(TTFT), of the time per further token (TPOT) and between two tokens (ITL) were measured on the engine. They include the
network, the server and the hits of its cache. The virtual clock includes none of these, since the file does not show
what prompts share.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagedkv.contract.arrays import Float64Array
from pagedkv.planner.traces.formats.parsing import MAX_LENGTH, check_range
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request
from pagedkv.simulation.calibration.bench_results import DETAILS, REMEDY
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.request_log import RequestLog
from pagedkv.simulation.virtual_clock import VirtualClock
from pagedkv.space import BlockSpace

__all__ = ["BenchLatencies", "ComparedLatency", "compare_latencies"]

METRICS: Final = ("ttft", "tpot", "itl")
STATISTICS: Final = ("mean", "p50", "p90", "p99")
STATED: Final = {"mean": "mean", "p50": "median"}
"""Names in the file for statistics that are not percentiles there."""
MS_A_SECOND: Final = 1000
BLOCK_SIZE: Final = 16
MOST_BLOCKS: Final = 2**20


@dataclass(frozen=True, slots=True)
class ComparedLatency:
    """One figure, stated and predicted.

    Args:
        metric: ttft, tpot or itl.
        statistic: mean, p50, p90 or p99.
        stated_s: seconds in the file.
        predicted_s: seconds of the same requests on the virtual clock.
    """

    metric: str
    statistic: str
    stated_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted minus stated seconds, as a share of the stated ones."""
        return self.predicted_s / self.stated_s - 1 if self.stated_s else 0.0

    def as_dict(self) -> dict[str, float | str]:
        """Return the values for JSON."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "error": self.error}


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
    log = _served(requests, model, max_sequences, max_batched_tokens)
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
        raise line.fault("the result has no times at which its requests were sent", REMEDY)
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
            raise line.fault(f"start_times has {start_s}", REMEDY)
    return [Request(start_s - sent[0][0], num_prompt, num_output) for start_s, num_prompt, num_output in sent]


def _served(requests: Sequence[Request], model: CostModel, max_sequences: int, max_batched_tokens: int) -> RequestLog:
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
