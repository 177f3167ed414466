"""The figures of cache and hits on an engine's metrics page, which is read at intervals.

A page is text in Prometheus' format 0.0.4, with the additions of OpenMetrics (``# EOF``, exemplars, ``_created``).
Comments, which state types, are skipped.

======================  ==================================================  ==========================================
figure                  vLLM                                                SGLang
======================  ==================================================  ==========================================
share of cache in use   ``kv_cache_usage_perc``, ``gpu_cache_usage_perc``   ``token_usage``
tokens looked up        ``prefix_cache_queries``                            ``prompt_tokens``
tokens that hit         ``prefix_cache_hits``                               ``cached_tokens``
preemptions             ``num_preemptions``                                 ``num_retracted_requests``
requests running        ``num_requests_running``                            ``num_running_reqs``
requests waiting        ``num_requests_waiting``                            ``num_queue_reqs``
======================  ==================================================  ==========================================

Names begin with ``vllm:`` or ``sglang:`` (some exporters write ``_`` for ``:``), counters may end in ``_total``. The
values of several label sets are summed, those of a share averaged, so that all ranks on one page give one figure. Ranks
that serve the same requests in parts (``tp_rank``, ``pp_rank``, ``moe_ep_rank`` of SGLang) count once, and a total that
is also split by ``priority`` does not count again. The gains of counters are summed over the pages, separately for each
label set. A counter that decreased has restarted from 0, as in Prometheus' own ``increase``; one that first appears on
a later page began at 0. SGLang shows no counter of hits before the first hit. All other missing figures stay unknown.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Final, TypeAlias
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pagedkv.errors import ConfigurationError, RecordingError

SAMPLE: Final = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(?P<labels>(?:[^\"{}]|\"(?:[^\"\\]|\\.)*\")*)\})?"
    r"\s+(?P<value>\S+)(?:\s+-?[0-9.]+)?(?:\s+#\s.*)?\s*"
)
LABEL: Final = re.compile(r"\s*(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"(?P<value>(?:[^\"\\]|\\.)*)\"\s*(?:,|$)")
ESCAPE: Final = re.compile(r"\\(.)")
REMEDY: Final = "Name the metrics page of the engine, as in http://127.0.0.1:8000/metrics"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a page.

    Args:
        name: name of the metric, including suffixes such as ``_total``.
        labels: values by name.
        value: the value, possibly infinite or NaN.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def parse_exposition(text: str, source: str) -> Iterator[Sample]:
    """Read a page line by line.

    Args:
        text: text of the page.
        source: address of the page, for errors.

    Raises:
        RecordingError: a line does not belong to a metrics page.
    """
    for number, line in enumerate(text.splitlines(), 1):
        tidy = line.strip()
        if tidy and not tidy.startswith("#"):
            yield _sample(tidy, f"{source}, line {number}")


def _sample(line: str, source: str) -> Sample:
    found = SAMPLE.fullmatch(line)
    if found is None:
        raise RecordingError(source, f"{line!r:.80} is no metric", REMEDY)
    try:
        value = float(found["value"])
    except ValueError as error:
        raise RecordingError(source, f"{found['value']!r:.40} is no value", REMEDY) from error
    return Sample(found["name"], _labels(found["labels"] or "", source), value)


def _labels(text: str, source: str) -> dict[str, str]:
    labels, place = {}, 0
    while text[place:].strip():
        found = LABEL.match(text, place)
        if found is None:
            raise RecordingError(source, f"{text[place:]!r:.80} is no label", REMEDY)
        labels[found["name"]] = ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], found["value"])
        place = found.end()
    return labels


_Series: TypeAlias = tuple[str, tuple[object, ...]]
"""A figure, and the labels that distinguish its sources."""
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
"""If a page has this counter and no counter of hits, there were no hits."""
CACHE_CONFIG: Final = "vllm:cache_config_info"


@dataclass(slots=True)
class EngineMetrics:
    """The figures on the pages of a recording.

    Args:
        gained: gain of each counter on the pages: queries and hits in tokens, preemptions.
        means: mean of each gauge, over the pages.
        peaks: peak of each gauge.
        num_blocks: blocks of the cache, if the page has them.
        num_pages: pages that were read.
        num_failures: pages that could not be read.
        last_failure: reason of the last failure.
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
        """Hit tokens, as a share of the tokens looked up during the recording; None where that is unknown or 0."""
        queries, hits = self.gained.get("queries"), self.gained.get("hits")
        return hits / queries if queries and hits is not None else None


def fetch_page(url: str) -> str:
    """Fetch a page by HTTP.

    Raises:
        ConfigurationError: the address is invalid.
        RecordingError: there is no page, or it is not text.
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
    """Reads one page at intervals.

    Args:
        url: address of the page.
        interval_s: seconds between two readings, above 0.
        fetch: returns the text of a page.

    Raises:
        ConfigurationError: the interval is not a positive number.
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
        """The figures so far."""

    def begin(self) -> None:
        """Read the page for the first time.

        Raises:
            RecordingError: the page cannot be read, or is not one of vLLM or SGLang.
        """
        if not self._read():
            raise RecordingError(self._url, "has no figures of the cache of vLLM or SGLang", REMEDY)

    def tick(self, now_s: float) -> None:
        """Read the page if the interval has passed; a failure is counted."""
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
        """Read the page, whole or not at all; return whether it has any known figure."""
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
    """Sum the gauges of several label sets by figure; shares are averaged."""
    values: dict[str, list[float]] = {}
    for (figure, _), value in _series(samples, GAUGES).items():
        values.setdefault(figure, []).append(value)
    return {figure: sum(each) / (len(each) if figure == USAGE else 1) for figure, each in values.items()}


def _series(samples: list[Sample], names: Mapping[str, str]) -> dict[_Series, float]:
    """Return the values of figures by their sources; of ranks that share their requests, the largest value."""
    values: dict[_Series, float] = {}
    for sample in samples:
        figure = names.get(plain_name(sample.name))
        if figure is None or not isfinite(sample.value) or sample.labels.get("priority"):
            continue
        ignored = PARTS if figure != USAGE else frozenset()
        labels = sorted(each for each in sample.labels.items() if each[0] not in ignored)
        series = figure, (plain_name(sample.name), *labels)
        values[series] = max(sample.value, values.get(series, sample.value))
    return values


def plain_name(name: str) -> str:
    """Return a metric's name with a colon and without the suffix of counters."""
    for engine in ("vllm", "sglang"):
        if name.startswith(f"{engine}_"):
            name = f"{engine}:{name.removeprefix(f'{engine}_')}"
    return name.removesuffix("_total")


def _num_blocks(samples: list[Sample]) -> int | None:
    counts = [sample.labels.get("num_gpu_blocks", "") for sample in samples if plain_name(sample.name) == CACHE_CONFIG]
    return sum(int(number) for number in counts if number.isdecimal()) or None
