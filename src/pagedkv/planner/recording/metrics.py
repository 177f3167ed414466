"""What engines say of their cache and their hits on a metrics page, read again and again.

======================  ==================================================  ==========================================
figure                  vLLM                                                SGLang
======================  ==================================================  ==========================================
share of cache in use   ``kv_cache_usage_perc``, ``gpu_cache_usage_perc``   ``token_usage``
tokens asked for        ``prefix_cache_queries``                            ``prompt_tokens``
tokens that hit         ``prefix_cache_hits``                               ``cached_tokens``
preemptions             ``num_preemptions``                                 ``num_retracted_requests``
requests that run       ``num_requests_running``                            ``num_running_reqs``
requests that wait      ``num_requests_waiting``                            ``num_queue_reqs``
======================  ==================================================  ==========================================

Names begin with ``vllm:`` or ``sglang:`` (some exporters write ``_`` for ``:``), counters may end in ``_total``. A
metric with several label sets is their sum, a share their mean: the ranks on one page are told together. Those that
serve the same requests in parts (``tp_rank``, ``pp_rank``, ``moe_ep_rank`` of SGLang) count once, and what is told by
``priority`` besides in all does not count again. What counters gained is summed over the pages, each label set by
itself; one that fell began anew, as in Prometheus' own ``increase``, and one that comes with a later page began at 0.
SGLang shows no counter of hits before the first hit. What a page does not have otherwise stays unknown.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Final, TypeAlias
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pagedkv.memory.contract.errors import ConfigurationError, RecordingError
from pagedkv.planner.recording.exposition import REMEDY, Sample, parse_exposition

__all__ = ["EngineMetrics", "MetricsFollower", "fetch_page"]

_Series: TypeAlias = tuple[str, tuple[object, ...]]
"""A figure, and the labels that tell one source of it from another."""

TIMEOUT_S: Final = 5.0
MAX_PAGE_NBYTES: Final = 64 * 2**20
USAGE: Final = "usage"
COUNTERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "vllm:prefix_cache_queries": "queries",
        "vllm:prefix_cache_hits": "hits",
        "vllm:num_preemptions": "preemptions",
        "sglang:prompt_tokens": "queries",
        "sglang:cached_tokens": "hits",
        "sglang:num_retracted_requests": "preemptions",
    }
)
GAUGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "vllm:kv_cache_usage_perc": USAGE,
        "vllm:gpu_cache_usage_perc": USAGE,
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "waiting",
        "sglang:token_usage": USAGE,
        "sglang:num_running_reqs": "running",
        "sglang:num_queue_reqs": "waiting",
    }
)
PARTS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels of ranks that serve the same requests in parts."""
NO_HITS_YET: Final = "sglang:prompt_tokens"
"""Where this counter is, hits that are not there are none."""
CACHE_CONFIG: Final = "vllm:cache_config_info"


@dataclass(slots=True)
class EngineMetrics:
    """What the pages of a recording told.

    Args:
        gained: what each counter gained, where it was told: queries and hits in tokens, preemptions.
        means: of each gauge, over the pages.
        peaks: of each gauge.
        num_blocks: blocks of the cache, where the page tells.
        num_pages: pages that were read.
        num_failures: pages that could not be read.
        last_failure: why the last of these could not.
    """

    gained: dict[str, float] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    num_blocks: int | None = None
    num_pages: int = 0
    num_failures: int = 0
    last_failure: str | None = None

    @property
    def hit_ratio(self) -> float | None:
        """Of tokens, as the engine counted them meanwhile; None where it did not tell, or nothing was asked for."""
        queries, hits = self.gained.get("queries"), self.gained.get("hits")
        return hits / queries if queries and hits is not None else None


def fetch_page(url: str) -> str:
    """Fetch a page by HTTP.

    Raises:
        ConfigurationError: it is no address of a page.
        RecordingError: there is none, or it is no text.
    """
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).netloc:
        raise ConfigurationError(f"{url!r} is no address of a page. {REMEDY}")
    try:
        request = Request(url, headers={"Accept": "text/plain; version=0.0.4"})  # noqa: S310 - http(s), a line above
        with urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - as above
            data: bytes = answer.read(MAX_PAGE_NBYTES)
        return data.decode()
    except (URLError, OSError, ValueError) as error:
        raise RecordingError(url, f"cannot be read: {getattr(error, 'reason', error)}", REMEDY) from error


