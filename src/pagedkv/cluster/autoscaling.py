"""The number of replicas by queues and blocks: a policy for Ray Serve's own autoscaler.

Serve calls the policy periodically with the numbers that replicas report (``EngineReplica.record_autoscaling_stats``),
and applies its own factors, delays and bounds to the result, as to that of its default policy. The default policy
counts ongoing requests, of which an engine may hold a hundred short ones or four long ones. This policy measures what
engines run out of: it counts blocks in use, and requests that wait for blocks or rows.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

__all__ = ["BLOCKS_IN_USE", "NUM_WAITING", "POLICY", "desired_replicas", "scale_by_blocks"]

Name = TypeVar("Name")

POLICY: Final = "pagedkv.cluster.autoscaling:scale_by_blocks"
NUM_WAITING: Final = "num_waiting"
BLOCKS_IN_USE: Final = "blocks_in_use"
TARGET_BLOCKS: Final = 0.7
TARGET_WAITING: Final = 4.0


def desired_replicas(blocks_in_use: Mapping[Name, float], num_waiting: Mapping[Name, float], current: int) -> float:
    """Return how many replicas the load needs, not rounded.

    ::

        replicas = sum of blocks_in_use / 0.7 + sum of num_waiting / 4

    The first term is the number of replicas of which the running requests fill 0.7 of the blocks. Requests wait where
    blocks or rows are full, so the second term adds to it: a replica for each four waiting requests. Blocks that are
    cached and not in use do not count, so an idle cluster with full caches shrinks to its smallest size.

    Args:
        blocks_in_use: fraction of the blocks that running requests hold, by replica.
        num_waiting: requests that wait, by replica.
        current: number of running replicas; those without a report count like the mean of the others.
    """
    reported = len(blocks_in_use.keys() | num_waiting.keys())
    if not reported:
        return float(current)
    needed = math.fsum(blocks_in_use.values()) / TARGET_BLOCKS + math.fsum(num_waiting.values()) / TARGET_WAITING
    return needed * max(1.0, current / reported)


def scale_by_blocks(context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
    """Return the number of replicas for a deployment, and no state: the signature of Serve's policies.

    Args:
        context: of Serve. ``aggregated_metrics`` has each replica's numbers, over ``look_back_period_s``.
    """
    metrics = context.aggregated_metrics or {}
    current = context.current_num_replicas
    return desired_replicas(metrics.get(BLOCKS_IN_USE, {}), metrics.get(NUM_WAITING, {}), current), {}
