"""The space: sequences, batches and steps on top of the core's pools and tables."""

from pagedkv.space.block_space import BlockSpace
from pagedkv.space.block_table import BlockTable
from pagedkv.space.manager import BlockSpaceManager
from pagedkv.space.statistics import PoolStatistics, SpaceStatistics

__all__ = ["BlockSpace", "BlockSpaceManager", "BlockTable", "PoolStatistics", "SpaceStatistics"]
