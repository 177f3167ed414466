"""Medium: durations of reads and writes, which run one after the other in each direction.

::

    reads    | read 1 | read 2 |   ..latency      a read ends its latency after its last byte
    writes   | write 1     | write 2 | ..latency  at the same time as reads, as on PCIe

Deletes take no time.
"""

from typing import final

from pagedkv.tiers import Action, Delete, Read, Write

__all__ = ["Medium"]


@final
class Medium:
    """One medium.

    Args:
        bandwidth: bytes a second, in each direction.
        latency_s: seconds of a read or write in addition to its bytes.
    """

    def __init__(self, bandwidth: float, latency_s: float) -> None:
        self._bandwidth = bandwidth
        self._latency_s = latency_s
        self._free_s: dict[type[Read | Write], float] = {Read: 0.0, Write: 0.0}

    def begin(self, action: Action, now_s: float) -> float:
        """Queue an action; return the time at which it ends."""
        if isinstance(action, Delete):
            return now_s
        kind = type(action)
        free_s = max(self._free_s[kind], now_s) + action.nbytes / self._bandwidth
        self._free_s[kind] = free_s
        return free_s + self._latency_s
