"""ClusterSetting: the replicas, the router and the network of a cluster, as one value."""

from dataclasses import asdict, dataclass
from typing import Final

from pagedkv.contract.arguments import as_choice, as_count
from pagedkv.routing import ROUTINGS, Routing, RoutingRules
from pagedkv.simulation.cluster.network import Network

__all__ = ["LATE", "ClusterSetting"]

LATE: Final = Network(delay_s=0.1, loss=0.01)
"""The network that plans assume: messages arrive 100 ms late, and 1 % of the batches of events are lost."""


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """A cluster.

    Args:
        num_replicas: number of replicas, 1 to 64.
        routing: how requests are routed; rules: the numbers of the router.
        network: delays and losses of messages to the router.

    Raises:
        ConfigurationError: no replica, or an unknown routing.
    """

    num_replicas: int
    routing: Routing = "prefix"
    rules: RoutingRules = RoutingRules()  # noqa: RUF009 - a value: frozen
    network: Network = LATE

    def __post_init__(self) -> None:
        as_count(self.num_replicas, "replicas", least=1, most=64)
        as_choice(self.routing, ROUTINGS, "routing")

    def as_dict(self) -> dict[str, object]:
        """Return the setting for JSON."""
        return asdict(self)
