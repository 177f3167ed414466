"""SimulatedTier: a tier of the planner, by its size and the speed of its medium. Its entries have no content.

Defaults of a host tier are those of pinned memory behind one GPU on PCIe 5: ``benchmarks/engine/tier_copies.py`` copied
entries of eight 2 MiB blocks at 52.8 GB/s to an H100 and at 54.9 GB/s from it. Those of a disk are round figures of a
data-centre disk on PCIe 3 with four lanes, whose bus carries 3.94 GB/s; the data sheet of Samsung's PM983 has 85 us for
a random read. No disk was measured for them.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pagedkv.contract.arguments import as_choice, as_count, as_number
from pagedkv.errors import ConfigurationError
from pagedkv.tiers import Admission, HostTier, LoadRule, StoreConfig

__all__ = [
    "DISK_BANDWIDTH",
    "DISK_LATENCY_S",
    "HOST_BANDWIDTH",
    "HOST_LATENCY_S",
    "TOKEN_NBYTES",
    "MediumName",
    "SimulatedTier",
    "require_distinct",
]

MediumName: TypeAlias = Literal["host", "disk"]

MEDIA: Final = ("host", "disk")
HOST_BANDWIDTH: Final = 50e9
HOST_LATENCY_S: Final = 0.0
DISK_BANDWIDTH: Final = 3e9
DISK_LATENCY_S: Final = 1e-4
TOKEN_NBYTES: Final = 2**18
"""Bytes of a token without a model: those of the default cost model's, Qwen3 32B in 16 bits (64 layers, 8 KV heads of
128)."""
MOST_NBYTES: Final = 2**62
HOST_READS: Final = 1
"""Reads of host memory in flight: a copy engine makes one copy at a time, so each takes its own time alone."""


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """A tier on the virtual clock; its store has the settings that an engine's would have.

    Args:
        medium: "host" or "disk".
        nbytes: most bytes of entries; 0: there is no such tier.
        bandwidth: bytes a second of all reads together, and of all writes together.
        latency_s: seconds of each read and write in addition to its bytes; latencies of several in flight overlap.
        admission: "always" writes every offered entry; "second-offer" an entry that is offered for the second time.
        loads: "if-faster" loads entries if that is predicted to be faster than computing; "always" loads all entries.
        deadline_s: longest time that a request waits for a load.

    Raises:
        ConfigurationError: a value out of range.
    """

    medium: MediumName
    nbytes: int
    bandwidth: float
    latency_s: float = 0.0
    admission: Admission = "always"
    loads: LoadRule = "if-faster"
    deadline_s: float = 2.0

    def __post_init__(self) -> None:
        """Check every field."""
        as_choice(self.medium, MEDIA, "medium")
        as_count(self.nbytes, f"the size of a {self.medium} tier", most=MOST_NBYTES)
        for name, value in (("bandwidth", self.bandwidth), ("latency_s", self.latency_s)):
            _require_seconds(f"the {name} of a {self.medium} tier", value)
        if not self.bandwidth > 0:
            raise ConfigurationError(f"the bandwidth of a {self.medium} tier must be above 0, got {self.bandwidth}")
        if self.nbytes:
            self._host_tier()

    def store_config(self, entry_nbytes: int) -> StoreConfig:
        """Return the settings of its store, for entries of about ``entry_nbytes``. Raises ConfigurationError."""
        return self._host_tier().store_config(entry_nbytes)

    def as_dict(self) -> dict[str, object]:
        """Return the tier for JSON, without the name of its medium."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "medium"}

    def _host_tier(self) -> HostTier:
        settings = {"max_reads": HOST_READS} if self.medium == "host" else {}
        return HostTier(
            self.nbytes, admission=self.admission, loads=self.loads, deadline_s=self.deadline_s, settings=settings
        )


def require_distinct(tiers: tuple[SimulatedTier, ...]) -> None:
    """Refuse anything but a tuple of tiers of different media. Raises ConfigurationError."""
    if not isinstance(tiers, tuple) or not all(isinstance(each, SimulatedTier) for each in tiers):
        raise ConfigurationError(f"tiers must be a tuple of SimulatedTier, got {tiers!r}")
    media = [each.medium for each in tiers]
    if len(set(media)) < len(media):
        raise ConfigurationError(f"each medium may have one tier, got {', '.join(media)}")


def _require_seconds(what: str, value: object) -> None:
    """Refuse anything but a number from 0 on, or infinity. Raises ConfigurationError."""
    if isinstance(value, float) and value == float("inf"):
        return
    if as_number(value, what) < 0:
        raise ConfigurationError(f"{what} must not be negative, got {value}")
