"""Steadiness: whether a load can be sustained, or only fills a queue that is drained afterwards.

The end of a run shows little: all requests are answered at some time, and a trace of half a second is drained at full
speed. So the first quarter of the arrivals' time is a warm-up, which is not measured. The requests that arrive in the
other three quarters are measured. These quarters must last long enough, and the queue of requests that wait for their
first token must not grow from the third quarter to the fourth. A load holds if, in addition, nine of ten measured
requests are within the bounds.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Float64Array
from pagedkv.simulation.planning.bounds import Bounds
from pagedkv.simulation.request_log import RequestLog

__all__ = ["FAILS", "GOOD_SHARE", "HOLDS", "LEAST_MEASURED_S", "TOO_SHORT", "Steadiness", "steadiness_of"]

HOLDS: Final = "holds"
FAILS: Final = "fails"
TOO_SHORT: Final = "too short"

WARM_UP: Final = 0.25
"""Share of the time in which requests arrive."""
LEAST_MEASURED_S: Final = 30.0
LEAST_ANSWERS: Final = 3.0
"""The measured time is at least this number of median answers, from the first token to the last."""
LEAST_REQUESTS: Final = 50
GOOD_SHARE: Final = 0.9
"""Share of the measured requests that must be within the bounds."""
MOST_GROWTH: Final = 1.25
LEAST_GROWTH: Final = 1.0
LEAST_GROWTH_SHARE: Final = 0.01
"""A queue grows if it is this many times as long a quarter later, and longer by more than a request, and by more than
this share of that quarter's arrivals: a hundredth of the traffic is not served."""


