"""``pagedkv report``."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.command_line import command_line
from pagedkv.cli.curve import curve_of_trace, has_block_ids, parse_capacities
from pagedkv.cli.report import as_run, write_report
from pagedkv.cli.serving import DEFAULTS, SESSION_INTERVAL_S, ServingOptions, serve_trace
from pagedkv.cli.trace_options import TraceOptions
from pagedkv.cli.user_errors import reported
from pagedkv.report import ReportRun

__all__ = ["report"]


def report(  # noqa: PLR0913 - one parameter an option
    sources: Annotated[
        list[str], typer.Argument(help="Traces, or results of pagedkv replay --json; several are compared, 8 at most.")
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page, *.html, or - for stdout.")],
    capacities: Annotated[
        str | None, typer.Option(metavar="C,C,...", help="Blocks of the cache, as in pagedkv curve.")
    ] = None,
    num_blocks: opt.NumBlocks = None,
    block_size: opt.BlockSize = DEFAULTS.block_size,
    model: opt.ModelName = None,
    gpu: opt.GpuName = None,
    memory: opt.MemoryGib = None,
    host_blocks: opt.HostBlocks = DEFAULTS.host_blocks,
    cost_model: opt.CostModelName = None,
    max_sequences: opt.MaxSequences = DEFAULTS.max_sequences,
    max_batched_tokens: opt.MaxBatchedTokens = DEFAULTS.max_batched_tokens,
    watermark: opt.Watermark = DEFAULTS.watermark,
    policy: opt.PolicyName = DEFAULTS.policy,
    preemption: opt.PreemptionKind = DEFAULTS.preemption,
    samples: opt.Samples = None,
    speed: opt.Speed = DEFAULTS.speed,
    seed: opt.Seed = DEFAULTS.seed,
    session_interval: opt.SessionInterval = SESSION_INTERVAL_S,
    max_gap: opt.MaxGap = None,
    trace_block_size: opt.TraceBlockSize = None,
    limit: opt.Limit = None,
) -> None:
    """Write one HTML page about a trace, or one that compares several runs: needs no network, opens from a file.

    A trace is replayed, and its capacity curve measured, with the options given; see pagedkv replay --help.

    For example:

    pagedkv report mooncake_conversation.jsonl.gz -o report.html --model llama-3.1-8b --gpu 8xh100

    pagedkv replay trace.jsonl --num-blocks 1000 --json small.json

    pagedkv replay trace.jsonl --num-blocks 2000 --json large.json

    pagedkv report small.json large.json -o compared.html
    """

    def run_trace(path: str) -> ReportRun:
        served = serve_trace(path, options)
        replay = {"trace": path, "command": command_line(), **served.result.as_dict()}
        if not has_block_ids(path, options.trace):
            return as_run(Path(path).name, replay)
        wanted = None if capacities is None else parse_capacities(capacities)
        curve = curve_of_trace(path, wanted, options=options.trace)
        return as_run(Path(path).name, replay, curve.as_dict())

    with reported():
        options = ServingOptions(
            num_blocks=num_blocks,
            block_size=block_size,
            memory_gib=memory,
            model=model,
            gpu=gpu,
            cost_model=cost_model,
            host_blocks=host_blocks,
            max_sequences=max_sequences,
            max_batched_tokens=max_batched_tokens,
            watermark=watermark,
            policy=policy,
            preemption=preemption,
            samples=samples,
            speed=speed,
            seed=seed,
            trace=TraceOptions(session_interval, max_gap, trace_block_size, limit),
        )
        if capacities is not None:
            parse_capacities(capacities)
        options.configuration()
        write_report(sources, output, run_trace, version=version("pagedkv"), command=command_line())
