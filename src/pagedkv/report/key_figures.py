"""The summary figures of a run, and the formats of all numbers.

Formats of numbers: each quantity has one, used in tables, tiles and differences alike.

Units and rounding are defined here.

The summary figures of a run: how each is read, how it is written, and whether higher is better.

Tiles and the comparison are made of them. They depend on the documents, not on pages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from pagedkv.report.captions import FIGURES, Caption
from pagedkv.report.documents import Pool, ReportRun, has_known_content

__all__ = [
    "COUNT",
    "GIB",
    "KEY_FIGURES",
    "MEAN",
    "NONE",
    "RATIO",
    "SECONDS",
    "Better",
    "KeyFigure",
    "Unit",
    "compact",
    "edge",
    "level_nbytes",
    "pool_balance",
    "rate",
    "relative",
]
NONE: Final = "none"
"""Shown in place of a missing value; screen readers can read it."""
NBYTES_OF_GIB: Final = 2**30
MANY_SECONDS: Final = 100
MILLI: Final = 1e-3
FEW_PER_S: Final = 10
PREFIXES: Final = (("T", 1e12), ("G", 1e9), ("M", 1e6))
LARGEST_PREFIXED: Final = 1e15


@dataclass(frozen=True, slots=True)
class Unit:
    """A format for a quantity.

    Args:
        write: formats a value.
        write_size: formats the size of a difference, without its sign.
    """

    write: Callable[[float], str]
    write_size: Callable[[float], str]

    def text(self, value: float | None) -> str:
        """Format a value; ``NONE`` without one.

        >>> COUNT.text(1234567), RATIO.text(0.1842), SECONDS.text(0.0125), SECONDS.text(None)
        ('1,234,567', '18.42%', '12.5 ms', 'none')
        """
        return NONE if value is None else self.write(value)

    def difference(self, difference: float) -> str:
        """Format a difference with its sign.

        >>> COUNT.difference(-3), RATIO.difference(0.0125), SECONDS.difference(1.5), COUNT.difference(0)
        ('-3', '+1.25 points', '+1.50 s', '0')
        """
        return f"{'+' if difference > 0 else '-' if difference < 0 else ''}{self.write_size(abs(difference))}"


def relative(difference: float, first: float) -> str:
    """Format a difference as a share of the first value; empty if that value is 0.

    >>> relative(5, 20), relative(5, 0)
    ('+25.0%', '')
    """
    return f"{difference / first:+,.1%}" if first else ""


def rate(per_s: float) -> str:
    """Format a number a second: as a whole number, unless it is small.

    >>> rate(12345.6), rate(0.152), rate(0)
    ('12,346', '0.15', '0')
    """
    return f"{per_s:,.0f}" if per_s >= FEW_PER_S else f"{per_s:.2g}"


def compact(value: float) -> str:
    """Format a number in little space, for an axis.

    >>> compact(0.25), compact(250_000), compact(2_500_000), compact(1e20)
    ('0.25', '250,000', '2.5M', '1e+20')
    """
    if abs(value) >= LARGEST_PREFIXED:
        return f"{value:.3g}"
    for prefix, scale in PREFIXES:
        if abs(value) >= scale:
            return f"{value / scale:g}{prefix}"
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def edge(upper_s: float | None, lower_s: float | None) -> str:
    """Format the bucket of ages from above ``lower_s`` up to ``upper_s`` seconds.

    >>> edge(0, None), edge(5, 2), edge(None, 10000)
    ('0', '2-5', '> 10,000')
    """
    if upper_s is None:
        return f"> {lower_s or 0:,g}"
    return f"{upper_s:,g}" if lower_s is None else f"{lower_s:,g}-{upper_s:,g}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else f"{value:,}"


def _seconds(value: float) -> str:
    if value >= MANY_SECONDS:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= MILLI:
        return f"{value / MILLI:.1f} ms"
    return f"{value / MILLI**2:.0f} us" if value else "0 s"


def _gib(nbytes: float) -> str:
    return f"{nbytes / NBYTES_OF_GIB:,.2f} GiB"


COUNT: Final = Unit(_count, _count)
MEAN: Final = Unit(lambda value: f"{value:,.1f}", lambda value: f"{value:,.1f}")
RATIO: Final = Unit(lambda value: f"{value:.2%}", lambda value: f"{100 * value:,.2f} points")
SECONDS: Final = Unit(_seconds, _seconds)
GIB: Final = Unit(_gib, _gib)


class Better(Enum):
    """The direction in which a figure improves."""

    MORE = 1
    LESS = -1
    NEITHER = 0


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One figure of a run.

    Args:
        key: key of its caption.
        unit: formats it.
        value: reads it from a run; None if the run has none.
        better: the direction in which it improves, other things being equal; neither for blocks, whose size may differ.
        in_tiles: whether it is shown at the top of the page of one run.
    """

    key: str
    unit: Unit
    value: Callable[[ReportRun], float | None]
    better: Better = Better.NEITHER
    in_tiles: bool = False

    @property
    def caption(self) -> Caption:
        """Its title and sentence."""
        return FIGURES[self.key]

    def verdict(self, difference: float) -> str:
        """Return whether a difference to another run is "better", "worse", or neither: an empty text."""
        judged = difference * self.better.value
        return "better" if judged > 0 else "worse" if judged < 0 else ""


