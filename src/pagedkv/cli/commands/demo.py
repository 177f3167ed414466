"""``pagedkv demo``."""

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.demo import run_demo
from pagedkv.cli.serving import ServingOptions
from pagedkv.cli.user_errors import reported
from pagedkv.replay.workload import ConversationWorkload

__all__ = ["demo"]


def demo(
    *,
    traces: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where mooncake_conversation.jsonl.gz may be.")
    ] = None,
    num_blocks: opt.NumBlocks = None,
    seed: opt.Seed = 0,
    sessions: Annotated[int, typer.Option(metavar="N", help="Number of generated conversations.")] = 1000,
) -> None:
    """Replay generated conversations and, where there is one, a real trace, on a virtual clock.

    For example:

    pagedkv demo

    pagedkv demo --seed 7 --sessions 5000 --num-blocks 20000

    pagedkv demo --traces ~/traces
    """
    with reported():
        workload = ConversationWorkload(seed=seed, num_sessions=sessions)
        run_demo(workload, ServingOptions(num_blocks=num_blocks, seed=seed), traces)
