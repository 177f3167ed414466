"""Loader: what a scheduler needs of the tiers below the device, so that prefixes can be loaded before an admission.

The scheduler knows no tier. It asks the loader about each request that could be admitted now::

    waiting --could be admitted--> loader.begins_load? --no--> admitted
       ^                                 | yes
       +-- Scheduler.loaded(request) -- loading              others are admitted and compute meanwhile

A request that waits for a load holds no row. The blocks of its load are reserved in the space
(:meth:`BlockSpace.load <pagedkv.BlockSpace.load>`), so a running request may find too few free blocks because of it.
Then the loads give way before any request is preempted.
"""

from typing import Protocol

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.scheduling.request import Request
from pagedkv.memory.space import PrefixHit

__all__ = ["Loader"]


class Loader(Protocol):
    """Begins and ends loads."""

    def begins_load(self, request: Request, token_ids: Int32Array, match: PrefixHit) -> bool:
        """Begin a load behind a request's hit, or join one under way; return whether the request is to wait for it.

        Args:
            request: it could be admitted now.
            token_ids: int32 ``[n]``, its known tokens that may hit.
            match: their hit. It is out of date if the answer is True.
        """
        ...

    def give_way(self) -> bool:
        """End all loads under way, as failed, so that their blocks are free; return whether there were any."""
        ...
