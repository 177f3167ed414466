"""The metrics page of SGLang, written by its own collectors and served as Prometheus' client does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

from tests.peers.absent import stand_in

stand_in()

from prometheus_client import REGISTRY, start_http_server  # noqa: E402 - behind what is absent
from sglang.srt.observability import metrics_collector  # noqa: E402
from sglang.srt.observability.metrics_collector import (  # noqa: E402
    QueueCount,
    SchedulerMetricsCollector,
    SchedulerStats,
    TokenizerMetricsCollector,
)

__all__ = ["SglangPage"]


class SglangPage:
    """The page of one process.

    Args:
        model: its name, which tells pages of one registry apart.
    """

    def __init__(self, model: str) -> None:
        labels = {"model_name": model}
        ranked = {**labels, "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 1, "priority": ""}
        options: Any = MagicMock(prompt_tokens_buckets=None, generation_tokens_buckets=None)
        options.prefill_delayer_max_delay_passes = 30
        options.prefill_delayer_forward_passes_buckets = options.prefill_delayer_wait_seconds_buckets = None
        for settings in ("get_observability", "get_schedule"):
            setattr(metrics_collector, settings, lambda: options)  # as a server that was told nothing has them
        self._labels = labels
        self._tokenizer = TokenizerMetricsCollector(server_args=options, labels=labels)
        self._scheduler = SchedulerMetricsCollector(labels=ranked, server_args=options)

    def finished(self, num_prompt: int, num_cached: int, num_host: int = 0) -> None:
        """Log a request that is over, as the tokenizer's manager does."""
        details = {"device": num_cached - num_host, "host": num_host} if num_host else None
        self._tokenizer.observe_one_finished_request(self._labels, num_prompt, 1, num_cached, 0.1, False, details)  # noqa: FBT003 - theirs

    def stepped(self, by_priority: dict[int, int], usage: float) -> None:
        """Log a step, as the scheduler does, whose requests wait at several priorities."""
        waiting = QueueCount(total=sum(by_priority.values()), by_priority=by_priority)
        self._scheduler.log_stats(SchedulerStats(num_queue_reqs=waiting, token_usage=usage))

    @contextmanager
    def served(self) -> Iterator[str]:
        """Serve the page; yield its address."""
        server, thread = start_http_server(0, addr="127.0.0.1", registry=REGISTRY)
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
