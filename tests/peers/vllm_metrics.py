"""The metrics page of vLLM, written by its own logger and served as Prometheus' client does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

from prometheus_client import REGISTRY, start_http_server
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from tests.peers.vllm_engine import VllmEngine

__all__ = ["VllmPage"]


class VllmPage:
    """The page of one process, with what its engines tell.

    Args:
        engines: by rank.
    """

    def __init__(self, engines: Mapping[int, VllmEngine]) -> None:
        config = VllmConfig()
        config.model_config = SimpleNamespace(served_model_name="m", max_model_len=1024, is_diffusion=False)
        config.cache_config.num_gpu_blocks = 1000
        self._engines = engines
        self._logger = PrometheusStatLogger(config, list(engines))
        self._logger.log_engine_initialized()

    def tell(self, num_running: int = 0, num_waiting: int = 0) -> None:
        """Log what happened since the last time, as an engine does after each step."""
        for rank, engine in self._engines.items():
            stats = SchedulerStats(
                num_running_reqs=num_running,
                num_waiting_reqs=num_waiting,
                kv_cache_usage=engine.manager.usage,
                prefix_cache_stats=engine.manager.make_prefix_cache_stats(),
            )
            self._logger.record(stats, None, engine_idx=rank)

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
