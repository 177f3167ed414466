"""One tier of an engine: what its user wrote, its store, and what was counted of it."""

import logging
from dataclasses import replace
from typing import Final, final

from pagedkv.tiers import BreakerState, HostMemory, Identity, SharedStore, Tier
from pagedkv.tiers.served import ServedTier
from pagedkv.tiers.tier_events import MOST_TIER_EVENTS

__all__ = ["LOG", "OpenTier"]

LOG: Final = logging.getLogger("pagedkv.tiers")
RENEWED_WITHIN_S: Final = 1.0
"""Longest wait for writes under the old weights, while the engine's thread waits for new stores."""


@final
class OpenTier(ServedTier):
    """A tier and its counts. The driving thread changes it.

    Args:
        spec: as its user wrote it.
        identity: of the content.
        entry_nbytes: about the bytes of an entry.
        memory: host memory for what is read; None: plain memory.
        records_events: whether the store records events of its entries, to be drained.

    Attributes:
        store: the store of the present identity.

    Raises:
        ConfigurationError: the medium does not answer; the message states what was tried.
    """

    store: SharedStore

    def __init__(
        self,
        spec: Tier,
        identity: Identity,
        entry_nbytes: int,
        memory: HostMemory | None = None,
        *,
        records_events: bool = False,
    ) -> None:
        self.spec = spec
        self._memory = memory
        config = spec.store_config(entry_nbytes)
        most = min(2**31 - 1, config.max_entries + MOST_TIER_EVENTS)
        self._config = replace(config, max_events=most) if records_events else config
        super().__init__(spec.name, spec.medium, spec.loads, spec.deadline_s, self._opened(identity))
        self._was_out = False
        self._num_lost = 0

    def _opened(self, identity: Identity) -> SharedStore:
        body = self.spec.open_body(identity.fingerprint, self._memory)
        try:
            rescan_s = self.spec.rescan_s or None
            return SharedStore(body, identity, self._config, secret=self.spec.secret, rescan_s=rescan_s)
        except BaseException:
            body.close()
            raise

    def renew(self, identity: Identity) -> None:
        """Exchange the store for one of another identity. Raises ConfigurationError; the old one is closed anyway."""
        self.store.close(RENEWED_WITHIN_S)
        self.num_dropped += self.store.num_lost
        self.store = self._opened(identity)

    def take_num_lost(self) -> int:
        """Return how much was to be stored since the last call and was not."""
        num_before, self._num_lost = self._num_lost, self.num_dropped + self.store.num_lost
        return self._num_lost - num_before

    def log_outage(self) -> None:
        """Log one line when the tier goes out of service, and one when it is back: when a call has succeeded."""
        breaker = self.store.breaker
        is_out = breaker is BreakerState.OPEN or (self._was_out and breaker is BreakerState.PROBING)
        if is_out != self._was_out:
            self._was_out = is_out
            if is_out:
                LOG.warning(
                    "tier %s is out of service, its content is computed instead: %s", self.name, self.store.last_problem
                )
            else:
                LOG.warning("tier %s is in service again", self.name)