@dataclass(frozen=True, slots=True)
class Steadiness:
    """Whether a load holds, and the causes if it does not.

    Args:
        verdict: "holds", "fails" or, if the trace does not suffice, "too short".
        binds: the causes of a failure: "queue", "ttft", "tpot", "rejected"; empty if the load holds or the trace is
            too short.
        warm_up_s, measured_s, least_s: seconds of arrivals that are not measured, that are measured, and that are
            required.
        num_measured: requests that arrive after the warm-up.
        num_good: measured requests within the bounds; without bounds, all finished ones.
        num_good_prompt_tokens, num_good_output_tokens: tokens of good ones.
        num_late, num_slow, num_rejected: requests that begin too late, decode too slowly, are not served.
        ttft_s, tpot_s: the times within which nine of ten measured requests are; None if fewer have one.
        num_waiting: mean number of requests that wait for a first token, in the third and in the fourth quarter.
    """

    verdict: str
    binds: tuple[str, ...]
    warm_up_s: float
    measured_s: float
    least_s: float
    num_measured: int
    num_good: int
    num_good_prompt_tokens: int
    num_good_output_tokens: int
    num_late: int
    num_slow: int
    num_rejected: int
    ttft_s: float | None
    tpot_s: float | None
    num_waiting: tuple[float, float]

    @property
    def good_per_s(self) -> float:
        """Good measured requests a second, by their arrivals: the sustained traffic, if the load holds."""
        return self.num_good / self.measured_s if self.measured_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; :meth:`from_dict` reads them back."""
        return {**asdict(self), "binds": list(self.binds), "num_waiting": list(self.num_waiting)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Steadiness":
        """Read the result of :meth:`as_dict`. Raises KeyError and TypeError for anything else."""
        known = {name: values[name] for name in cls.__slots__}
        third, fourth = values["num_waiting"]
        return cls(**known | {"binds": tuple(values["binds"]), "num_waiting": (third, fourth)})


def steadiness_of(log: RequestLog, bounds: Bounds) -> Steadiness:
    """Compute the steadiness of a finished run. O(requests log requests)."""
    arrival_s = log.arrival_s
    start_s, end_s = (float(arrival_s[0]), float(arrival_s[-1])) if len(arrival_s) else (0.0, 0.0)
    offered_s = end_s - start_s
    begin_s = start_s + WARM_UP * offered_s
    is_measured = arrival_s >= begin_s
    num_measured = int(is_measured.sum()) if offered_s else 0
    ttft_s, tpot_s = _times(log)
    ttft_s, tpot_s = ttft_s[is_measured], tpot_s[is_measured]
    is_rejected = np.isnan(ttft_s)
    is_late = np.zeros_like(is_rejected) if bounds.ttft_s is None else ttft_s > bounds.ttft_s
    is_slow = np.zeros_like(is_rejected) if bounds.tpot_s is None else tpot_s > bounds.tpot_s
    num_late, num_slow, num_rejected = (int(each.sum()) for each in (is_late, is_slow, is_rejected))
    is_good = ~(is_late | is_slow | is_rejected)
    num_good = int(is_good.sum())
    prompts, outputs, sequences = (
        log.counts(name)[is_measured][is_good].astype(np.int64)
        for name in ("num_prompt_tokens", "num_output_tokens", "num_sequences")
    )
    waiting = _mean_waiting(log, (start_s + offered_s / 2, start_s + 0.75 * offered_s, end_s))
    least_s = max(LEAST_MEASURED_S, LEAST_ANSWERS * _middle(log.end_s[is_measured] - log.first_token_s[is_measured]))
    measured_s = (1 - WARM_UP) * offered_s
    is_long = measured_s >= least_s and num_measured >= LEAST_REQUESTS
    num_last = int((arrival_s >= start_s + 0.75 * offered_s).sum())
    bad = {"rejected": num_rejected, "ttft": num_late, "tpot": num_slow}
    binds = (
        *(("queue",) if _grows(*waiting, num_last) else ()),
        *(_bad(bad, num_measured - num_good, num_measured)),
    )
    return Steadiness(
        verdict=TOO_SHORT if not is_long else FAILS if binds else HOLDS,
        binds=binds if is_long else (),
        warm_up_s=WARM_UP * offered_s,
        measured_s=measured_s,
        least_s=least_s,
        num_measured=num_measured,
        num_good=num_good,
        num_good_prompt_tokens=int(prompts.sum()),
        num_good_output_tokens=int((outputs * sequences).sum()),
        num_late=num_late,
        num_slow=num_slow,
        num_rejected=num_rejected,
        ttft_s=_kept(ttft_s),
        tpot_s=_kept(np.where(np.isnan(tpot_s) & ~is_rejected, 0.0, tpot_s)),
        num_waiting=waiting,
    )


def _times(log: RequestLog) -> tuple[Float64Array, Float64Array]:
    """Return the seconds to the first token and those per further token; NaN if there is none."""
    num_further = log.counts("num_output_tokens") - 1
    further_s = (log.end_s - log.first_token_s) / np.maximum(num_further, 1)
    return log.first_token_s - log.arrival_s, np.where(num_further > 0, further_s, np.nan)


def _mean_waiting(log: RequestLog, edges_s: tuple[float, float, float]) -> tuple[float, float]:
    """Return the mean number of requests that wait for a first token, in two spans of time, without rejected ones."""
    begun_s = np.where(np.isnan(log.first_token_s), log.arrival_s, log.first_token_s)
    means = []
    for from_s, to_s in pairwise(edges_s):
        within_s = np.clip(begun_s, from_s, to_s) - np.clip(log.arrival_s, from_s, to_s)
        means.append(float(within_s.sum()) / (to_s - from_s) if to_s > from_s else 0.0)
    return means[0], means[1]


def _grows(third: float, fourth: float, num_arrived: int) -> bool:
    most = max(LEAST_GROWTH, LEAST_GROWTH_SHARE * num_arrived)
    return fourth > MOST_GROWTH * third and fourth - third > most


def _bad(counts: dict[str, int], num_bad: int, num_measured: int) -> tuple[str, ...]:
    """Return the causes that make more than one in ten bad: each cause that suffices alone, else the largest."""
    allowed = (1 - GOOD_SHARE) * num_measured
    if num_bad <= allowed:
        return ()
    alone = tuple(name for name, number in counts.items() if number > allowed)
    return alone or (max(counts, key=lambda name: counts[name]),)


def _middle(seconds: Float64Array) -> float:
    known = seconds[~np.isnan(seconds)]
    return float(np.median(known)) if len(known) else 0.0


def _kept(seconds: npt.NDArray[np.float64]) -> float | None:
    """Return the least bound that nine of ten are within; NaN is within no bound."""
    if not len(seconds):
        return None
    place = int(np.ceil(round(GOOD_SHARE * len(seconds), 9))) - 1
    value = float(np.sort(seconds)[max(0, place)])
    return None if np.isnan(value) else value
