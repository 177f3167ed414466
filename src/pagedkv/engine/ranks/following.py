"""The loop of every rank but rank 0: it carries out the steps and copies that rank 0 sends, until the end."""

from functools import partial

import torch

from pagedkv.device import PlanExecutor, StepInputs
from pagedkv.engine.ranks.rank_group import RankGroup, SentCopy, SentStep
from pagedkv.engine.ranks.ranked_content import OtherRankBlocks
from pagedkv.engine.runner import ModelRunner

__all__ = ["follow"]


def _compute(runner: ModelRunner, sent: SentStep, inputs: StepInputs) -> torch.Tensor:
    return runner.compute(sent.plan, inputs, sent.batch, is_scored=sent.is_scored)


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
        if len(sent.batch.token_ids):
            executor.launch(sent.plan, partial(_compute, runner, sent))
        else:
            executor.launch(sent.plan, lambda _: torch.zeros(0))
        executor.done()
        num_steps += 1
    return num_steps
