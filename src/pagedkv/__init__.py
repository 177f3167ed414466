"""pagedkv: the KV-cache memory system of an LLM serving engine, as a library.

>>> import numpy as np
>>> from pagedkv import BlockSpaceManager, FullAttention, SpaceConfig
>>> space = BlockSpaceManager(SpaceConfig((FullAttention(block_size=16),), num_blocks=1000)).space
>>> first = space.allocate(np.arange(100))
>>> plan = space.plan_step()
>>> space.acknowledge(plan.step_id)
>>> space.allocate(np.arange(100)).num_hit_tokens
96
"""

from importlib.metadata import version

from pagedkv.core.blocks import PoolArrays
from pagedkv.core.digests import ROOT_DIGEST, hash_block_tokens, hash_request_tokens
from pagedkv.core.free_queue import FreeBlockQueue
from pagedkv.core.pool import BlockPool, KVCacheBlock
from pagedkv.core.prefix_index import PrefixIndex
from pagedkv.errors import PagedKVError
from pagedkv.events import CacheEventKind, CacheEvents
from pagedkv.keys import MediaSpan, RequestKeys
from pagedkv.plan import (
    AbortedSteps,
    Allocation,
    BlockMoves,
    PrefixHit,
    Shortage,
    StepPlan,
    TableWrites,
    TokenRanges,
)
from pagedkv.space import BlockSpace, BlockSpaceManager, BlockTable, PoolStatistics, SpaceStatistics
from pagedkv.spec import (
    AllocStatus,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    Row,
    Sequence,
    SequenceGroup,
    SlidingWindow,
    SpaceConfig,
    StepId,
)

__version__ = version("pagedkv")

__all__ = [
    "ROOT_DIGEST",
    "AbortedSteps",
    "AllocStatus",
    "Allocation",
    "BlockMoves",
    "BlockPool",
    "BlockSpace",
    "BlockSpaceManager",
    "BlockTable",
    "CacheEventKind",
    "CacheEvents",
    "ChunkedLocal",
    "FreeBlockQueue",
    "FullAttention",
    "GroupSpec",
    "KVCacheBlock",
    "MediaSpan",
    "PagedKVError",
    "PoolArrays",
    "PoolStatistics",
    "PrefixHit",
    "PrefixIndex",
    "RecurrentState",
    "RequestKeys",
    "Row",
    "Sequence",
    "SequenceGroup",
    "Shortage",
    "SlidingWindow",
    "SpaceConfig",
    "SpaceStatistics",
    "StepId",
    "StepPlan",
    "TableWrites",
    "TokenRanges",
    "hash_block_tokens",
    "hash_request_tokens",
]
