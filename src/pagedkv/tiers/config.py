"""The settings of a store."""

from dataclasses import dataclass
from typing import Final

from pagedkv.contract.arguments import as_choice, as_count, as_number
from pagedkv.contract.errors import ConfigurationError
from pagedkv.contract.space_config import DEFAULT_EVICTION, EVICTION_POLICIES

__all__ = ["ADMISSIONS", "StoreConfig"]

ADMISSIONS: Final = ("second-offer", "always")
MOST_NBYTES: Final = 2**62
SIZES: Final = {
    "cap_nbytes": (1, MOST_NBYTES),
    "max_entries": (1, 2**31 - 2),
    "floor_nbytes": (0, MOST_NBYTES),
    "max_reads": (1, 2**16),
    "max_writes": (1, 2**16),
    "max_deletes": (1, 2**16),
    "max_queued_nbytes": (0, MOST_NBYTES),
    "breaker_failures": (1, 2**31 - 1),
    "max_events": (0, 2**31 - 1),
}
TIMES: Final = ("read_timeout_s", "write_timeout_s", "breaker_pause_s", "breaker_longest_pause_s", "full_pause_s")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The settings of a store; checked when built.

    Args:
        cap_nbytes: most bytes of entries, including those being written or deleted and foreign files of the root.
        max_entries: most entries; about 98 bytes of index each.
        floor_nbytes: bytes of the medium that stay free.
        eviction: the eviction policy, as in ``SpaceConfig.eviction``.
        admission: "second-offer" stores content that is offered a second time; "always" stores all.
        max_reads, max_writes, max_deletes: actions in flight at once.
        max_queued_nbytes: most bytes of offered content that waits; further offers are dropped.
        read_timeout_s, write_timeout_s: seconds after which an action in flight counts as failed; deletes as writes.
        breaker_failures: failures in a row that open the circuit breaker.
        breaker_pause_s, breaker_longest_pause_s: its pauses.
        full_pause_s: how long nothing is written after the medium was full.
        salt_share: most bytes of entries under one salt, as a share of ``cap_nbytes``; a salt at its share evicts its
            own entries. 1: no such cap. Content without a salt has none.
        max_events: most events kept until drained, beyond which the oldest are lost; 0: none is recorded.

    Raises:
        ConfigurationError: a setting out of range.
    """

    cap_nbytes: int
    max_entries: int
    floor_nbytes: int = 0
    eviction: str = DEFAULT_EVICTION
    admission: str = "second-offer"
    max_reads: int = 8
    max_writes: int = 4
    max_deletes: int = 16
    max_queued_nbytes: int = 256 * 2**20
    read_timeout_s: float = 2.0
    write_timeout_s: float = 10.0
    breaker_failures: int = 5
    breaker_pause_s: float = 1.0
    breaker_longest_pause_s: float = 60.0
    full_pause_s: float = 1.0
    salt_share: float = 1.0
    max_events: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            object.__setattr__(self, name, as_count(getattr(self, name), name, least=least, most=most))
        for name in TIMES:
            seconds = as_number(getattr(self, name), name)
            if seconds <= 0:
                raise ConfigurationError(f"{name} must be above 0, got {seconds}")
            object.__setattr__(self, name, seconds)
        share = as_number(self.salt_share, "salt_share")
        if not 0 < share <= 1:
            raise ConfigurationError(f"salt_share must be above 0 and at most 1, got {share}")
        object.__setattr__(self, "salt_share", share)
        as_choice(self.eviction, EVICTION_POLICIES, "eviction")
        as_choice(self.admission, ADMISSIONS, "admission")
