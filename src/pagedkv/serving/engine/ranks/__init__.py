"""One model on several ranks: each process has some heads of every layer, and the blocks of these heads.

::

    rank 0     requests, scheduler, block space --> plan and tokens of a step --+--> model, blocks, sampling
    rank 1..   (the same model, the same tables)                                +--> model, blocks

Reading order: ``sharding`` (which part of each weight a rank has), ``rank_group`` (the processes, and what rank 0 sends
them), ``following`` (what the other ranks do).

Rank 0 alone decides. The plan of a step travels as it is (``StepPlan.buffer``), so tables are equal on all ranks; a
block has the same id on each, and storage for the heads of that rank. Partial sums are added up by the ranks within a
layer (torch.distributed), so a rank that is lost ends all of them.
"""

from pagedkv.serving.engine.ranks.following import follow
from pagedkv.serving.engine.ranks.rank_group import RankGroup
from pagedkv.serving.engine.ranks.sharding import shard

__all__ = ["RankGroup", "follow", "shard"]
