"""Options for tiers below the device in a simulation: their sizes, speeds, and rules of admission and loads."""

from dataclasses import dataclass
from typing import Annotated, Final, cast

import typer

from pagedkv.cli.sizes import parse_size, parse_size_with_unit
from pagedkv.errors import ConfigurationError
from pagedkv.simulation import SimulatedTier
from pagedkv.simulation.tiers.simulated_tiers import (
    DISK_BANDWIDTH,
    DISK_LATENCY_S,
    HOST_BANDWIDTH,
    HOST_LATENCY_S,
    MediumName,
)
from pagedkv.tiers import Admission, LoadRule

__all__ = ["TierOptions", "TierRates"]

TIERS: Final = "Tiers"
GB: Final = 10**9


@dataclass(frozen=True, slots=True)
class TierRates:
    """The options for the speed of tiers, and for the rule of loads, as typed."""

    host_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"Bytes a second to and from host memory. Default: {HOST_BANDWIDTH / GB:.0f}GB for each GPU of --gpu.",
            rich_help_panel=TIERS,
        ),
    ] = None
    host_latency: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help=f"Seconds of each of its copies in addition. Default: {HOST_LATENCY_S:g}.",
            rich_help_panel=TIERS,
        ),
    ] = None
    disk_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"Bytes a second to and from the disk. Default: {DISK_BANDWIDTH / GB:.0f}GB.",
            rich_help_panel=TIERS,
        ),
    ] = None
    disk_latency: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help=f"Seconds of each of its accesses in addition. Default: {DISK_LATENCY_S:g}.",
            rich_help_panel=TIERS,
        ),
    ] = None
    load_rule: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="if-faster: load where that is predicted to be faster than computing (default); always.",
            rich_help_panel=TIERS,
        ),
    ] = None


NO_RATES: Final = TierRates()


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options, as typed."""

    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Host memory that keeps cached blocks: 64GiB; 0: none.", rich_help_panel=TIERS
        ),
    ] = None
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Disk that keeps cached blocks: 1TB; 0: none.",
            rich_help_panel=TIERS,
        ),
    ] = None
    admission: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="always: tiers store all computed blocks (default); second-offer: blocks that are offered twice.",
            rich_help_panel=TIERS,
        ),
    ] = None
    rates: TierRates = NO_RATES

    def tiers(self, num_gpus: int = 1) -> tuple[SimulatedTier, ...]:
        """Return the tiers, host memory first; those of size 0 are left out.

        Args:
            num_gpus: GPUs, each with a bus of its own to host memory.

        Raises:
            ConfigurationError: a value is out of range, or belongs to a tier without a size.
        """
        pinned = (num_gpus * HOST_BANDWIDTH, HOST_LATENCY_S)
        host = self._tier("host", self.host_memory, self.rates.host_bandwidth, self.rates.host_latency, pinned)
        plain = (DISK_BANDWIDTH, DISK_LATENCY_S)
        disk = self._tier("disk", self.disk, self.rates.disk_bandwidth, self.rates.disk_latency, plain)
        if self.host_memory is None and self.disk is None and (self.admission or self.rates.load_rule):
            raise ConfigurationError("--admission and --load-rule are for tiers: give --host-memory or --disk")
        return tuple(each for each in (host, disk) if each is not None and each.nbytes)

    def _tier(
        self,
        medium: MediumName,
        size: str | None,
        bandwidth: str | None,
        latency_s: float | None,
        defaults: tuple[float, float],
    ) -> SimulatedTier | None:
        option = {"host": "--host-memory", "disk": "--disk"}[medium]
        if size is None:
            if bandwidth is not None or latency_s is not None:
                raise ConfigurationError(
                    f"--{medium}-bandwidth and --{medium}-latency are those of a tier: give {option}"
                )
            return None
        return SimulatedTier(
            medium,
            parse_size(size, option),
            defaults[0] if bandwidth is None else float(parse_size_with_unit(bandwidth, f"--{medium}-bandwidth")),
            defaults[1] if latency_s is None else latency_s,
            admission=cast("Admission", self.admission or "always"),
            loads=cast("LoadRule", self.rates.load_rule or "if-faster"),
        )
