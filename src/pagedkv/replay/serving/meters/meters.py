"""All meters together: what the scheduler and the clock report to, and what the result is made of."""

from typing import Final

import numpy as np

from pagedkv.replay.serving.config import ServingConfig
from pagedkv.replay.serving.job import Job
from pagedkv.replay.serving.meters.block_history import BlockHistory
from pagedkv.replay.serving.meters.latencies import LatencyMeter
from pagedkv.replay.serving.meters.occupancy import Level, Occupancy
from pagedkv.replay.serving.meters.sharing import Branches, SharingMeter
from pagedkv.replay.serving.meters.timeline import Timeline
from pagedkv.replay.serving.meters.waste import WasteMeter
from pagedkv.replay.serving.running_rows import RunningRows
from pagedkv.replay.serving.step_work import StepWork
from pagedkv.space import BlockSpace

__all__ = ["COUNTS", "LEVELS", "POOL_LEVELS", "Meters"]

POOL_LEVELS: Final = ("num_live", "num_cached", "num_free")
LEVELS: Final = ("num_running", "num_waiting", "num_swapped", "num_sequences")
COUNTS: Final = ("num_preemptions", "num_computed_tokens", "num_hit_tokens", "num_prompt_tokens")


class Meters:
    """Takes all figures of one replay.

    Args:
        config: the configuration; space: the space that serves.
    """

    def __init__(self, config: ServingConfig, space: BlockSpace) -> None:
        first = config.group_specs[0]
        self._space = space
        self._first_pool = first.pool
        self._block_size = first.block_size
        pools = list(space.config.pool_names)
        self.num_usable = {pool: count - 1 for pool, count in space.config.blocks_by_pool().items()}
        self.history = BlockHistory(space, config.group_specs)
        self.occupancy = {pool: Occupancy() for pool in pools}
        self.waste = WasteMeter(first.block_size, config.max_length)
        self.sharing = SharingMeter(space.config.blocks_by_pool()[first.pool])
        self.latencies = LatencyMeter()
        self.timeline = Timeline([*LEVELS, *(f"{level} {pool}" for pool in pools for level in POOL_LEVELS)], COUNTS)
        self.sequences = Level()
        self.num_requests = self.num_rejected = self.num_finished = 0
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_prompt_blocks = self.num_hit_blocks = self.num_hit_tokens = 0
        self.num_steps = self.num_decode_steps = self.num_computed_tokens = 0
        self.busy_s = 0.0
        self.num_recompute = self.num_swap = self.num_recomputed_tokens = 0
        self.num_swapped_out_blocks = self.num_swapped_in_blocks = 0
        self._since_step = dict.fromkeys(COUNTS, 0)

    # Requests

    def arrived(self, job: Job) -> None:
        """Count a request."""
        self.num_requests += 1
        self.waste.note_length(job.final_length)

    def rejected(self) -> None:
        """Count a request that cannot be served."""
        self.num_rejected += 1

    def admitted(self, job: Job, num_hit_tokens: int, now_s: float) -> None:
        """Note an admission: the hits of the first one count, their ages always do."""
        self.history.admitted(job.rows[0], num_hit_tokens, now_s)
        if job.admitted_s is not None:
            return
        job.admitted_s = now_s
        self.latencies.queueing_s.append(now_s - job.arrival_s)
        self.num_prompt_tokens += job.num_prompt_tokens
        self.num_prompt_blocks += (job.num_prompt_tokens - 1) // self._block_size
        self.num_hit_tokens += num_hit_tokens
        self.num_hit_blocks += num_hit_tokens // self._block_size
        self._since_step["num_hit_tokens"] += num_hit_tokens
        self._since_step["num_prompt_tokens"] += job.num_prompt_tokens

    def recomputes(self) -> None:
        """Count a preemption by recompute."""
        self.num_recompute += 1
        self._since_step["num_preemptions"] += 1

    def swapped_out(self) -> None:
        """Count a preemption by swap."""
        self.num_swap += 1
        self._since_step["num_preemptions"] += 1

    def finished(self, job: Job, end_s: float) -> None:
        """Note that a request has all its tokens."""
        self.num_finished += 1
        self.num_output_tokens += job.num_output_tokens * job.num_sequences
        self.latencies.request_s.append(end_s - job.arrival_s)

    def first_token(self, job: Job, end_s: float) -> None:
        """Note that a request's prompt is computed for the first time."""
        self.latencies.first_token_s.append(end_s - job.arrival_s)

    # Steps

    def planned(self, running: RunningRows, work: StepWork, num_recomputed_tokens: int, *, decodes: bool) -> None:
        """Measure a step that was just planned."""
        self.num_steps += 1
        self.sequences.hold(len(running.rows), 1.0)
        self.num_computed_tokens += work.num_new_tokens
        self.num_recomputed_tokens += num_recomputed_tokens
        self.num_swapped_out_blocks += work.num_swapped_out_blocks
        self.num_swapped_in_blocks += work.num_swapped_in_blocks
        self._since_step["num_computed_tokens"] += work.num_new_tokens
        if decodes:
            self.num_decode_steps += 1
            self._measure_decode(running)

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
        """Let everything be as it is for some time."""
        levels = [len(running.num_rows), num_waiting, num_swapped, len(running.rows)]
        for pool, occupancy in self.occupancy.items():
            num_cached = self._space.num_cached_blocks(pool)
            blocks = self._space.num_live_blocks(pool), num_cached, self._space.num_free_blocks(pool) - num_cached
            occupancy.hold(*blocks, duration_s)
            levels += blocks
        self.timeline.hold(duration_s, levels, list(self._since_step.values()))
        self._since_step = dict.fromkeys(COUNTS, 0)
