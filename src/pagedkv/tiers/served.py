"""ServedTier: a tier for loads and offers, with its counts; the loads of one request; and the reports of both.

Reports are values for outputs, explanations and metrics. ``ComputeRate`` is the measured rate of computing tokens,
which a load has to beat.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, final

import numpy as np
import numpy.typing as npt

from pagedkv.tiers.core import StoreStatistics
from pagedkv.tiers.identity import Run, RunChain
from pagedkv.tiers.specs import LoadRule
from pagedkv.tiers.store import Load


class TierCause(StrEnum):
    """Why content of a tier was or was not loaded."""

    LOADED = "loaded"
    FASTER = "computing was faster"
    TOO_SLOW = "too slow"
    CORRUPT = "corrupt"
    GONE = "gone"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    OUT_OF_SERVICE = "out of service"
    NO_BLOCKS = "no free blocks"
    GAVE_WAY = "gave way to running requests"


@dataclass(frozen=True, slots=True)
class TierNote:
    """Tokens of a prompt that a tier had, or could have had, and whether they were loaded.

    Args:
        tier: name of the tier.
        start, end: positions ``[start, end)``; both 0 if the tier was out of service and so was not looked up.
        cause: loaded, or why not.
        seconds: time that the request waited for them; 0.0 if it did not.
    """

    tier: str
    start: int
    end: int
    cause: TierCause
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.end:
            return f"tier {self.tier}: {self.cause}"
        waited = f" after {self.seconds:.3g} s" if self.seconds else ""
        return f"tokens {self.start:,} to {self.end:,} were in tier {self.tier}: {self.cause}{waited}"


@dataclass(frozen=True, slots=True)
class LoadUnderWay:
    """A load from a tier that is under way.

    Args:
        tier: name of the tier.
        start, end: positions ``[start, end)`` of the tokens.
        num_requests: requests that wait for them.
    """

    tier: str
    start: int
    end: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One tier at one moment; counts are since the engine was built.

    Args:
        name, medium: which tier.
        num_loads: loads with entries of this tier.
        num_loaded_tokens: tokens loaded from it.
        num_hit_tokens: of these, tokens that were then hit by a request that had waited for them: the sum of
            ``RequestOutput.num_loaded_tokens`` of this medium over all requests.
        not_loaded: tokens that it had and that were not loaded, by cause.
        num_offered_runs: entries that were offered to it.
        store: its store. New weights begin another store.
    """

    name: str
    medium: str
    num_loads: int
    num_loaded_tokens: int
    num_hit_tokens: int
    not_loaded: Mapping[TierCause, int]
    num_offered_runs: int
    store: StoreStatistics

    @property
    def num_unused_tokens(self) -> int:
        """Tokens loaded from it that no request has hit of those that waited for them."""
        return self.num_loaded_tokens - self.num_hit_tokens


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
        stores_victims: whether it gets what is about to be evicted, not what was computed.

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

    def __init__(  # noqa: PLR0913 - a tier, as it is configured
        self,
        name: str,
        medium: str,
        loads: LoadRule,
        deadline_s: float,
        store: RunStore,
        *,
        stores_victims: bool = False,
    ) -> None:
        self.name = name
        self.medium = medium
        self.loads = loads
        self.deadline_s = deadline_s
        self.store = store
        self.stores_victims = stores_victims
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


@dataclass(slots=True, eq=False)
class RequestLoads:
    """The loads from tiers for one request so far.

    Args:
        chain: its runs.
        num_waits: loads that it waited for since its last admission.
        notes: a note for each range of tokens that tiers had: loaded, or why not.
        brought: tiers with the positions ``[start, end)`` that loads brought for it since its last admission.
        admitted_with: tiers with their tokens of the hit of its last admission.
        num_hit_tokens: tokens of its hits that tiers brought for it, by medium.
        num_hit_before: tokens of its hits before its last admission, by its receipt.
    """

    chain: RunChain
    num_waits: int = 0
    notes: list[TierNote] = field(default_factory=list)
    brought: list[tuple[ServedTier, int, int]] = field(default_factory=list)
    admitted_with: list[tuple[ServedTier, int]] = field(default_factory=list)
    num_hit_tokens: dict[str, int] = field(default_factory=dict)
    num_hit_before: int = 0

    def admitted(self, num_hit_tokens: int) -> None:
        """Note the tokens of the request's hit that each tier brought for it, and reset the counts of loads.

        Each token counts once. A later load begins where the hit on the device ended, so what earlier loads brought
        from there on had been evicted again.
        """
        self.admitted_with, limit = [], num_hit_tokens
        for tier, start, end in reversed(self.brought):
            if min(end, limit) > start:
                self.admitted_with.append((tier, min(end, limit) - start))
            limit = min(limit, start)
        self.admitted_with.reverse()
        self.brought.clear()
        self.num_waits = 0

    def computed(self) -> None:
        """Count the hit of the last admission, once a step that relies on it has been acknowledged."""
        for tier, count in self.admitted_with:
            tier.num_hit_tokens += count
            self.num_hit_tokens[tier.medium] = self.num_hit_tokens.get(tier.medium, 0) + count
        self.admitted_with.clear()


KEEPS: Final = 0.9
"""Weight of the past at each new step."""
FEWEST_TOKENS: Final = 8
"""A step with fewer prompt tokens takes as long as a step without, so its time is no measure of them."""


@final
class ComputeRate:
    """Seconds a token of a prompt, from the steps so far, the latest weighing most."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0

    def note(self, num_prefilled: int, num_tokens: int, seconds: float) -> None:
        """Note a step.

        Args:
            num_prefilled: tokens of prompts that it computed; num_tokens: all that it computed.
            seconds: how long it took.
        """
        if num_prefilled >= FEWEST_TOKENS:
            self._num_tokens = KEEPS * self._num_tokens + num_prefilled
            self._seconds = KEEPS * self._seconds + seconds * num_prefilled / num_tokens

    def predict_s(self, num_tokens: int) -> float | None:
        """Predict the seconds to compute so many tokens; None before the first step with a prompt."""
        return num_tokens * self._seconds / self._num_tokens if self._num_tokens else None
