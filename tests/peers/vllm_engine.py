"""As much of vLLM as decides what is cached, without a model: its cache manager and its publisher of events."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from tests.peers.counting import Residents
from tests.peers.publishing import PublishedCache

__all__ = ["BLOCK_SIZE", "VllmEngine"]

BLOCK_SIZE: Final = 4
WINDOW: Final = 8
MOST_OUTPUT: Final = 100


class VllmEngine(PublishedCache):
    """Serves one request after the other.

    Args:
        folder: of its sockets, where no endpoint is told.
        num_blocks: of its cache.
        has_window: whether it has a second group, of a sliding window.
        rank: of the data-parallel engine.
        options: of the publisher: endpoint, replay_endpoint, topic, buffer_steps.
    """

    def __init__(
        self, folder: Path, *, num_blocks: int = 1000, has_window: bool = False, rank: int = 0, **options: object
    ) -> None:
        init_none_hash(sha256)
        shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        specs: list[object] = [FullAttentionSpec(block_size=BLOCK_SIZE, **shape)]
        if has_window:
            specs.append(SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=WINDOW, **shape))
        groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=1024,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=True,
            log_stats=True,
            enable_kv_cache_events=True,
        )
        self.num_prompt_tokens: list[int] = []
        super().__init__(folder, ZmqEventPublisher, KVEventBatch, rank, options)

    def serve(self, prompt: Sequence[int], output: Sequence[int] = (), adapter: str | None = None) -> None:
        """Compute a request to its end, and publish what became of the cache."""
        request = Request(
            request_id=f"request {len(self.hits)}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=MOST_OUTPUT),
            pooling_params=None,
            lora_request=None if adapter is None else LoRARequest(adapter, len(adapter), "nowhere"),
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
        blocks, num_hit, _ = self.manager.get_computed_blocks(request)
        self.manager.record_prefix_cache_stats(request, num_hit)
        self.hits.append(num_hit)
        self.num_prompt_tokens.append(len(prompt))
        assert self.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks) is not None
        for num_left, token in zip(reversed(range(len(output))), output, strict=True):
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(token)
            if num_left:  # the last one is never computed
                assert self.manager.allocate_slots(request, 1) is not None
        self.manager.free(request)
        self.publish(self.manager.take_events())

    def clear(self) -> None:
        """Clear the cache."""
        assert self.manager.reset_prefix_cache()
        self.publish(self.manager.take_events())

    def cached(self) -> Residents:
        """Give what prompts can hit, as the manager itself knows it."""
        keys = self.manager.block_pool.cached_block_hash_to_block._cache
        return {"GPU": {(get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in keys}}
