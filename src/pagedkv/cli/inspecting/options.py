"""InspectOptions: the options of the page over a replay."""

import ipaddress
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Final

import typer

from pagedkv.cli.listening import require_free
from pagedkv.errors import ConfigurationError

__all__ = ["InspectOptions", "is_loopback"]

PANEL: Final = "Page"
LARGEST_PORT: Final = 65_535
SLOWEST: Final = 1e-6
FASTEST: Final = 1e6
AS_FAST_AS_IT_CAN: Final = "max"


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """Whether and where a page shows the replay, as typed; ``pagedkv replay --help`` explains each.

    Raises:
        ConfigurationError: a value is out of range, or an option is given without ``inspect``.
    """

    inspect: Annotated[
        bool,
        typer.Option("--inspect", help="Show blocks, requests and misses on a page as it runs.", rich_help_panel=PANEL),
    ] = False
    inspect_speed: Annotated[
        str,
        typer.Option(metavar="X", help="Seconds of the trace in a second; max.", rich_help_panel=PANEL),
    ] = "1"
    inspect_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address of the page; needs a key if others reach it.", rich_help_panel=PANEL
        ),
    ] = "127.0.0.1"
    inspect_port: Annotated[
        int, typer.Option(metavar="N", help="Port of the page; 0: a free one.", rich_help_panel=PANEL)
    ] = 8001
    inspect_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="API keys, as of serve. Default: a new one, if needed.", rich_help_panel=PANEL
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse values that are invalid for every trace."""
        if not self.inspect:
            for option in fields(self):
                if getattr(self, option.name) != option.default:
                    typed = f"--{option.name.replace('_', '-')}"
                    raise ConfigurationError(f"{typed} is an option of the page: give --inspect, too")
            return
        if not 0 <= self.inspect_port <= LARGEST_PORT:
            raise ConfigurationError(f"--inspect-port must be 0 to {LARGEST_PORT}, got {self.inspect_port}")
        _speed_of(self.inspect_speed)

    @property
    def speed(self) -> float | None:
        """Seconds of the trace for each second of this machine; None: as many as it can."""
        return _speed_of(self.inspect_speed)

    def require_free(self) -> None:
        """Refuse an address at which the page cannot be served now. Raises ConfigurationError."""
        require_free(self.inspect_host, self.inspect_port, "--inspect-host", "--inspect-port")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at an address; False for names other than localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _speed_of(typed: str) -> float | None:
    """Read a speed. Raises ConfigurationError."""
    if typed == AS_FAST_AS_IT_CAN:
        return None
    try:
        speed = float(typed)
    except ValueError:
        speed = math.nan
    if not SLOWEST <= speed <= FASTEST:
        raise ConfigurationError(
            f"--inspect-speed must be {SLOWEST} to {FASTEST:,.0f} seconds of the trace in a second, or "
            f"{AS_FAST_AS_IT_CAN}, got {typed}"
        )
    return speed
