"""RequestLog: the times and hits of each request, in place of all meters.

It takes 44 bytes a request. Times between tokens are counted in a histogram with bins 1 % wide, since there is one time
for every token; they are the seconds of decoding steps. A preemption is not included in them, but in the time per token
of its request.
"""

import math
from array import array
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Float64Array, Int32Array
from pagedkv.planner.traces.request import Tenants
from pagedkv.scheduling import Batch, Progress, Request, SchedulingConfig
from pagedkv.simulation.running_rows import RunningRows
from pagedkv.simulation.step_work import StepWork

__all__ = ["WAITS_FOR", "RequestLog", "StepHistogram"]

NOT_YET: Final = math.nan
SHORTEST_S: Final = 1e-7
WIDTH: Final = math.log(1.01)
NUM_BINS: Final = 3500
WAITS_FOR: Final = ("sequences", "tokens", "memory")


class StepHistogram:
    """A histogram of the seconds between tokens, exact within 1 %."""

    def __init__(self) -> None:
        self._num_tokens = np.zeros(NUM_BINS, np.int64)

    def add(self, step_s: float, num_tokens: int) -> None:
        """Count tokens that came ``step_s`` seconds after the previous ones."""
        place = int(math.log(max(step_s, SHORTEST_S) / SHORTEST_S) / WIDTH)
        self._num_tokens[min(place, NUM_BINS - 1)] += num_tokens

    def times_s(self) -> Float64Array:
        """Return the seconds of each token, ascending, within 1 %: float64 ``[tokens]``, so O(tokens) memory."""
        middles_s = SHORTEST_S * np.exp((np.arange(NUM_BINS) + 0.5) * WIDTH)
        return np.repeat(middles_s, self._num_tokens)

    def percentile_s(self, percent: float) -> float | None:
        """Return the seconds within which a percentage of the tokens came; None without tokens."""
        counted = self._num_tokens.cumsum()
        if not counted[-1]:
            return None
        place = int(np.searchsorted(counted, percent / 100 * counted[-1]))
        return SHORTEST_S * math.exp((place + 0.5) * WIDTH)


class RequestLog:
    """Records of each request, by its number.

    Args:
        limits: limits of a step; they determine what requests wait for.
        records_ended: whether the numbers of ended requests are kept for :meth:`take_ended`.

    Attributes:
        between_tokens: times between tokens.
        waited_s: seconds of steps during which requests waited for admission, by cause: "sequences" or "tokens" if the
            step was at that limit, else "memory".
        num_preemptions: number of preemptions.
        num_with_content: requests whose content is known.
        tenants: tenants by number.
        num_steps: steps so far.
        busy_s: seconds of steps so far.
    """

    def __init__(self, limits: SchedulingConfig, *, records_ended: bool = False) -> None:
        self._limits = limits
        self._records_ended = records_ended
        self._arrival_s = array("d")
        self._first_token_s = array("d")
        self._end_s = array("d")
        self._num_prompt_tokens = array("i")
        self._num_output_tokens = array("i")
        self._num_hit_tokens = array("i")
        self._num_sequences = array("i")
        self._tenant_numbers = array("i")
        self.tenants = Tenants()
        self._ended: list[int] = []
        self._num_decoded = 0
        self._waits_for = "memory"
        self.waited_s = dict.fromkeys(WAITS_FOR, 0.0)
        self.between_tokens = StepHistogram()
        self.num_preemptions = self.num_with_content = self.num_steps = 0
        self.busy_s = 0.0

    @property
    def uses_rows(self) -> bool:
        """Whether the running rows are used."""
        return False

    @property
    def num_requests(self) -> int:
        """Number of requests that have arrived."""
        return len(self._arrival_s)

    @property
    def arrival_s(self) -> Float64Array:
        """Arrival of each: float64 ``[requests]``, as are the next two; views, so only for a finished run."""
        return np.asarray(self._arrival_s)

    @property
    def first_token_s(self) -> Float64Array:
        """Time of each request's first token; NaN without one."""
        return np.asarray(self._first_token_s)

    @property
    def end_s(self) -> Float64Array:
        """Time of each request's last token; NaN without one."""
        return np.asarray(self._end_s)

    def counts(self, name: str) -> Int32Array:
        """Return num_prompt_tokens, num_output_tokens, num_hit_tokens, num_sequences or tenant_numbers.

        int32 ``[requests]``, a view.
        """
        return np.asarray(getattr(self, f"_{name}"))

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Record a request, which has only its arrival yet."""
        self.num_with_content += has_content
        self._tenant_numbers.append(self.tenants.number(tenant))
        self._arrival_s.append(arrival_s)
        self._first_token_s.append(NOT_YET)
        self._end_s.append(NOT_YET)
        self._num_prompt_tokens.append(request.num_prompt_tokens)
        self._num_output_tokens.append(request.max_new_tokens)
        self._num_hit_tokens.append(-1)
        self._num_sequences.append(request.num_sequences)

    def rejected(self, request: Request) -> None:
        """Record that a request ended without an answer."""
        self._note_ended(request)

    def _note_ended(self, request: Request) -> None:
        if self._records_ended:
            self._ended.append(request.number)

    def take_ended(self) -> list[int]:
        """Return the requests that ended since the last call, by number."""
        ended, self._ended = self._ended, []
        return ended

    def scheduled(self, batch: Batch, now_s: float) -> None:  # noqa: ARG002 - signature of all meters
        """Record the hits of first admissions, and preemptions."""
        for admission in batch.admitted:
            number = admission.request.number
            if self._num_hit_tokens[number] < 0:
                self._num_hit_tokens[number] = admission.num_hit_tokens
        self.num_preemptions += len(batch.preempted)
        for request in batch.rejected:
            self.rejected(request)

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:  # noqa: ARG002 - signature of all meters
        """Record the number of sequences that decode, and the limit that the step reaches."""
        self._num_decoded = len(batch.decoded_token_ids)
        if work.num_sequences >= self._limits.max_sequences:
            self._waits_for = "sequences"
        elif work.num_new_tokens >= self._limits.max_batched_tokens:
            self._waits_for = "tokens"
        else:
            self._waits_for = "memory"

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:  # noqa: ARG002 - signature of all meters
        """Add the time to the resource that the last planned step has used up, if any requests wait."""
        if num_waiting:
            self.waited_s[self._waits_for] += duration_s

    def stepped(self, step_s: float) -> None:
        """Record the seconds of a step."""
        self.num_steps += 1
        self.busy_s += step_s
        if self._num_decoded:
            self.between_tokens.add(step_s, self._num_decoded)

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record first and last tokens."""
        for request in progress.first_tokens:
            if math.isnan(self._first_token_s[request.number]):
                self._first_token_s[request.number] = end_s
        for request in progress.finished:
            self._end_s[request.number] = end_s
            self._note_ended(request)
