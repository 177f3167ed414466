"""``pagedkv demo-replay``: a generated workload, and a real trace where there is one."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.atomic_file import STANDARD_OUTPUT, require_writable
from pagedkv.cli.command_line import command_line
from pagedkv.cli.json_file import write_json
from pagedkv.cli.option_groups import command
from pagedkv.cli.serving import ServingOptions, serve_requests, serve_trace
from pagedkv.cli.serving_tables import print_served
from pagedkv.cli.tables import print_workload
from pagedkv.planner.traces.workload import ConversationWorkload

__all__ = ["demo_replay"]

MOONCAKE_TRACE: Final = "mooncake_conversation.jsonl.gz"

PUBLIC_TRACES: Final = f"""\
No {MOONCAKE_TRACE} here (--traces FOLDER; make replay TRACES=FOLDER). Public traces:
  Mooncake, FAST'25 release    github.com/kvcache-ai/Mooncake, FAST25-release/traces (read as they are)
  Azure LLM inference          github.com/Azure/AzurePublicDataset, data
  coding-agent sessions        github.com/callanjfox/kv-cache-tester, traces
  agent benchmark runs         github.com/LMCache/lmcache-agent-trace
docs/trace-format.md tells what the last three must be turned into."""


@command
def demo_replay(
    *,
    traces: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where mooncake_conversation.jsonl.gz may be.")
    ] = None,
    num_blocks: opt.NumBlocks = None,
    seed: opt.Seed = 0,
    sessions: Annotated[int, typer.Option(metavar="N", help="Number of generated conversations.")] = 1000,
    json_file: opt.JsonFile = None,
) -> None:
    """Replay generated conversations and, where there is one, a real trace, on a virtual clock.

    For example:

    pagedkv demo-replay

    pagedkv demo-replay --seed 7 --sessions 5000 --num-blocks 20000

    pagedkv demo-replay --traces ~/traces
    """
    workload = ConversationWorkload(seed=seed, num_sessions=sessions)
    options = ServingOptions(num_blocks=num_blocks, seed=seed)
    if json_file is not None:
        require_writable(json_file)
    served = serve_requests("conversations", workload.requests(), options)
    if json_file is not None:
        write_json(json_file, {"command": command_line(), "workload": asdict(workload), **served.as_dict()})
    if json_file != STANDARD_OUTPUT:
        print_workload(workload)
        print_served("Replay of the generated conversations", served)
        _replay_recorded(options, traces)


def _replay_recorded(options: ServingOptions, traces: Path | None) -> None:
    """Replay the Mooncake conversation trace from ``traces``, or say where to get it."""
    trace = traces / MOONCAKE_TRACE if traces is not None else None
    if trace is None or not trace.exists():
        typer.echo(PUBLIC_TRACES)
        return
    print_served(f"Replay of {trace.name}", serve_trace(str(trace), options))
