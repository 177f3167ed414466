"""One model on several ranks: each process computes some heads of every layer, and stores their keys and values.

::

    rank 0     requests, scheduler, block space --> plan and tokens of a step --+--> model, blocks, sampling
    rank 1..   (the same model, the same tables)                                +--> model, blocks

Reading order: ``sharding`` (which part of each weight a rank keeps), ``rank_group`` (the processes, and the messages of
rank 0), ``peer_watch`` (the loss of a rank), ``following`` (the loop of the other ranks); for tiers, ``whole_blocks``
(blocks of all heads from those of the ranks, and back), ``ranked_blocks`` (their copies), ``ranked_content``
(RankedContent: the content of the whole model).

Only rank 0 schedules and samples. It sends the plan of each step unchanged (``StepPlan.buffer``), so the block tables
are equal on all ranks: a block has the same id everywhere, and each rank stores its own heads of it. Within a layer the
ranks sum their partial results (all-reduce of torch.distributed), so the loss of one rank ends all of them.
"""

from pagedkv.engine.ranks.following import follow
from pagedkv.engine.ranks.rank_group import RankGroup, SentStep
from pagedkv.engine.ranks.ranked_content import RankedContent, WholeModel
from pagedkv.engine.ranks.sharding import shard

__all__ = ["RankGroup", "RankedContent", "SentStep", "WholeModel", "follow", "shard"]
