"""The bandwidth and latency of a tier, measured through its store: what a simulated tier takes."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.tiers import (
    GroupLayout,
    Identity,
    ModelIdentity,
    Run,
    StoreOutcome,
    Tier,
    TierStore,
    compute_check,
    runs_of,
)
from pagedkv.warming import make_ready, of_stores

__all__ = ["TierRate", "measure_tier"]

BLOCK_SIZE: Final = 16
LARGE: Final = 2**22
SMALL: Final = 2**12
MOST_LARGE: Final = 32
FEWEST_LARGE: Final = 4
NUM_SMALL: Final = 32
NUM_ROUNDS: Final = 3
PATIENCE_S: Final = 120.0
IDENTITY: Final = Identity(
    (GroupLayout("full", BLOCK_SIZE, "uint8", "NC", (BLOCK_SIZE, 1), (1, 1)),),
    ModelIdentity("calibration of a tier", bytes(32)),
)


@dataclass(frozen=True, slots=True)
class TierRate:
    """How fast a tier is.

    Args:
        name, medium: which tier.
        read_bandwidth, write_bandwidth: bytes a second of large entries, several at once, verification included.
        latency_s: median seconds to load one entry of 4 KiB alone.
        nbytes: bytes of the large entries of each round.
    """

    name: str
    medium: str
    read_bandwidth: float
    write_bandwidth: float
    latency_s: float
    nbytes: int

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def measure_tier(tier: Tier) -> TierRate:
    """Store and load entries of an identity of their own, and remove them. The best of three rounds; seconds.

    It needs room for 16 to 128 MiB, by the tier's cap; what is least recently used may be evicted for it.

    The store's loops are compiled first, since compiling would count against the deadlines.

    Raises:
        ConfigurationError: it is host memory, does not answer, has a cap below 32 MiB, or did not store or load all.
        MissingExtraError: a package that its frames need is not installed.
    """
    if tier.medium == "host":
        raise ConfigurationError(
            "host memory is not measured: its entries are read in place, and a load takes the time of the bus"
        )
    num_large = min(MOST_LARGE, tier.cap_nbytes // (2 * LARGE))
    if num_large < FEWEST_LARGE:
        raise ConfigurationError(f"a tier is measured with at least {2 * FEWEST_LARGE * LARGE:,} bytes as its cap")
    compute_check((), tier.secret)
    make_ready(of_stores(tier.eviction))
    config = replace(tier.store_config(LARGE), admission="always")
    body = tier.open_body(IDENTITY.fingerprint)
    with TierStore(body, IDENTITY, config, secret=tier.secret) as store:
        large = runs_of(range(BLOCK_SIZE * num_large), BLOCK_SIZE, 1)
        small = runs_of(range(1, BLOCK_SIZE * NUM_SMALL + 1), BLOCK_SIZE, 1)
        writes, reads, single = [], [], list[float]()
        try:
            for _ in range(NUM_ROUNDS):
                writes.append(_stored_s(tier, store, large, LARGE))
                reads.append(_loaded_s(tier, store, large))
                _stored_s(tier, store, small, SMALL)
                single += [_loaded_s(tier, store, [run]) for run in small]
                _emptied(store)
        finally:
            _emptied(store)
    nbytes = num_large * LARGE
    return TierRate(tier.name, tier.medium, nbytes / min(reads), nbytes / min(writes), median(single), nbytes)


def _stored_s(tier: Tier, store: TierStore, runs: Sequence[Run], nbytes: int) -> float:
    outcomes = Counter[StoreOutcome]()
    content = bytes(range(256)) * (nbytes // 256)
    seconds = _seconds(
        lambda: store.offer(runs, [[content]] * len(runs), lambda _, outcome: outcomes.update([outcome])),
        lambda: store.wait_until_quiet(PATIENCE_S),
    )
    num_stored = int(store.contains([run.key for run in runs]).sum())
    if num_stored < len(runs):
        why = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or store.last_problem
        raise ConfigurationError(f"tier {tier.name} stored {num_stored} of {len(runs)} entries: {why}")
    return seconds


def _loaded_s(tier: Tier, store: TierStore, runs: Sequence[Run]) -> float:
    num_loaded, cause = 0, ""

    def load() -> None:
        nonlocal num_loaded, cause
        result = store.load(runs, PATIENCE_S).wait(PATIENCE_S)
        num_loaded, cause = result.num_runs, str(result.cause)

    seconds = _seconds(load)
    if num_loaded < len(runs):
        raise ConfigurationError(f"tier {tier.name} loaded {num_loaded} of {len(runs)} entries: {cause}")
    return seconds


def _seconds(*calls: Callable[[], object]) -> float:
    begun = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begun


def _emptied(store: TierStore) -> None:
    store.reset()
    store.wait_until_quiet(PATIENCE_S)
