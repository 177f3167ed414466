"""Several replicas on one virtual clock, behind the production router.

Reading order: ``network`` (delays and losses of messages), ``kills`` (when replicas are killed), ``replica`` (one
replica: its clock, its space, its requests), ``cluster_figures`` (the result), ``virtual_cluster``, which runs all, and
``setting``, the cluster of a plan's setting as one value.
"""

from pagedkv.simulation.cluster.cluster_figures import ClusterFigures
from pagedkv.simulation.cluster.kills import Kills
from pagedkv.simulation.cluster.network import Network
from pagedkv.simulation.cluster.setting import LATE, ClusterSetting
from pagedkv.simulation.cluster.virtual_cluster import VirtualCluster

__all__ = ["LATE", "ClusterFigures", "ClusterSetting", "Kills", "Network", "VirtualCluster"]
