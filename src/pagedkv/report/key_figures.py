"""The summary figures of a run: how each is read, how it is written, and whether higher is better.

Tiles and the comparison are made of them. They depend on the documents, not on pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pagedkv.report.captions import FIGURES, Caption
from pagedkv.report.documents import Pool, ReportRun, has_known_content
from pagedkv.report.number_text import COUNT, GIB, MEAN, RATIO, SECONDS, Unit

__all__ = ["KEY_FIGURES", "Better", "KeyFigure", "level_nbytes"]


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
