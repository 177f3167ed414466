"""The loop of every rank but rank 0: it carries out the steps and copies that rank 0 sends, until the end."""

from functools import partial

import torch

from pagedkv.memory.contract.plan import StepPlan
from pagedkv.memory.device import PlanExecutor, StepInputs
from pagedkv.serving.engine.flat_batch import FlatBatch
from pagedkv.serving.engine.ranks.rank_group import RankGroup, SentCopy
from pagedkv.serving.engine.ranks.ranked_blocks import OtherRankBlocks
from pagedkv.serving.engine.runner import ModelRunner

__all__ = ["follow"]


def _compute(runner: ModelRunner, plan: StepPlan, batch: FlatBatch, inputs: StepInputs) -> torch.Tensor:
    return runner.compute(plan, inputs, batch)


def follow(ranks: RankGroup, executor: PlanExecutor, runner: ModelRunner) -> int:
    """Carry out steps, and copies of blocks, until rank 0 sends the end; return the number of steps.

    Args:
        ranks: the group; executor: storage and tables of this rank; runner: its part of the model.

    Raises:
        RankLostError: another rank is lost. If a step fails on this rank, the other ranks raise it.
    """
    num_steps = 0
    blocks = OtherRankBlocks(ranks, executor.storage)
    while (sent := ranks.receive()) is not None:
        if isinstance(sent, SentCopy):
            blocks.copy(sent)
            continue
        plan, batch = sent.plan, sent.batch
        if len(batch.token_ids):
            executor.launch(plan, partial(_compute, runner, plan, batch))
        else:
            executor.launch(plan, lambda _: torch.zeros(0))
        executor.done()
        num_steps += 1
    return num_steps
