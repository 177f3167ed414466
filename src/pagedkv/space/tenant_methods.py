"""The public methods on tenants: their shares, their limits, and tenants that come and go."""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

from pagedkv.contract.answers import TenantShare
from pagedkv.contract.arguments import as_count
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.space_config import TenantLimits
from pagedkv.contract.spec import TokenIds
from pagedkv.space.admission import Admission, free_blocks_needed
from pagedkv.space.hits import PrefixHit
from pagedkv.space.matching import match_prompt
from pagedkv.space.prompts import prepare_prompt
from pagedkv.space.space_view import SpaceView
from pagedkv.space.tenant_changes import remove_tenant, require_limits, require_removable, set_tenant

__all__ = ["TenantMethods"]


class TenantMethods(SpaceView):
    """The part of a block space that names tenants beside its operations."""

    def exceeds_cap(  # noqa: PLR0913 - what allocate takes, by the same keywords
        self,
        token_ids: TokenIds,
        *,
        tenant: str | None,
        keys: RequestKeys = NO_KEYS,
        num_lookahead: int = 0,
        num_sequences: int = 1,
        match: PrefixHit | None = None,
    ) -> bool:
        """Return whether a prompt needs more blocks of some pool than its tenant's cap leaves now. Changes nothing.

        Then it waits for its own tenant's sequences alone, however many blocks are free. False without tenants.

        Args:
            token_ids, tenant, keys, num_sequences, match: as in :meth:`can_allocate`.
            num_lookahead: slots reserved beyond the tokens. They may exceed ``max_tokens``, since a scheduler counts
                those of other sequences of the tenant too.

        Raises: as :meth:`can_allocate`.
        """
        reserve = as_count(num_lookahead, "num_lookahead")
        prompt = prepare_prompt(self._state, token_ids, keys, None, 0)
        num_rows = as_count(num_sequences, "num_sequences", least=1)
        number = self._state.room.number_of(tenant)
        if not self._state.room.names:
            return False
        admission = Admission(prompt, reserve, num_rows, len(prompt.tokens), tenant=number)
        needed = free_blocks_needed(self._state, admission, match_prompt(self._state, prompt, match))
        return any(needed[share.pool] > share.cap - share.num_taken for share in self._state.room.shares_of(number))

    def tenant_shares(self, tenant: str | None) -> tuple[TenantShare, ...]:
        """Return what a tenant has of each device pool; empty if tenants are not distinguished. O(pools).

        Raises:
            ConfigurationError: there is no such tenant.
        """
        room = self._state.room
        return room.shares_of(room.number_of(tenant))

    def most_blocks(self, tenant: str | None = None) -> dict[str, int]:
        """Count, by device pool, the blocks that a tenant could have at most. O(pools).

        These are its cap, or what the floors of other tenants leave of the pool; without tenants the whole pool.

        Raises:
            ConfigurationError: there is no such tenant.
        """
        room = self._state.room
        return room.most_blocks(room.number_of(tenant))

    def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Add a tenant, or change the limits of one. Its blocks stay charged to it.

        Below a lower cap its own cached blocks are evicted. A floor holds from now on; where other tenants have taken
        too much, it is kept as they free their blocks.

        Raises:
            ConfigurationError: the space does not distinguish tenants (``SpaceConfig.tenants`` is None); limits that
                the pools cannot keep; a cap below what its sequences use. Nothing is changed.

        Cost: O(evicted blocks); for a new tenant one array of 16 bytes a block grows.
        """
        by_pool = require_limits(self._state, name, limits)
        self._state.version += 1
        set_tenant(self._state, name, limits, by_pool)

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant that has no sequences. Its cached blocks are charged to the unnamed tenant, and can be hit.

        So are blocks that it took and that sequences of other tenants, or loads, still use.

        Raises:
            ConfigurationError: there is no such tenant, or sequences of it run or are swapped out. Nothing is changed.

        Cost: O(blocks).
        """
        require_removable(self._state, name)
        self._state.version += 1
        remove_tenant(self._state, name)
