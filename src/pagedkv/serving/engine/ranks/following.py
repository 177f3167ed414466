"""The loop of every rank but rank 0: it carries out the steps that rank 0 sends, until rank 0 sends the end."""

from functools import partial

import torch

from pagedkv.memory.contract.plan import StepPlan
from pagedkv.memory.device import PlanExecutor, StepInputs
from pagedkv.serving.engine.flat_batch import FlatBatch
from pagedkv.serving.engine.ranks.rank_group import RankGroup
from pagedkv.serving.engine.runner import ModelRunner

__all__ = ["follow"]


def _compute(runner: ModelRunner, plan: StepPlan, batch: FlatBatch, inputs: StepInputs) -> torch.Tensor:
    return runner.compute(plan, inputs, batch)


def follow(ranks: RankGroup, executor: PlanExecutor, runner: ModelRunner) -> int:
    """Carry out steps until rank 0 sends the end; return their number.

    Args:
        ranks: the group; executor: storage and tables of this rank; runner: its part of the model.

    Raises:
        RankLostError: another rank is lost. If a step fails on this rank, the other ranks raise it.
    """
    num_steps = 0
    while (sent := ranks.receive()) is not None:
        plan, batch = sent.plan, sent.batch
        if len(batch.token_ids):
            executor.launch(plan, partial(_compute, runner, plan, batch))
        else:
            executor.launch(plan, lambda _: torch.zeros(0))
        executor.done()
        num_steps += 1
    return num_steps