def level_nbytes(pool: Pool, num_blocks: float | None) -> float | None:
    """Bytes of a number of a pool's blocks; None if either is unknown."""
    nbytes = pool["block_nbytes"]
    return None if nbytes is None or num_blocks is None else nbytes * num_blocks


def _total(parts: list[float | None]) -> float | None:
    """Sum values; None if any of them is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if parts and len(known) == len(parts) else None


def _pools(run: ReportRun) -> list[Pool]:
    return list(run.replay["pools"].values())


def _num_evictions(run: ReportRun) -> int:
    return sum(pool["num_evictions"] for pool in _pools(run))


def _never_reused(run: ReportRun) -> float | None:
    num_evictions = _num_evictions(run)
    if not num_evictions or not has_known_content(run.replay):
        return None
    return sum(pool["num_never_reused"] for pool in _pools(run)) / num_evictions


def _preemptions(run: ReportRun) -> int:
    return run.replay["preemptions"]["num_recompute"] + run.replay["preemptions"]["num_swap"]


def _swapped(run: ReportRun) -> int:
    preemptions = run.replay["preemptions"]
    return preemptions["num_swapped_out_blocks"] + preemptions["num_swapped_in_blocks"]


KEY_FIGURES: Final = (
    KeyFigure("num_requests", COUNT, lambda run: run.replay["requests"]["num_requests"], in_tiles=True),
    KeyFigure("num_rejected", COUNT, lambda run: run.replay["requests"]["num_rejected"], Better.LESS),
    KeyFigure("token_hit_ratio", RATIO, lambda run: run.replay["hits"]["token_hit_ratio"], Better.MORE, in_tiles=True),
    KeyFigure("block_hit_ratio", RATIO, lambda run: run.replay["hits"]["block_hit_ratio"], Better.MORE, in_tiles=True),
    KeyFigure("waste", RATIO, lambda run: run.replay["waste"]["mean"], Better.LESS, in_tiles=True),
    KeyFigure(
        "first_token_p99",
        SECONDS,
        lambda run: run.replay["latency"]["first_token_s"]["p99"],
        Better.LESS,
        in_tiles=True,
    ),
    KeyFigure("first_token_mean", SECONDS, lambda run: run.replay["latency"]["first_token_s"]["mean"], Better.LESS),
    KeyFigure("queueing_p99", SECONDS, lambda run: run.replay["latency"]["queueing_s"]["p99"], Better.LESS),
    KeyFigure("request_p99", SECONDS, lambda run: run.replay["latency"]["request_s"]["p99"], Better.LESS),
    KeyFigure("preemptions", COUNT, _preemptions, Better.LESS, in_tiles=True),
    KeyFigure("recomputed", COUNT, lambda run: run.replay["preemptions"]["num_recomputed_tokens"], Better.LESS),
    KeyFigure("swapped", COUNT, _swapped),
    KeyFigure("peak_live", COUNT, lambda run: _total([p["num_live"]["peak"] for p in _pools(run)]), in_tiles=True),
    KeyFigure(
        "peak_live_nbytes",
        GIB,
        lambda run: _total([level_nbytes(pool, pool["num_live"]["peak"]) for pool in _pools(run)]),
        in_tiles=True,
    ),
    KeyFigure("evictions", COUNT, _num_evictions),
    KeyFigure("never_reused", RATIO, _never_reused),
    KeyFigure("mean_saving", RATIO, lambda run: run.replay["sharing"]["mean_saving"], Better.MORE, in_tiles=True),
    KeyFigure("mean_sequences", MEAN, lambda run: run.replay["steps"]["mean_sequences"]),
    KeyFigure("virtual_s", SECONDS, lambda run: run.replay["steps"]["virtual_s"], Better.LESS),
)
"""In the order of display. Tiles leave out optional figures (GiB, sharing) that the run does not have."""


FULL: Final = 0.9
IDLE: Final = 0.5
"""Shares of a pool that are live at its peak: from ``FULL`` on it is short of blocks, up to ``IDLE`` it has too
many."""


def pool_balance(pools: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe a pool that was full while another was idle; an empty text if there is none.

    Cached blocks count as idle only in the pool that is not full: they serve no running request.
    """
    peaks = {name: pool["num_live"]["peak"] or 0 for name, pool in pools.items()}
    shares = {name: peaks[name] / max(1, pool["num_blocks"]) for name, pool in pools.items()}
    if not shares:
        return ""
    full = max(shares, key=lambda name: shares[name])
    idle = min(shares, key=lambda name: shares[name])
    if shares[full] < FULL or shares[idle] > IDLE:
        return ""
    blocks = ",".join(f"{name}={pool['num_blocks'] + 1}" for name, pool in pools.items())
    return (
        f"Pool {full} was {shares[full]:.0%} live at its peak, {idle} {shares[idle]:.0%}: to move memory from one to "
        f"the other, give each its own number, now `num_blocks={blocks}`"
    )
