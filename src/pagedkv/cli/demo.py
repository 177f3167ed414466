"""What ``pagedkv demo`` runs: a generated workload, and a real trace where there is one."""

from pathlib import Path
from typing import Final

import typer

from pagedkv.cli.serving import ServingOptions, serve_requests, serve_trace
from pagedkv.cli.serving_tables import print_served
from pagedkv.cli.tables import print_workload
from pagedkv.replay.workload import ConversationWorkload

__all__ = ["run_demo"]

MOONCAKE_TRACE: Final = "mooncake_conversation.jsonl.gz"

PUBLIC_TRACES: Final = f"""\
No {MOONCAKE_TRACE} here (--traces FOLDER; make run TRACES=FOLDER). Public traces:
  Mooncake, FAST'25 release    github.com/kvcache-ai/Mooncake, FAST25-release/traces (read as they are)
  Azure LLM inference          github.com/Azure/AzurePublicDataset, data
  coding-agent sessions        github.com/callanjfox/kv-cache-tester, traces
  agent benchmark runs         github.com/LMCache/lmcache-agent-trace
docs/trace-format.md tells what the last three must be turned into."""


def run_demo(workload: ConversationWorkload, options: ServingOptions, traces: Path | None) -> None:
    """Replay the workload, then the Mooncake conversation trace from ``traces``, or say where to get it."""
    print_workload(workload)
    print_served("Replay of the generated conversations", serve_requests("conversations", workload.requests(), options))
    trace = traces / MOONCAKE_TRACE if traces is not None else None
    if trace is None or not trace.exists():
        typer.echo(PUBLIC_TRACES)
        return
    print_served(f"Replay of {trace.name}", serve_trace(str(trace), options))
