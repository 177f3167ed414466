"""Measures the curve of a tiny trace, so that all loops of curves are compiled."""

from typing import Final, Literal

import numpy as np

from pagedkv.contract.spec import FullAttention
from pagedkv.planner.capacity.curve import OPTIMAL, POLICIES, measure_curve
from pagedkv.planner.capacity.model_curve import CachedModel, CachePoint, measure_model_curve
from pagedkv.planner.capacity.references import BlockReferences, Partition, ReferenceCollector
from pagedkv.planner.traces.request import Request

__all__ = ["rehearse"]

MANY: Final = 3_000
"""Blocks of the longest prompt: enough that the tree of blocks and its table grow."""


def rehearse(eviction: str, of: Literal["blocks", "model"]) -> None:
    """Measure the hits of a policy: in one pool beside the optimum, or in the space of a model."""
    prompts = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2]]
    references = _references(*prompts, list(range(10, 10 + MANY)))
    if of == "blocks":
        policies = {name: POLICIES[name] for name in (eviction, OPTIMAL)}
        divided = Partition("tenant", ["all"], np.zeros(references.num_requests, np.int32))
        measure_curve(references, [2, 3], policies, partitions=[divided])
    else:
        model = CachedModel("tiny", (FullAttention(block_size=1),), [CachePoint(1.0, {"device": 5})])
        measure_model_curve(_references(*prompts), model, [eviction])


def _references(*prompts: list[int]) -> BlockReferences:
    collector = ReferenceCollector("nowhere")
    for block_ids in prompts:
        collector.add(Request(0.0, len(block_ids), 0, np.array(block_ids, np.int64), 1))
    return collector.references()
