"""As much of SGLang as decides what is cached, without a model: its radix cache and its publisher of events."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from unittest.mock import MagicMock

import torch

from tests.peers.absent import stand_in

stand_in()

from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher  # noqa: E402 - behind what is absent
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402

from tests.peers.publishing import PublishedCache  # noqa: E402

__all__ = ["PAGE_SIZE", "SglangEngine"]

PAGE_SIZE: Final = 4


class SglangEngine(PublishedCache):
    """Serves one request after the other.

    Args:
        folder: of its sockets, where no endpoint is told.
        num_pages: of its cache.
        rank: of the data-parallel engine.
        options: of the publisher: endpoint, replay_endpoint, topic, buffer_steps, bind.
    """

    def __init__(self, folder: Path, *, num_pages: int = 1000, rank: int = 0, **options: object) -> None:
        allocator = MagicMock(device="cpu")  # which frees what it is told to
        self.cache = RadixCache.create_simulated(
            mock_allocator=allocator, page_size=PAGE_SIZE, enable_kv_cache_events=True
        )
        self._num_pages = num_pages
        super().__init__(folder, ZmqEventPublisher, KVEventBatch, rank, options)

    def serve(self, prompt: Sequence[int], adapter: str | None = None) -> None:
        """Compute a request to its end, and publish what became of the cache."""
        key = RadixKey(token_ids=array("q", prompt[:-1]), extra_key=adapter)
        self.hits.append(self.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)
        key = RadixKey(token_ids=array("q", prompt), extra_key=adapter)
        self.cache.insert(InsertParams(key=key, value=torch.arange(len(prompt))))
        too_many = self.cache.evictable_size() - self._num_pages * PAGE_SIZE
        if too_many > 0:
            self.cache.evict(EvictParams(num_tokens=too_many))
        self.publish(self.cache.take_events())

    def clear(self) -> None:
        """Clear the cache."""
        self.cache.reset()
        self.publish(self.cache.take_events())

    def num_cached(self) -> int:
        """Give the pages that prompts can hit, as the tree itself knows it."""
        num_tokens: int = self.cache.total_size()
        return num_tokens // PAGE_SIZE
