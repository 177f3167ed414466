"""The virtual clock: requests arrive, steps take the time that the cost model says, and everything is measured.

The caller holds the loop, so that it alone decides about progress, limits and interruption::

    server = VirtualServer(config, cost_model)
    for request in trace:
        server.offer(request)
    server.finish()
    print(server.result())
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from pagedkv.errors import TraceError
from pagedkv.replay.cost import CostModel
from pagedkv.replay.request import Request, TokenizedRequest
from pagedkv.replay.serving.config import ServingConfig
from pagedkv.replay.serving.job import Job
from pagedkv.replay.serving.meters.meters import Meters
from pagedkv.replay.serving.result import ServingResult, sum_up
from pagedkv.replay.serving.scheduler import Scheduler
from pagedkv.replay.serving.step_work import StepWork, work_of
from pagedkv.replay.tokens import tokenize
from pagedkv.space import BlockSpace, SpaceStatistics

__all__ = ["VirtualServer", "compile_loops"]


class VirtualServer:
    """Serves requests on a virtual clock.

    Args:
        config: the pools and the rules.
        costs: how long steps take.

    Raises:
        ConfigurationError: the configuration cannot work.
    """

    def __init__(self, config: ServingConfig, costs: CostModel) -> None:
        self._config = config
        self._costs = costs
        self._tokens_per_block = config.tokens_per_block
        self._space = BlockSpace(config.space_config())
        self._meters = Meters(config, self._space)
        self._scheduler = Scheduler(config, self._space, self._meters)
        self._now_s = 0.0
        self._last_arrival_s = 0.0

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._now_s

    @property
    def num_requests(self) -> int:
        """Requests offered so far."""
        return self._meters.num_requests

    def run(self, requests: Iterable[Request | TokenizedRequest]) -> ServingResult:
        """Serve some requests to the end."""
        for request in requests:
            self.offer(request)
        self.finish()
        return self.result()

    def offer(self, request: Request | TokenizedRequest) -> None:
        """Let the next request arrive, after running all steps that begin before that.

        Raises:
            TraceError: it arrives before the one before it.
        """
        if request.arrival_s < self._last_arrival_s:
            raise TraceError(
                "the trace",
                None,
                f"request {self.num_requests + 1} arrives at {request.arrival_s} s, the one before it at "
                f"{self._last_arrival_s} s",
                "Sort it: pagedkv convert --sort",
            )
        self._last_arrival_s = request.arrival_s
        arrival_s = request.arrival_s / self._config.speed
        self._run_until(arrival_s)
        if self._now_s < arrival_s:
            self._hold(arrival_s - self._now_s)
            self._now_s = arrival_s
        job = self._job(request, arrival_s)
        self._meters.arrived(job)
        self._scheduler.arrive(job)

    def finish(self) -> None:
        """Run until everybody is served."""
        self._run_until(float("inf"))

    def _job(self, request: Request | TokenizedRequest, arrival_s: float) -> Job:
        number = self._meters.num_requests
        config = self._config
        return Job(
            number=number,
            priority=request.priority,
            arrival_s=arrival_s,
            num_prompt_tokens=request.input_length,
            num_output_tokens=request.output_length,
            num_sequences=config.beam_width or config.num_samples or request.num_samples,
            is_beam=config.beam_width is not None,
            load=partial(tokenize, request, number) if isinstance(request, Request) else lambda: request,
        )

    # The clock

    def _run_until(self, end_s: float) -> None:
        """Run the steps that begin before ``end_s``."""
        while self._now_s < end_s and not self._scheduler.is_idle:
            self._run_step()

    def _run_step(self) -> None:
        scheduler = self._scheduler
        plan = scheduler.plan_step(self._now_s)
        work = work_of(plan, self._tokens_per_block)
        step_s = self._step_s(work)
        self._meters.planned(
            scheduler.running_rows(), work, scheduler.num_recomputed_tokens(), decodes=scheduler.is_decode_step
        )
        self._hold(step_s)
        self._meters.busy_s += step_s
        self._now_s += step_s
        scheduler.finish_step(plan, self._now_s)

    def _step_s(self, work: StepWork) -> float:
        seconds = self._costs.step_s(
            work.num_new_tokens, work.num_attended_pairs, work.num_context_tokens, work.num_sequences
        )
        return seconds + self._costs.swap_s(work.num_swapped_tokens)

    def _hold(self, duration_s: float) -> None:
        scheduler = self._scheduler
        num_waiting, num_swapped = len(scheduler.waiting), len(scheduler.swapped)
        self._meters.hold(duration_s, scheduler.running_rows(), num_waiting, num_swapped)

    # What came out

    def statistics(self) -> SpaceStatistics:
        """Take a snapshot of the block space."""
        return self._space.statistics()

    def check(self) -> None:
        """Prove every invariant of the block space, or raise AssertionError. O(blocks + table entries)."""
        self._space.check()

    def result(self) -> ServingResult:
        """Sum up what was seen so far. Changes nothing."""
        config = {**self._config.as_dict(), "cost_model": dict(self._costs.as_dict())}
        return sum_up(self._meters, config, self._now_s, self._config.block_nbytes)


def compile_loops() -> None:
    """Serve a few tiny requests in a space that is thrown away, so that loops compile off the clock.

    They hit, evict, branch, swap and preempt: all that a replay can come upon.
    """
    config = ServingConfig(num_blocks=12, num_host_blocks=12, block_size=2, max_sequences=8, max_batched_tokens=8)
    server = VirtualServer(replace(config, preemption="swap"), CostModel())
    for number, num_samples in enumerate((1, 1, 3, 2, 1)):
        token_ids = np.arange(9, dtype=np.int32) + 100 * (number % 2)
        server.offer(TokenizedRequest(float(number // 3), token_ids[:4], token_ids[4:], None, num_samples))
    server.finish()
    server.result()
