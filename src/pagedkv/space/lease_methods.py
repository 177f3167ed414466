"""The public method that leases cached content."""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import TokenIds
from pagedkv.space.clock import as_lease_end
from pagedkv.space.leasing import lease_hit
from pagedkv.space.matching import match_prompt
from pagedkv.space.prompts import prepare_prompt
from pagedkv.space.space_view import SpaceView

__all__ = ["LeaseMethods"]


class LeaseMethods(SpaceView):
    """The part of a block space that leases."""

    def lease(self, token_ids: TokenIds, until_s: float, *, keys: RequestKeys = NO_KEYS) -> int:
        """Keep the cached blocks of a prompt until a time: they are evicted after all unleased blocks.

        A lease is soft: leased blocks count as free, and are evicted if an operation needs them. The lease that ends
        last is broken first. Of several leases of a block the one that ends last counts. :meth:`forget`, a reset or new
        weights end all leases. ``free(rows, keep_until_s=...)`` leases what a row leaves when it ends.

        Args:
            token_ids: a prompt; its last token does not count, as for a hit.
            until_s: seconds of the clock that :meth:`advance` sets.
            keys: its extra keys.

        Returns how many leading tokens are kept.

        Raises:
            ConfigurationError: the end is past or infinite; the space keeps no leases.

        Cost: O(blocks of the prompt).
        """
        end = as_lease_end(self._state, until_s)
        hit = match_prompt(self._state, prepare_prompt(self._state, token_ids, keys, None, 0))
        self._state.version += 1
        lease_hit(self._state, hit, end)
        return hit.num_tokens
