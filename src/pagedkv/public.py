"""The public names of the package, such as ``from pagedkv import BlockSpace``.

The root package imports this module when one of its names is first used, so that reading the version, or printing help,
does not import Numba and NumPy.
"""

from pagedkv.blocks.block_pool import BlockPool, KVCacheBlock
from pagedkv.blocks.digests import ROOT_DIGEST, hash_block_tokens, hash_request_tokens
from pagedkv.blocks.free_queue import FreeBlockQueue
from pagedkv.classic import BlockSpaceManager, BlockTable
from pagedkv.contract.answers import (
    AbortedSteps,
    Allocation,
    EpochSpan,
    InvalidatedMemory,
    Load,
    PrefixGone,
    Shortage,
    TenantShare,
    Ticket,
    Withdrawal,
)
from pagedkv.contract.events import CacheEventKind, CacheEvents, TierEvents
from pagedkv.contract.keys import MediaSpan, RequestKeys
from pagedkv.contract.miss_causes import Explanation, Miss, MissCause
from pagedkv.contract.plan import (
    BlockMoves,
    DraftStates,
    NewBlocks,
    PageLists,
    StepPlan,
    TableWrites,
    TokenRanges,
    UnknownTokens,
)
from pagedkv.contract.space_config import SpaceConfig, TenantLimits
from pagedkv.contract.spec import (
    AllocStatus,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    Replay,
    Row,
    Sequence,
    SequenceGroup,
    SlidingWindow,
    StepId,
)
from pagedkv.errors import PagedKVError
from pagedkv.space import (
    BlockSpace,
    PoolStatistics,
    PrefixHit,
    Receipt,
    SpaceStatistics,
    StoredBlock,
    StoredBlocks,
)

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
    "DraftStates",
    "EpochSpan",
    "Explanation",
    "FreeBlockQueue",
    "FullAttention",
    "GroupSpec",
    "InvalidatedMemory",
    "KVCacheBlock",
    "Load",
    "MediaSpan",
    "Miss",
    "MissCause",
    "NewBlocks",
    "PageLists",
    "PagedKVError",
    "PoolStatistics",
    "PrefixGone",
    "PrefixHit",
    "Receipt",
    "RecurrentState",
    "Replay",
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
    "StoredBlock",
    "StoredBlocks",
    "TableWrites",
    "TenantLimits",
    "TenantShare",
    "Ticket",
    "TierEvents",
    "TokenRanges",
    "UnknownTokens",
    "Withdrawal",
    "hash_block_tokens",
    "hash_request_tokens",
]
