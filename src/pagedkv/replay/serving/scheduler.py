"""What each step decodes, computes, swaps in, admits and preempts: continuous batching over a block space.

Owns the lists of who waits, runs and is swapped out. Knows no clock: a step ends when its caller says so.
docs/replay.md tells the rules; each phase is one method here. Figures are taken by the meters that it is given.
"""

from bisect import insort
from operator import attrgetter

from pagedkv.plan import Shortage, StepPlan
from pagedkv.replay.serving.branching import BeamParents, fork_sequences, replace_beams
from pagedkv.replay.serving.config import ServingConfig
from pagedkv.replay.serving.decode_batch import DecodeBatch
from pagedkv.replay.serving.job import Job
from pagedkv.replay.serving.meters.meters import Meters
from pagedkv.replay.serving.running_rows import RunningRows, rows_of
from pagedkv.replay.serving.waiting import WaitingQueue
from pagedkv.space import BlockSpace
from pagedkv.spec import AllocStatus, FullAttention

__all__ = ["Scheduler"]

BY_KEY = attrgetter("key")


class Scheduler:
    """Serves jobs through one block space.

    Args:
        config: the rules.
        space: the block space.
        meters: told of everything worth a figure.

    Attributes:
        waiting, running, swapped: the jobs that wait, run and are swapped out, in order of their keys.
    """

    def __init__(self, config: ServingConfig, space: BlockSpace, meters: Meters) -> None:
        self._config = config
        self._space = space
        self._meters = meters
        self._parents = BeamParents(config.seed)
        self.waiting = WaitingQueue()
        self.running: list[Job] = []
        self.swapped: list[Job] = []
        self._batch: DecodeBatch | None = None
        self._rows: RunningRows | None = None
        self._has_preempted = False
        self._prefilling: list[Job] = []
        self._decoded: list[Job] = []
        self._prefilled: list[Job] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody to serve."""
        return not (self.running or self.waiting or self.swapped)

    def arrive(self, job: Job) -> None:
        """Let a job wait, or reject it if it could not be served alone."""
        if self._fits_alone(job):
            self.waiting.push(job)
        else:
            self._meters.rejected()

    def _fits_alone(self, job: Job) -> bool:
        needed = dict.fromkeys(self._meters.num_usable, 0)
        for group in self._config.group_specs:
            if isinstance(group, FullAttention):
                num_shared = job.num_prompt_tokens // group.block_size
                num_blocks = -(-job.final_length // group.block_size)
                needed[group.pool] += num_shared + job.num_sequences * (num_blocks - num_shared)
        return (
            job.num_sequences <= self._config.max_sequences
            and job.final_length <= self._space.config.max_tokens
            and all(count <= self._meters.num_usable[pool] for pool, count in needed.items())
        )

    # One step

    def plan_step(self, now_s: float) -> StepPlan:
        """Go through the phases of a step and close it."""
        self._has_preempted = False
        self._prefilled = []
        self._decoded = []
        budget = self._config.max_batched_tokens - self._decode(now_s)
        budget = self._prefill(now_s, budget)
        if not self._has_preempted:
            self._swap_in(now_s)
            if not self.swapped:
                self._admit(now_s, budget)
        return self._space.plan_step()

    @property
    def is_decode_step(self) -> bool:
        """Whether the step just planned decodes a token."""
        return bool(self._decoded)

    def num_recomputed_tokens(self) -> int:
        """Tokens of the step just planned that were computed before a preemption."""
        num_tokens = sum(max(0, min(job.num_scheduled, job.most_computed) - job.chunk_start) for job in self._prefilled)
        num_steps = self._batch.num_steps if self._batch else 0
        for job in self._decoded:
            if job.most_computed >= job.num_prompt_tokens + job.num_produced + num_steps:
                num_tokens += len(job.rows)
        return num_tokens

    def running_rows(self) -> RunningRows:
        """Give the rows of all running sequences."""
        if self._rows is None:
            self._rows = rows_of(self.running)
        return self._rows

    def finish_step(self, plan: StepPlan, end_s: float) -> None:
        """Acknowledge a step that ended: tokens are produced, prompts forked, finished jobs freed."""
        self._meters.history.before_acknowledge(plan)
        self._space.acknowledge(plan.step_id)
        self._meters.history.after_acknowledge(end_s)
        self._produce_decoded()
        for job in self._prefilled:
            if not job.num_unscheduled:
                self._produce_first(job, end_s)
        if self._batch is None:
            for job in [job for job in self.running if self._has_ended(job)]:
                self._free(job, end_s)
                self._meters.finished(job, end_s)

    def _produce_decoded(self) -> None:
        """Note a token of each sequence that has decoded."""
        if self._decoded and self._batch:
            self._batch.num_steps += 1
            if self._batch.is_used_up:
                self._close_batch()
        else:
            for job in self._decoded:
                job.num_produced += 1

    def _produce_first(self, job: Job, end_s: float) -> None:
        """Note the token that follows a prompt, and fork the prompt."""
        self._close_batch()
        if job.first_token_s is None:
            job.first_token_s = end_s
            self._meters.first_token(job, end_s)
        job.num_produced = min(job.num_produced + 1, job.num_output_tokens)
        if job.num_sequences > 1 and not job.is_finished:
            fork_sequences(self._space, job)
            self._rows = None

    @staticmethod
    def _has_ended(job: Job) -> bool:
        """Whether all of a running job's tokens are produced; an empty output ends with the prompt."""
        return job.is_finished and not job.num_unscheduled

    # Phases

    def _decode(self, now_s: float) -> int:
        """Append a token to every sequence that can; return how many."""
        if self._config.beam_width is not None:
            self._replace_beams(now_s)
        while batch := self._decode_batch():
            shortage = self._space.append(batch.rows, batch.next_tokens)
            if shortage is None:
                self._decoded = batch.jobs
                self._meters.history.note_events(now_s)
                return len(batch.rows)
            if self._is_coming(shortage):
                return 0
            self._preempt(self.running[-1], now_s)
        return 0

    def _decode_batch(self) -> DecodeBatch | None:
        if self._batch is None:
            jobs = [job for job in self.running if not job.num_unscheduled]
            self._batch = DecodeBatch(jobs) if jobs else None
        return self._batch

    def _close_batch(self) -> None:
        if self._batch is not None:
            self._batch.close()
            self._batch = None

    def _replace_beams(self, now_s: float) -> None:
        """Let new beams continue the old ones, wherever a token was decoded since."""
        self._close_batch()
        for job in self.running:
            if job.is_beam and not job.num_unscheduled and job.num_produced > 1:
                parents = self._parents.draw_once(job)
                if parents is not None:
                    with self._meters.history.releasing(job.rows, now_s):
                        replace_beams(self._space, job, parents)
                    self._rows = None

    def _prefill(self, now_s: float, budget: int) -> int:
        """Append the next chunks of prompts; return what is left of the budget."""
        for job in list(self._prefilling):
            while budget > 0 and job in self._prefilling:
                chunk = job.known_token_ids[job.num_scheduled : job.num_scheduled + budget]
                shortage = self._space.append(job.rows, chunk, [len(chunk)])
                if shortage is None:
                    self._schedule(job, job.num_scheduled, job.num_scheduled + len(chunk))
                    self._meters.history.note_events(now_s)
                    budget -= len(chunk)
                    break
                if self._is_coming(shortage):
                    return 0
                self._preempt(self.running[-1], now_s)
        return budget

    def _schedule(self, job: Job, start: int, stop: int) -> None:
        """Note that the open step computes some of a job's known tokens."""
        job.chunk_start, job.num_scheduled = start, stop
        self._prefilled.append(job)
        if not job.num_unscheduled and job in self._prefilling:
            self._prefilling.remove(job)

    def _is_coming(self, shortage: Shortage) -> bool:
        """Whether the blocks that are missing will be free when the open step is acknowledged."""
        return shortage.num_needed <= shortage.num_free + self._space.num_deferred_blocks(shortage.pool)

    def _swap_in(self, now_s: float) -> None:
        """Bring swapped-out jobs back, in order, as long as they fit."""
        while self.swapped and self._num_sequences(self.swapped[0]) <= self._config.max_sequences:
            job = self.swapped[0]
            if self._space.can_swap_in(job.rows) is not AllocStatus.OK:
                return
            moves = self._space.swap_in(job.rows)
            assert not isinstance(moves, Shortage), f"a sequence that was to fit finds too few blocks: {moves}"
            self._meters.history.note_events(now_s)
            self.swapped.pop(0)
            self._close_batch()
            self._join(job)

    def _admit(self, now_s: float, budget: int) -> None:
        """Admit waiting jobs, in order, as long as they fit."""
        while budget > 0 and self.waiting and self._num_sequences(self.waiting.first()) <= self._config.max_sequences:
            job = self.waiting.first()
            job.load_tokens()
            status = self._space.can_allocate(job.known_token_ids, num_sequences=job.num_sequences)
            if status is AllocStatus.LATER:
                return
            self.waiting.pop()
            if status is AllocStatus.NEVER:
                self._meters.rejected()
            else:
                budget -= self._allocate(job, now_s, budget)

    def _num_sequences(self, newcomer: Job) -> int:
        """Sequences of all running jobs and one more, those to be forked included."""
        return newcomer.num_sequences + sum(job.num_sequences for job in self.running)

    def _allocate(self, job: Job, now_s: float, budget: int) -> int:
        """Give a job its first blocks; return how many tokens of the budget that took."""
        num_hit_tokens = self._space.match(job.known_token_ids).num_tokens
        first_chunk = job.known_token_ids[: num_hit_tokens + budget]
        allocation = self._space.allocate(first_chunk)
        assert not isinstance(allocation, Shortage), f"a prompt that was to fit finds too few blocks: {allocation}"
        job.rows = [allocation.row]
        self._schedule(job, num_hit_tokens, len(first_chunk))
        self._join(job)
        self._meters.admitted(job, num_hit_tokens, now_s)
        return len(first_chunk) - num_hit_tokens

    # Who runs

    def _join(self, job: Job) -> None:
        """Let a job run that has its blocks."""
        insort(self.running, job, key=BY_KEY)
        self._rows = None
        if job.num_unscheduled:
            insort(self._prefilling, job, key=BY_KEY)

    def _leave(self, job: Job) -> None:
        """Let a job run no more."""
        self._close_batch()
        self._rows = None
        self.running.remove(job)
        if job in self._prefilling:
            self._prefilling.remove(job)
        self._decoded = [other for other in self._decoded if other is not job]

    def _free(self, job: Job, now_s: float) -> None:
        self._leave(job)
        self._parents.forget(job)
        with self._meters.history.releasing(job.rows, now_s):
            self._space.free(job.rows)

    # Preemption

    def _preempt(self, job: Job, now_s: float) -> None:
        """Take a running job's blocks away: to the host pool, or for good. Alone, it is rejected."""
        self._has_preempted = True
        if len(self.running) == 1:
            self._free(job, now_s)
            self._meters.rejected()
        elif self._may_swap(job):
            self._swap_out(job, now_s)
        else:
            self._recompute(job, now_s)

    def _may_swap(self, job: Job) -> bool:
        is_ready = not job.num_unscheduled and job not in self._decoded
        return self._config.preemption == "swap" and is_ready and self._space.can_swap_out(job.rows) is AllocStatus.OK

    def _swap_out(self, job: Job, now_s: float) -> None:
        self._leave(job)
        with self._meters.history.releasing(job.rows, now_s):
            moves = self._space.swap_out(job.rows)
        assert not isinstance(moves, Shortage), f"a host pool that was to have room has none: {moves}"
        insort(self.swapped, job, key=BY_KEY)
        self._meters.swapped_out()

    def _recompute(self, job: Job, now_s: float) -> None:
        num_computed = int(self._space.lengths(job.rows).max()) - (job in self._decoded)
        self._free(job, now_s)
        job.start_over(num_computed)
        self.waiting.push(job)
        self._meters.recomputes()
