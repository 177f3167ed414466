"""ServedTier: a tier for loads and offers: its store, its settings and its counts."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.tiering.tier_reports import TierCause, TierStatistics
from pagedkv.tiers import Load, LoadRule, Run, StoreStatistics

__all__ = ["RunStore", "ServedTier"]


class RunStore(Protocol):
    """A store of runs: :class:`~pagedkv.tiers.TierStore`, which documents the methods, or one on a virtual clock."""

    @property
    def is_out_of_service(self) -> bool:
        """Whether the circuit breaker is open."""

    @property
    def room_nbytes(self) -> int:
        """Bytes that can be offered now before offers are dropped."""

    def look_up(self, runs: Sequence[Run]) -> int:
        """Count the leading runs that can be loaded."""

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return, for each key, whether its entry can be loaded."""

    def predict_s(self, num_runs: int, nbytes: int) -> float | None:
        """Predict the seconds to load so many runs of ``nbytes`` in all; None before the first load."""

    def load(self, runs: Sequence[Run], deadline_s: float, on_done: Callable[[], None] | None = None) -> Load:
        """Begin to load the runs of a prompt, head first."""

    def cancel(self, load: Load) -> None:
        """End a load that no request waits for any more."""

    def select_for_offer(self, runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
        """Note runs that could be offered; return for each whether to offer it now."""

    def offer(self, runs: Sequence[Run], parts: Sequence[Sequence[memoryview]], *, is_noted: bool = False) -> None:
        """Offer the content of consecutive runs, head first."""

    def withdraw_keys(self, keys: Sequence[bytes]) -> int:
        """Remove content that turned out bad, and all that continues it; return the number of entries."""

    def statistics(self) -> StoreStatistics:
        """Take a snapshot."""


class ServedTier:
    """A tier and its counts.

    Args:
        name: the medium with its place.
        medium: name of the medium.
        loads: whether content is loaded always, or only if that is predicted to be faster than computing.
        deadline_s: longest time that a request waits for a load.
        store: the store of the present content.

    Attributes:
        num_loads: loads with entries of this tier.
        num_loaded_tokens: tokens loaded from it; num_hit_tokens: of these, hit by the request that waited.
        loaded_s: seconds of the loads that published tokens.
        num_loads_that_came: number of these loads.
        num_offered_runs: entries that were offered to it.
        num_dropped: sequences, or entries, that were dropped before they were offered, since there was no room or the
            tier was out of service.
        num_refused_loads: loads that were predicted to be slower than computing.
        not_loaded: tokens that it had and that were not loaded, by cause.
    """

    def __init__(self, name: str, medium: str, loads: LoadRule, deadline_s: float, store: RunStore) -> None:
        self.name = name
        self.medium = medium
        self.loads = loads
        self.deadline_s = deadline_s
        self.store = store
        self.num_loads = 0
        self.num_loaded_tokens = 0
        self.num_hit_tokens = 0
        self.loaded_s = 0.0
        self.num_loads_that_came = 0
        self.num_offered_runs = 0
        self.num_dropped = 0
        self.num_refused_loads = 0
        self.not_loaded: Counter[TierCause] = Counter()

    def statistics(self) -> TierStatistics:
        """Take a snapshot."""
        return TierStatistics(
            self.name,
            self.medium,
            self.num_loads,
            self.num_loaded_tokens,
            self.num_hit_tokens,
            dict(self.not_loaded),
            self.num_offered_runs,
            self.store.statistics(),
        )
