"""The record of a step, made of its batch and of the state after it."""

from collections.abc import Sequence

from pagedkv.memory.scheduling import Batch, Scheduler
from pagedkv.memory.space import BlockSpace
from pagedkv.serving.engine.flights import Finished
from pagedkv.serving.engine.records import StepRecord

__all__ = ["record_of"]


def record_of(
    batch: Batch, scheduler: Scheduler, space: BlockSpace, finished: Finished, seconds: Sequence[float]
) -> StepRecord:
    """Make the record of a step.

    Args:
        batch: the step; scheduler, space: after it.
        finished: counts of the steps that the same call finished.
        seconds: of scheduling, the forward pass, sampling and finishing.
    """
    kinds = [preempted.kind for preempted in batch.preempted]
    num_free = sum(space.num_free_blocks(name) for name in space.config.pool_names)
    num_blocks = sum(count - 1 for count in space.config.blocks_by_pool().values())
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
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        num_swapped=scheduler.num_swapped,
        num_used_blocks=num_blocks - num_free,
        num_blocks=num_blocks,
        schedule_seconds=seconds[0],
        forward_seconds=seconds[1],
        sample_seconds=seconds[2],
        finish_seconds=seconds[3],
        num_drafted=batch.num_drafted,
        num_accepted=finished.num_accepted,
    )
