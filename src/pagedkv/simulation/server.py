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

from pagedkv import scheduling
from pagedkv.errors import TraceError
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters.meters import Meters
from pagedkv.simulation.result import ServingResult, sum_up
from pagedkv.simulation.running_rows import RunningRows, rows_of
from pagedkv.simulation.scripted_sampler import ScriptedSampler
from pagedkv.simulation.step_work import StepWork, work_of
from pagedkv.simulation.watched_space import WatchedSpace
from pagedkv.space import SpaceStatistics
from pagedkv.traces.request import Request, TokenizedRequest
from pagedkv.traces.tokens import tokenize

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
        self._space = WatchedSpace(config.space_config())
        self._meters = Meters(config, self._space)
        self._scheduler = scheduling.Scheduler(config.scheduling_config(), self._space)
        self._sampler = ScriptedSampler(config.seed, has_beams=config.beam_width is not None)
        self._rows = rows_of([])
        self._num_changes = 0
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
        scheduled = self._scheduled_request(request)
        self._meters.arrived(scheduled, arrival_s, has_content=request.has_content)
        if not self._scheduler.add(scheduled):
            self._meters.rejected(scheduled)

    def finish(self) -> None:
        """Run until everybody is served."""
        self._run_until(float("inf"))

    def _scheduled_request(self, request: Request | TokenizedRequest) -> scheduling.Request:
        number = self._meters.num_requests
        config = self._config
        load = partial(tokenize, request, number) if isinstance(request, Request) else lambda: request
        return scheduling.Request(
            number=number,
            num_prompt_tokens=request.input_length,
            max_new_tokens=request.output_length,
            load=self._sampler.loader(number, load),
            num_sequences=config.beam_width or config.num_samples or request.num_samples,
            priority=request.priority,
        )

    # The clock

    def _run_until(self, end_s: float) -> None:
        """Run the steps that begin before ``end_s``."""
        while self._now_s < end_s and not self._scheduler.is_idle:
            self._run_step()

    def _run_step(self) -> None:
        self._space.advance(self._now_s)
        batch = self._scheduler.schedule()
        self._meters.scheduled(batch, self._now_s)
        for preempted in batch.preempted:
            if preempted.kind == "recompute":
                self._sampler.forget(preempted.request)
        work = work_of(batch.plan, self._tokens_per_block)
        step_s = self._step_s(work)
        self._meters.planned(batch, self._running_rows(), work)
        self._hold(step_s)
        self._meters.busy_s += step_s
        self._now_s += step_s
        self._finish_step(batch)

    def _finish_step(self, batch: scheduling.Batch) -> None:
        self._space.advance(self._now_s)
        token_ids, parents = self._sampler.sample(batch), self._sampler.parents(batch)
        progress = self._scheduler.finish(batch, token_ids, parents=parents)
        self._meters.progressed(progress, self._now_s)
        for request in (*progress.finished, *batch.rejected):
            self._sampler.forget(request)

    def _step_s(self, work: StepWork) -> float:
        seconds = self._costs.step_s(
            work.num_new_tokens, work.num_attended_pairs, work.num_context_tokens, work.num_sequences
        )
        return seconds + self._costs.swap_s(work.num_swapped_tokens)

    def _hold(self, duration_s: float) -> None:
        scheduler = self._scheduler
        self._meters.hold(duration_s, self._running_rows(), scheduler.num_waiting, scheduler.num_swapped)

    def _running_rows(self) -> RunningRows:
        """Give the rows of all who run, made anew only when they have changed."""
        if self._num_changes != self._scheduler.num_changes:
            self._num_changes = self._scheduler.num_changes
            self._rows = rows_of(self._scheduler.running)
        return self._rows

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