class MetricsFollower:
    """Reads one page again and again.

    Args:
        url: of the page.
        interval_s: seconds between two readings, above 0.
        fetch: gives the text of a page.

    Raises:
        ConfigurationError: the interval makes no sense.
    """

    def __init__(self, url: str, interval_s: float, fetch: Callable[[str], str] = fetch_page) -> None:
        if not (isfinite(interval_s) and interval_s > 0):
            raise ConfigurationError(f"`interval_s` must be a number of seconds above 0, got {interval_s}")
        self._url = url
        self._interval_s = interval_s
        self._fetch = fetch
        self._next_s = float("-inf")
        self._counters: dict[_Series, float] = {}
        self._sums: dict[str, float] = {}
        self.metrics = EngineMetrics()
        """What was found out so far."""

    def begin(self) -> None:
        """Read the page for the first time.

        Raises:
            RecordingError: it cannot be read, or is no page of vLLM or SGLang.
        """
        if not self._read():
            raise RecordingError(self._url, "tells nothing of the cache of vLLM or SGLang", REMEDY)

    def tick(self, now_s: float) -> None:
        """Read the page if it is time to; a failure is counted."""
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self.read_once_more()

    def read_once_more(self) -> None:
        """Read the page now; a failure is counted."""
        try:
            self._read()
        except RecordingError as error:
            self.metrics.num_failures += 1
            self.metrics.last_failure = error.reason

    def _read(self) -> bool:
        """Read the page, whole or not at all; tells whether anything is known on it."""
        samples = list(parse_exposition(self._fetch(self._url), self._url))
        counters, gauges = _series(samples, COUNTERS), _summed(samples)
        is_first = not self.metrics.num_pages
        for series, value in counters.items():
            before = self._counters.get(series, value if is_first else 0.0)
            self._gain(series[0], value - before if value >= before else value)
            if series[1][0] == NO_HITS_YET:
                self._gain("hits", 0.0)
        self._counters.update(counters)
        self.metrics.num_pages += 1
        for name, value in gauges.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self.metrics.means[name] = self._sums[name] / self.metrics.num_pages
            self.metrics.peaks[name] = max(value, self.metrics.peaks.get(name, value))
        self.metrics.num_blocks = _num_blocks(samples) or self.metrics.num_blocks
        return bool(counters or gauges)

    def _gain(self, name: str, value: float) -> None:
        self.metrics.gained[name] = self.metrics.gained.get(name, 0.0) + value


def _summed(samples: list[Sample]) -> dict[str, float]:
    """Add up what gauges of several label sets say of one figure; shares are averaged."""
    values: dict[str, list[float]] = {}
    for (figure, _), value in _series(samples, GAUGES).items():
        values.setdefault(figure, []).append(value)
    return {figure: sum(each) / (len(each) if figure == USAGE else 1) for figure, each in values.items()}


def _series(samples: list[Sample], names: Mapping[str, str]) -> dict[_Series, float]:
    """Give the values of figures by what tells them apart: the largest of ranks that share their requests."""
    values: dict[_Series, float] = {}
    for sample in samples:
        figure = names.get(_plain(sample.name))
        if figure is None or not isfinite(sample.value) or sample.labels.get("priority"):
            continue
        ignored = PARTS if figure != USAGE else frozenset()
        labels = sorted(each for each in sample.labels.items() if each[0] not in ignored)
        series = figure, (_plain(sample.name), *labels)
        values[series] = max(sample.value, values.get(series, sample.value))
    return values


def _plain(name: str) -> str:
    """Write a metric's name with a colon and without the suffix of counters."""
    for engine in ("vllm", "sglang"):
        if name.startswith(f"{engine}_"):
            name = f"{engine}:{name.removeprefix(f'{engine}_')}"
    return name.removesuffix("_total")


def _num_blocks(samples: list[Sample]) -> int | None:
    told = [sample.labels.get("num_gpu_blocks", "") for sample in samples if _plain(sample.name) == CACHE_CONFIG]
    return sum(int(number) for number in told if number.isdecimal()) or None
