"""``pagedkv demo``: a generated workload, and a real trace where there is one."""

from pathlib import Path
from typing import Annotated, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.option_groups import command
from pagedkv.cli.serving import ServingOptions, serve_requests, serve_trace
from pagedkv.cli.serving_tables import print_served
from pagedkv.cli.tables import print_workload
from pagedkv.traces.workload import ConversationWorkload

__all__ = ["demo"]

MOONCAKE_TRACE: Final = "mooncake_conversation.jsonl.gz"

PUBLIC_TRACES: Final = f"""\
No {MOONCAKE_TRACE} here (--traces FOLDER; make run TRACES=FOLDER). Public traces:
  Mooncake, FAST'25 release    github.com/kvcache-ai/Mooncake, FAST25-release/traces (read as they are)
  Azure LLM inference          github.com/Azure/AzurePublicDataset, data
  coding-agent sessions        github.com/callanjfox/kv-cache-tester, traces
  agent benchmark runs         github.com/LMCache/lmcache-agent-trace
docs/trace-format.md tells what the last three must be turned into."""


@command
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
    workload = ConversationWorkload(seed=seed, num_sessions=sessions)
    run_demo(workload, ServingOptions(num_blocks=num_blocks, seed=seed), traces)


def run_demo(workload: ConversationWorkload, options: ServingOptions, traces: Path | None) -> None:
    """Replay the workload, then the Mooncake conversation trace from ``traces``, or say where to get it."""
    print_workload(workload)
    print_served("Replay of the generated conversations", serve_requests("conversations", workload.requests(), options))
    trace = traces / MOONCAKE_TRACE if traces is not None else None
    if trace is None or not trace.exists():
        typer.echo(PUBLIC_TRACES)
        return
    print_served(f"Replay of {trace.name}", serve_trace(str(trace), options))
