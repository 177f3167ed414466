"""Metrics pages: their text, and what engines say on them, read from a real server."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Final

import pytest

from pagedkv.errors import ConfigurationError, RecordingError
from pagedkv.planner.recording.metrics import MetricsFollower, Sample, fetch_page, parse_exposition

VLLM: Final = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.76e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 400.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="27000"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 12.0
"""
SGLANG: Final = """\
sglang:prompt_tokens_total{model_name="m"} 1.0e+03
sglang:cached_tokens_total{cache_source="device",model_name="m"} 100.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 50.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
sglang:token_usage{model_name="m",tp_rank="1"} 0.3
sglang:num_running_reqs{model_name="m"} 7.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:cache_hit_rate{model_name="m"} NaN
"""


@contextmanager
def page_server(pages: list[str]) -> Iterator[str]:
    """Serve one page after the other at a free port; the last one for ever. "500" fails."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.pop(0) if len(pages) > 1 else pages[0]
            self.send_response(500 if page == "500" else 200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def test_lines_of_a_page() -> None:
    text = (
        "# HELP a b\na 1\n\n b_total { } 2.5e3 1395066363000\n"
        'c{path="C:\\\\DIR\\n",msg="a \\"b\\" }{, #",} +Inf\n'
        'd{le="1"} NaN # {trace_id="x"} 0.5 1.0\n# EOF\n'
    )
    samples = list(parse_exposition(text, "here"))
    assert samples[:3] == [
        Sample("a", {}, 1.0),
        Sample("b_total", {}, 2500.0),
        Sample("c", {"path": "C:\\DIR\n", "msg": 'a "b" }{, #'}, math.inf),
    ]
    assert math.isnan(samples[3].value)
    assert samples[3].labels == {"le": "1"}


@pytest.mark.parametrize("line", ["<html>", "a", "a b", "1a 2", "a{b} 1", 'a{b="c} 1', 'a{b="c" d="e"} 1'])
def test_a_line_of_no_metrics_page_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(RecordingError, match="here, line 2: "):
        list(parse_exposition(f"a 1\n{line}\n", "here"))


def test_what_vllm_gains_between_two_pages() -> None:
    later = (
        VLLM.replace(" 1000.0", " 3000.0")
        .replace(" 400.0", " 1900.0")
        .replace(" 0.25", " 0.75")
        .replace(" 2.0\n", " 2\n")
    )
    with page_server([VLLM, later]) as url:
        follower = MetricsFollower(url, 15.0)
        follower.begin()
        assert follower.metrics.hit_ratio is None  # one page tells what was before, not what is meanwhile
        follower.read_once_more()
    metrics = follower.metrics
    assert metrics.gained == {"queries": 2000.0, "hits": 1500.0, "preemptions": 0.0}
    assert (metrics.hit_ratio, metrics.num_blocks) == (0.75, 27_000)
    assert (metrics.means["usage"], metrics.peaks["usage"]) == (0.5, 0.75)


def test_sglang_tells_hits_by_source() -> None:
    later = SGLANG.replace("1.0e+03", "2.0e+03").replace(" 50.0", " 250.0")
    with page_server([SGLANG, later]) as url:
        follower = MetricsFollower(url, 15.0)
        follower.begin()
        follower.read_once_more()
    assert follower.metrics.gained == {"queries": 1000.0, "hits": 200.0}
    assert follower.metrics.hit_ratio == 0.2
    assert follower.metrics.means["usage"] == pytest.approx(0.4)  # the mean of the ranks
    assert follower.metrics.means["running"] == 7.0


def test_a_counter_that_fell_began_anew() -> None:
    pages = [f"vllm:prefix_cache_queries_total {n}\nvllm:prefix_cache_hits_total {n / 2}\n" for n in (100, 160, 40)]
    follower = MetricsFollower("http://x/metrics", 1.0, lambda _url: pages.pop(0))
    follower.begin()
    follower.read_once_more()
    follower.read_once_more()
    assert follower.metrics.gained == {"queries": 100.0, "hits": 50.0}


def test_the_page_is_read_when_it_is_time_and_failures_are_counted() -> None:
    with page_server([VLLM, VLLM, "500", "<html>", VLLM]) as url:
        follower = MetricsFollower(url, 10.0)
        follower.begin()
        for now_s in (100.0, 105.0, 109.9, 110.0, 120.0, 130.0):
            follower.tick(now_s)
    assert (follower.metrics.num_pages, follower.metrics.num_failures) == (3, 2)
    assert follower.metrics.last_failure == "'<html>' is no metric"


def test_a_page_of_somebody_else_is_refused() -> None:
    with page_server(["go_goroutines 12\n"]) as url, pytest.raises(RecordingError, match="has no figures of the cache"):
        MetricsFollower(url, 10.0).begin()


def test_nobody_there_and_no_address() -> None:
    with page_server([VLLM]) as url:
        pass
    with pytest.raises(RecordingError, match=r"cannot be read: .*refused"):
        fetch_page(url)
    for address in ("localhost:8000", "file:///etc/hostname", "http://"):
        with pytest.raises(ConfigurationError, match="is no address of a page"):
            fetch_page(address)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, math.nan, math.inf])
def test_an_interval_that_makes_no_sense(interval_s: float) -> None:
    with pytest.raises(ConfigurationError, match="`interval_s` must be"):
        MetricsFollower("http://x", interval_s)


def followed(*pages: str) -> MetricsFollower:
    left = list(pages)
    follower = MetricsFollower("http://x/metrics", 1.0, lambda _url: left.pop(0))
    follower.begin()
    for _ in left.copy():
        follower.read_once_more()
    return follower


def test_totals_of_priorities_and_ranks_that_share_requests_count_once() -> None:
    page = (
        'sglang:num_queue_reqs{model_name="m",priority="",tp_rank="0"} 5\n'
        'sglang:num_queue_reqs{model_name="m",priority="1",tp_rank="0"} 2\n'
        'sglang:num_queue_reqs{model_name="m",priority="7",tp_rank="0"} 3\n'
        'sglang:num_queue_reqs{model_name="m",priority="",tp_rank="1"} 5\n'
        'sglang:num_queue_reqs{model_name="m",priority="",tp_rank="0",dp_rank="1"} 4\n'
    )
    assert followed(page).metrics.means == {"waiting": 9.0}


def test_a_counter_that_comes_with_a_later_page_began_at_0() -> None:
    gauge = 'sglang:token_usage{model_name="m"} 0.5\n'
    asked = 'sglang:prompt_tokens_total{{model_name="m",is_streaming="{}"}} {}\n'
    hit = 'sglang:cached_tokens_total{{model_name="m",cache_source="{}"}} {}\n'
    first = gauge + asked.format("true", 100)
    none = followed(first, gauge + asked.format("true", 300)).metrics
    assert (none.gained, none.hit_ratio) == ({"queries": 200.0, "hits": 0.0}, 0.0)
    later = gauge + asked.format("true", 300) + asked.format("false", 200) + hit.format("device", 100)
    metrics = followed(gauge, first, later, later + hit.format("host", 50)).metrics
    assert (metrics.gained, metrics.hit_ratio) == ({"queries": 500.0, "hits": 150.0}, 0.3)


def test_of_two_engines_on_a_page_one_that_began_anew_does_not_count_the_other_again() -> None:
    page = 'vllm:prefix_cache_queries_total{{engine="0"}} {}\nvllm:prefix_cache_queries_total{{engine="1"}} {}\n'
    assert followed(page.format(1000, 1000), page.format(30, 1200)).metrics.gained == {"queries": 230.0}
