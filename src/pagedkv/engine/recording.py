"""Recorder: makes the record of a step, of its batch and of the state after it."""

from collections.abc import Sequence
from typing import final

from pagedkv.engine.flights import Finished
from pagedkv.engine.records import StepRecord
from pagedkv.scheduling import Batch, Scheduler
from pagedkv.space import BlockSpace

__all__ = ["Recorder"]


@final
class Recorder:
    """Makes the records of one engine's steps.

    Args:
        scheduler, space: of the engine; the numbers of blocks are counted once.
    """

    def __init__(self, scheduler: Scheduler, space: BlockSpace) -> None:
        self._scheduler = scheduler
        self._space = space
        pools = space.config.blocks_by_pool()
        self._pools = tuple(pools)
        self._num_blocks = sum(pools.values()) - len(pools)  # without the null blocks

    def record_of(self, batch: Batch, finished: Finished, seconds: Sequence[float]) -> StepRecord:
        """Make the record of a step, after it.

        Args:
            batch: the step.
            finished: counts of the steps that the same call finished.
            seconds: of scheduling, the forward pass, sampling and finishing.
        """
        kinds = [preempted.kind for preempted in batch.preempted]
        num_free = sum(map(self._space.num_free_blocks, self._pools))
        return StepRecord(
            step_id=batch.plan.step_id,
            num_decoded=len(batch.decoded_token_ids),
            num_prefilled=sum(len(chunk.token_ids) for chunk in batch.prefilling),
            num_sampled=batch.num_samples,
            num_admitted=len(batch.admitted),
            num_resumed=len(batch.resumed),
            num_swapped_out=kinds.count("swap"),
            num_recomputed=kinds.count("recompute"),
            num_finished=finished.num_requests,
            num_rejected=len(batch.rejected),
            num_hit_tokens=sum(admission.num_hit_tokens for admission in batch.admitted),
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            num_swapped=self._scheduler.num_swapped,
            num_used_blocks=self._num_blocks - num_free,
            num_blocks=self._num_blocks,
            schedule_seconds=seconds[0],
            forward_seconds=seconds[1],
            sample_seconds=seconds[2],
            finish_seconds=seconds[3],
            num_drafted=batch.num_drafted,
            num_accepted=finished.num_accepted,
        )
