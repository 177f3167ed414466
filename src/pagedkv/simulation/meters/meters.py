"""All meters together: they receive reports from the clock, and the result is made from them."""

from typing import Final

import numpy as np

from pagedkv.contract.miss_causes import Miss
from pagedkv.scheduling import Admission, Batch, Progress, Request
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.meters.latencies import LatencyMeter
from pagedkv.simulation.meters.misses import MissMeter
from pagedkv.simulation.meters.occupancy import Level, Occupancy
from pagedkv.simulation.meters.sharing import Branches, SharingMeter
from pagedkv.simulation.meters.timeline import Timeline
from pagedkv.simulation.meters.waste import WasteMeter
from pagedkv.simulation.request_log import RequestLog
from pagedkv.simulation.request_timings import RequestTimings
from pagedkv.simulation.running_rows import RunningRows
from pagedkv.simulation.space_watch import SpaceWatch
from pagedkv.simulation.step_work import StepWork
from pagedkv.space import BlockSpace

__all__ = ["COUNTS", "LEVELS", "POOL_LEVELS", "Meters"]

POOL_LEVELS: Final = ("num_live", "num_cached", "num_free")
LEVELS: Final = ("num_running", "num_waiting", "num_swapped", "num_sequences")
COUNTS: Final = ("num_preemptions", "num_computed_tokens", "num_hit_tokens", "num_prompt_tokens")


class Meters:
    """Measures all figures of one replay.

    Args:
        config: the configuration.
        space: the block space of the replay.
        watch: observes the space.
        log: records every request, for figures by parts of the trace; None: no log.
    """

    def __init__(
        self, config: ServingConfig, space: BlockSpace, watch: SpaceWatch, log: RequestLog | None = None
    ) -> None:
        self._log = log
        first = config.group_specs[0]
        self._space = space
        self._watch = watch
        self._first_pool = first.pool
        self._block_size = first.block_size
        pools = list(space.config.pool_names)
        self.num_usable = {pool: count - 1 for pool, count in space.config.blocks_by_pool().items()}
        self.history = watch.history
        self.timings = RequestTimings()
        self.occupancy = {pool: Occupancy() for pool in pools}
        self.waste = WasteMeter(first.block_size, config.max_length)
        self.sharing = SharingMeter(space.config.blocks_by_pool()[first.pool])
        self.latencies = LatencyMeter()
        self.timeline = Timeline([*LEVELS, *(f"{level} {pool}" for pool in pools for level in POOL_LEVELS)], COUNTS)
        self.misses = MissMeter()
        self.sequences = Level()
        self.num_requests = self.num_with_content = self.num_rejected = self.num_finished = 0
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_prompt_blocks = self.num_hit_blocks = self.num_hit_tokens = 0
        self.num_steps = self.num_decode_steps = self.num_computed_tokens = 0
        self.busy_s = 0.0
        self.num_recompute = self.num_swap = self.num_recomputed_tokens = 0
        self.num_swapped_out_blocks = self.num_swapped_in_blocks = 0
        self._since_step = dict.fromkeys(COUNTS, 0)

    @property
    def uses_rows(self) -> bool:
        """Whether the running rows are used."""
        return True

    # Requests

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Count a request, by whether its content is known."""
        if self._log is not None:
            self._log.arrived(request, arrival_s, has_content=has_content, tenant=tenant)
        self.num_requests += 1
        self.num_with_content += has_content
        self.waste.note_length(request.most_tokens)
        self.timings.begin(request, arrival_s)

    def rejected(self, request: Request) -> None:
        """Count a request that cannot be served."""
        self.num_rejected += 1
        self.timings.end(request)

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Record admitted, preempted and rejected requests."""
        if self._log is not None:
            self._log.scheduled(batch, now_s)
        for admission, misses in zip(batch.admitted, self._watch.take_misses(), strict=True):
            self._admitted(admission, misses, now_s)
        for preempted in batch.preempted:
            self._since_step["num_preemptions"] += 1
            if preempted.kind == "swap":
                self.num_swap += 1
            else:
                self.num_recompute += 1
                self.timings.preempted(preempted.request, preempted.num_computed_tokens)
        for request in batch.rejected:
            self.rejected(request)

    def _admitted(self, admission: Admission, misses: tuple[Miss, ...], now_s: float) -> None:
        """Record an admission; only the hits and the misses of a request's first one count."""
        request, num_hit_tokens = admission.request, admission.num_hit_tokens
        timing = self.timings[request]
        if timing.is_admitted:
            return
        timing.is_admitted = True
        self.latencies.queueing_s.append(now_s - timing.arrival_s)
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_prompt_blocks += (request.num_prompt_tokens - 1) // self._block_size
        self.num_hit_tokens += num_hit_tokens
        self.num_hit_blocks += num_hit_tokens // self._block_size
        self.misses.note(misses)
        self._since_step["num_hit_tokens"] += num_hit_tokens
        self._since_step["num_prompt_tokens"] += request.num_prompt_tokens

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record requests that got their first token, or all tokens."""
        if self._log is not None:
            self._log.progressed(progress, end_s)
        for request in progress.first_tokens:
            timing = self.timings[request]
            if not timing.has_first_token:
                timing.has_first_token = True
                self.latencies.first_token_s.append(end_s - timing.arrival_s)
        for request in progress.finished:
            self.num_finished += 1
            self.num_output_tokens += request.max_new_tokens * request.num_sequences
            self.latencies.request_s.append(end_s - self.timings.end(request).arrival_s)

    # Steps

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        """Measure the work of a planned step."""
        self.num_steps += 1
        self.sequences.hold(len(running.rows), 1.0)
        self.num_computed_tokens += work.num_new_tokens
        self.num_recomputed_tokens += self.timings.num_recomputed_tokens(batch)
        self.num_swapped_out_blocks += work.num_swapped_out_blocks
        self.num_swapped_in_blocks += work.num_swapped_in_blocks
        self._since_step["num_computed_tokens"] += work.num_new_tokens
        if batch.decoding is not None:
            self.num_decode_steps += 1
            self._measure_decode(running)

    def stepped(self, step_s: float) -> None:
        """Count the seconds of a step."""
        self.busy_s += step_s

    def _measure_decode(self, running: RunningRows) -> None:
        lengths = self._space.lengths(running.rows)
        num_live = self._space.num_live_blocks(self._first_pool)
        if not running.has_branches:
            self.waste.measure(lengths, running, num_live, lengths)
            return
        table = self._space.block_table()
        num_blocks = self._space.num_blocks(running.rows)
        _, first = np.unique(table[running.rows, num_blocks - 1], return_index=True)
        self.waste.measure(lengths, running, num_live, lengths[first])
        branches = np.repeat(running.num_rows > 1, running.num_rows)
        num_rows = running.num_rows[running.num_rows > 1]
        self.sharing.measure(Branches(table, running.rows[branches], num_blocks[branches], num_rows))

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:
        """Add a duration in which the present state lasts."""
        levels = [len(running.num_rows), num_waiting, num_swapped, len(running.rows)]
        for pool, occupancy in self.occupancy.items():
            num_cached = self._space.num_cached_blocks(pool)
            blocks = self._space.num_live_blocks(pool), num_cached, self._space.num_free_blocks(pool) - num_cached
            occupancy.hold(*blocks, duration_s)
            levels += blocks
        self.timeline.hold(duration_s, levels, list(self._since_step.values()))
        self._since_step = dict.fromkeys(COUNTS, 0)
