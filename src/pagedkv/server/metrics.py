"""Metrics: the server's metrics for Prometheus, under vLLM's names where the meaning is the same, and our own.

Counters of a request increase once, when it has ended. On a scrape, the engine's thread reads the gauges between two
steps, since during a step another thread could read the block space half changed. No label contains a tenant, a key or
a text.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Final, final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from pagedkv.connections import SlowCause
from pagedkv.contract.answers import MissCause
from pagedkv.engine import RequestOutput, SamplingParams, StepRecord
from pagedkv.engine.outputs import FinishReason
from pagedkv.server.http import REASONS, ApiError
from pagedkv.server.service import Served, Service
from pagedkv.tiers import BreakerState

LABELS: Final = ("model_name", "engine")
QUEUE_FULL: Final = 429
FULL: Final = "max_num_queued_reqs"
SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""Where tokens of prompts come from, in vLLM's words: computed, cached on the device, brought by tiers."""
FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
WHOLE_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_S: Final = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
STEP_TOKENS: Final = (1.0, *(float(2**power) for power in range(3, 15)))
PREEMPTIONS: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
COUNTS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
TOKENS: Final = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))


@final
class TokenGaps(Collector):
    """Counts the gap between two steps once for each sequence that the later step decoded.

    A sequence gets at most one update a step, so the gap between steps is the gap between its tokens. The waiting time
    of a preempted sequence is not included.

    Args:
        name: name of the metric.
        bounds: upper bounds of the buckets, in seconds, rising.
        labels: names and values of the labels.
    """

    def __init__(self, name: str, bounds: Sequence[float], labels: Mapping[str, str]) -> None:
        self._name = name
        self._bounds = (*bounds, inf)
        self._labels = dict(labels)
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0
        self._last_s: float | None = None

    def note(self, now_s: float, num_decoded: int) -> None:
        """Count a step that has ended.

        Args:
            now_s: time of its end.
            num_decoded: sequences that it decoded.
        """
        if self._last_s is not None and num_decoded:
            gap_s = now_s - self._last_s
            self._counts[bisect_left(self._bounds, gap_s)] += num_decoded
            self._sum_s += gap_s * num_decoded
        self._last_s = now_s

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram, as prometheus_client expects it."""
        family = HistogramMetricFamily(
            self._name, "Seconds between two tokens of an answer.", labels=list(self._labels)
        )
        counts = accumulate(tuple(self._counts))
        names = ["+Inf" if bound == inf else str(bound) for bound in self._bounds]
        buckets = [(name, float(count)) for name, count in zip(names, counts, strict=True)]
        family.add_metric(list(self._labels.values()), buckets, self._sum_s)
        yield family


@final
class Metrics:
    """Counts a service's requests, tokens and steps.

    Args:
        service: the service, which calls :meth:`served` and :meth:`stepped`.
        clock: returns monotonic seconds, for the time between tokens.
    """

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._registry = CollectorRegistry()
        self._labels = (service.config.model_name, "0")
        self._now = service.engine.last_numbers
        self._num_evictions = 0
        self._gaps = TokenGaps(
            "vllm:inter_token_latency_seconds", TOKEN_S, dict(zip(LABELS, self._labels, strict=True))
        )
        self._registry.register(self._gaps)
        self._add_gauges()
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("vllm:prompt_tokens_cached", "Tokens of prompts that were cached.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens of prompts found in the prefix cache.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens of answers.")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions of running requests.")
        self._sources = self._counter("vllm:prompt_tokens_by_source", "Tokens of prompts, by where from.", "source")
        self._ended = self._counter("vllm:request_success", "Answers, by finish reason.", "finished_reason")
        self._recomputed = self._counter("pagedkv:recomputed_tokens", "Tokens computed again after a preemption.")
        self._missed = self._counter("pagedkv:prefix_cache_missed_tokens", "Tokens that missed, by cause.", "cause")
        self._errors = self._counter("pagedkv:request_errors", "Requests that got an error, by its status.", "status")
        self._left = self._counter("pagedkv:requests_left", "Requests whose client disconnected before the end.")
        self._left_tokens = self._counter("pagedkv:left_generation_tokens", "Tokens of answers to such requests.")
        self._refusals = self._counter("pagedkv:refused_requests", "Requests refused before the engine.", "reason")
        self._rejections = self._counter(
            "vllm:admission_rejections", "Requests refused because the queue was full.", "reason"
        )
        self._leases = self._counter("pagedkv:breakpoint_leases", "Leases at breakpoints, taken or refused.", "result")
        self._evictions = self._counter("pagedkv:evicted_blocks", "Cached blocks evicted.")
        self._tier_hits = self._counter("pagedkv:tier_hits", "Tokens of hits loaded from tiers, by medium.", "medium")
        self._tier_tokens = self._counter(
            "pagedkv:tier_tokens", "Tokens of prompts found in a tier, by result.", "tier", "result"
        )
        self._tier_entries = self._tier_gauge("pagedkv:tier_entries", "Entries of a tier.")
        self._tier_nbytes = self._tier_gauge("pagedkv:tier_bytes", "Bytes of a tier.")
        self._tiers_out = self._tier_gauge("pagedkv:tier_out_of_service", "1 while a tier's circuit breaker is open.")
        self._slow = self._counter("pagedkv:slow_connections", "Connections ended: the client was too slow.", "cause")
        self._steps = self._counter("pagedkv:steps", "Forward passes.")
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", FIRST_TOKEN_S)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", WHOLE_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", WHOLE_S)
        self._token = self._histogram("vllm:request_time_per_output_token_seconds", TOKEN_S)
        self._prompt_sizes = self._histogram("vllm:request_prompt_tokens", TOKENS)
        self._answer_sizes = self._histogram("vllm:request_generation_tokens", TOKENS)
        self._longest_answers = self._histogram("vllm:request_max_num_generation_tokens", TOKENS)
        self._computed_sizes = self._histogram("vllm:request_prefill_kv_computed_tokens", TOKENS)
        self._limits = self._histogram("vllm:request_params_max_tokens", TOKENS)
        self._num_answers = self._histogram("vllm:request_params_n", COUNTS)
        self._preempted = self._histogram("vllm:request_num_preemptions", PREEMPTIONS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", WHOLE_S)
        self._decode = self._histogram("vllm:request_decode_time_seconds", WHOLE_S)
        self._inference = self._histogram("vllm:request_inference_time_seconds", WHOLE_S)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", STEP_TOKENS)
        self._info = Gauge(
            "vllm:cache_config_info",
            "1, with the engine's settings of its cache.",
            (*LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
            registry=self._registry,
        )
        self._begin_with_zero()

    def _begin_with_zero(self) -> None:
        """Let each counter and histogram exist from the start, with each label that is known."""
        labelled: tuple[tuple[Counter, Sequence[str]], ...] = (
            (self._sources, SOURCES),
            (self._ended, get_args(FinishReason)),
            (self._missed, [cause.value for cause in MissCause]),
            (self._errors, ("500", "501", "503", "504")),
            (self._refusals, sorted(set(REASONS.values()))),
            (self._rejections, (FULL,)),
            (self._leases, ("taken", "refused")),
            (self._slow, get_args(SlowCause)),
        )
        for counter, values in labelled:
            for value in values:
                counter.labels(*self._labels, value)
        for each in vars(self).values():
            if isinstance(each, Counter | Histogram) and tuple(each._labelnames) == LABELS:  # noqa: SLF001 - it has no other list
                each.labels(*self._labels)

    def served(self, served: Served) -> None:
        """Count a request that has ended."""
        if served.problem is not None:
            self._errors.labels(*self._labels, str(served.problem.status)).inc()
        if served.has_left:
            self._left.labels(*self._labels).inc()
            tokens = sum(len(each.token_ids) for output in served.outputs for each in output.completions)
            self._left_tokens.labels(*self._labels).inc(tokens)
        for output in served.outputs:
            if output.queue_seconds is not None:  # the request was admitted
                self._count(output)
                self._count_wishes(served.request.params)
            if output.first_token_seconds is not None:  # its prompt was computed, and each breakpoint leased or refused
                num_taken = sum(map(bool, output.breakpoint_tokens))
                self._leases.labels(*self._labels, "taken").inc(num_taken)
                self._leases.labels(*self._labels, "refused").inc(len(output.breakpoint_tokens) - num_taken)

    def refused(self, problem: ApiError) -> None:
        """Count a request that was refused before the engine computed anything for it."""
        self._refusals.labels(*self._labels, problem.reason).inc()
        if problem.status == QUEUE_FULL:
            self._rejections.labels(*self._labels, FULL).inc()

    def slowed(self, cause: SlowCause) -> None:
        """Count a connection that was ended because its client was too slow."""
        self._slow.labels(*self._labels, cause).inc()

    def stepped(self, record: StepRecord) -> None:
        """Count a step, in the engine's thread. O(1)."""
        self._steps.labels(*self._labels).inc()
        self._step_tokens.labels(*self._labels).observe(record.num_prefilled + record.num_decoded)
        self._gaps.note(self._clock(), record.num_decoded)
        num_preempted = record.num_swapped_out + record.num_recomputed
        if num_preempted:
            self._preemptions.labels(*self._labels).inc(num_preempted)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Write all metrics, as Prometheus text or OpenMetrics.

        Args:
            accept: the request's Accept header.

        Returns:
            the text, and its content type.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _count(self, output: RequestOutput) -> None:
        length = len(output.prompt_token_ids)
        labels = self._labels
        for counter, amount in (
            (self._prompt, length),
            (self._queries, length),
            (self._cached, output.num_cached_tokens),
            (self._hits, output.num_cached_tokens),
            (self._recomputed, output.num_recomputed_tokens),
        ):
            counter.labels(*labels).inc(amount)
        if output.explanation is not None:
            cause = output.explanation.cause.value
            self._missed.labels(*labels, cause).inc(length - output.num_cached_tokens)
        for medium, num_tokens in output.num_loaded_tokens.items():
            self._tier_hits.labels(*labels, medium).inc(num_tokens)
        for note in output.tier_notes:
            self._tier_tokens.labels(*labels, note.tier, note.cause.value).inc(note.end - note.start)
        loaded = sum(output.num_loaded_tokens.values())
        cached = output.num_cached_tokens
        for source, amount in zip(SOURCES, (length - cached, max(0, cached - loaded), loaded), strict=True):
            self._sources.labels(*labels, source).inc(amount)
        self._prompt_sizes.labels(*labels).observe(length)
        self._preempted.labels(*labels).observe(output.num_preemptions)
        self._computed_sizes.labels(*labels).observe(length - cached)
        self._longest_answers.labels(*labels).observe(max(len(each.token_ids) for each in output.completions))
        for completion in output.completions:
            self._generated.labels(*labels).inc(len(completion.token_ids))
            self._answer_sizes.labels(*labels).observe(len(completion.token_ids))
            self._ended.labels(*labels, completion.finish_reason or "aborted").inc()
        self._time(output)

    def _count_wishes(self, params: SamplingParams) -> None:
        self._num_answers.labels(*self._labels).observe(params.n)
        if params.max_tokens is not None:
            self._limits.labels(*self._labels).observe(params.max_tokens)

    def _time(self, output: RequestOutput) -> None:
        first, whole, labels = output.first_token_seconds, output.total_seconds, self._labels
        queued = output.queue_seconds
        if queued is not None:
            self._queue.labels(*labels).observe(queued)
        if queued is not None and first is not None and whole is not None:
            self._prefill.labels(*labels).observe(max(0.0, first - queued))
            self._decode.labels(*labels).observe(whole - first)
            self._inference.labels(*labels).observe(max(0.0, whole - queued))
        if first is not None:
            self._first_token.labels(*labels).observe(first)
        if whole is not None:
            self._whole.labels(*labels).observe(whole)
        num_further = max((len(each.token_ids) for each in output.completions), default=0) - 1
        if first is not None and whole is not None and num_further > 0:
            self._token.labels(*labels).observe((whole - first) / num_further)

    async def read_engine(self) -> None:
        """Read the engine's numbers; after the engine has ended, keep the last ones."""
        self._now = await self._service.engine.numbers()
        facts = self._service.engine.facts
        self._info.clear()
        self._info.labels(*self._labels, str(facts.block_size), str(self._now.num_blocks), str(facts.is_caching)).set(1)
        self._evictions.labels(*self._labels).inc(self._now.num_evictions - self._num_evictions)
        self._num_evictions = self._now.num_evictions
        for tier in self._now.tiers:
            self._tier_entries.labels(*self._labels, tier.name).set(tier.store.num_entries)
            self._tier_nbytes.labels(*self._labels, tier.name).set(tier.store.nbytes)
            self._tiers_out.labels(*self._labels, tier.name).set(tier.store.breaker is BreakerState.OPEN)

    def _add_gauges(self) -> None:
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("vllm:num_requests_running", "Running requests.", lambda: self._now.num_running),
            ("vllm:num_requests_waiting", "Waiting requests.", lambda: self._now.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the blocks that running requests use, 0 to 1.",
                lambda: self._now.num_live / self._now.num_blocks,
            ),
            ("pagedkv:leased_blocks", "Free blocks that leases keep cached.", lambda: self._now.num_leased),
            (
                "pagedkv:kept_answer_tokens",
                "Tokens kept for next turns.",
                lambda: float(self._service.chats.num_kept_tokens),
            ),
        )
        for name, what, read in gauges:
            gauge = Gauge(name, what, LABELS, registry=self._registry)
            gauge.labels(*self._labels).set_function(read)
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests, by what for: here always capacity.",
            (*LABELS, "reason"),
            registry=self._registry,
        )
        by_reason.labels(*self._labels, "capacity").set_function(lambda: self._now.num_waiting)
        by_reason.labels(*self._labels, "deferred").set(0)

    def _tier_gauge(self, name: str, what: str) -> Gauge:
        return Gauge(name, what, (*LABELS, "tier"), registry=self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, (*LABELS, *labels), registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        what = name.partition(":")[2].replace("_", " ").capitalize() + "."
        return Histogram(name, what, LABELS, buckets=buckets, registry=self._registry)
