"""Loader: the interface by which prefixes are loaded from tiers below the device before an admission.

The scheduler has no tiers. It calls the loader for each request that could be admitted now::

    waiting --could be admitted--> loader.begins_load? --no--> admitted
       ^                                 | yes
       +-- Scheduler.loaded(request) -- loading              others are admitted and compute meanwhile

A request that waits for a load has no row. The blocks of the load are reserved in the space
(:meth:`BlockSpace.load <pagedkv.BlockSpace.load>`), so running requests may run short of blocks because of it. Then the
loads are ended before any request is preempted.
"""

from typing import Protocol

from pagedkv.contract.arrays import Int32Array
from pagedkv.scheduling.request import Request
from pagedkv.space import PrefixHit

__all__ = ["Loader"]


class Loader(Protocol):
    """Begins and ends loads."""

    def begins_load(self, request: Request, token_ids: Int32Array, match: PrefixHit) -> bool:
        """Begin a load after a request's hit, or join one under way; return whether the request must wait for it.

        Args:
            request: a request that could be admitted now.
            token_ids: int32 ``[n]``, its known tokens that may hit.
            match: their hit. It is no longer valid if the result is True.
        """
        ...

    def give_way(self) -> bool:
        """End all loads under way, as failed, so that their blocks are free; return whether there were any."""
        ...
