"""Network: the delays and losses of messages between replicas and router."""

from dataclasses import dataclass

from pagedkv.contract.arguments import as_number
from pagedkv.errors import ConfigurationError

__all__ = ["Network"]


@dataclass(frozen=True, slots=True)
class Network:
    """The delays and losses of messages between replicas and router.

    Args:
        delay_s: seconds until a message reaches the router; a snapshot takes as long again.
        loss: fraction of the batches of events that never arrive.
        heartbeat_s: seconds between heartbeats, by which a loss is noticed.
        seed: determines which batches are lost.

    Raises:
        ConfigurationError: a value is out of range.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    heartbeat_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if as_number(self.delay_s, "delay_s") < 0 or not 0 <= as_number(self.loss, "loss") <= 1:
            raise ConfigurationError(f"delay_s must be 0 or more and loss a fraction, got {self.delay_s}, {self.loss}")
        if as_number(self.heartbeat_s, "heartbeat_s") <= 0:
            raise ConfigurationError(f"heartbeat_s must be above 0, got {self.heartbeat_s}")
