"""``pagedkv replay``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.atomic_file import STANDARD_OUTPUT, require_writable
from pagedkv.cli.command_line import command_line
from pagedkv.cli.json_file import write_json
from pagedkv.cli.one_at_a_time import replay_trace
from pagedkv.cli.serving import (
    DEFAULTS,
    SESSION_INTERVAL_S,
    WHOLE_TRACE,
    ServingOptions,
    default_num_blocks,
    serve_trace,
)
from pagedkv.cli.serving_tables import print_served
from pagedkv.cli.sizes import parse_blocks
from pagedkv.cli.tables import print_summary
from pagedkv.cli.trace_options import TraceOptions
from pagedkv.cli.user_errors import reported
from pagedkv.errors import ConfigurationError
from pagedkv.replay.replayer import ReplayConfig

__all__ = ["replay"]


def replay(  # noqa: PLR0913 - one parameter an option
    trace: Annotated[str, typer.Argument(help="Trace file, plain or gzip.")],
    *,
    num_blocks: opt.NumBlocks = None,
    block_size: opt.BlockSize = DEFAULTS.block_size,
    model: opt.ModelName = None,
    gpu: opt.GpuName = None,
    memory: opt.MemoryGib = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Of keys and values: fp8, bf16, ...", rich_help_panel=opt.MEMORY),
    ] = None,
    host_blocks: opt.HostBlocks = DEFAULTS.host_blocks,
    cost_model: opt.CostModelName = None,
    max_sequences: opt.MaxSequences = DEFAULTS.max_sequences,
    max_batched_tokens: opt.MaxBatchedTokens = DEFAULTS.max_batched_tokens,
    watermark: opt.Watermark = DEFAULTS.watermark,
    policy: opt.PolicyName = DEFAULTS.policy,
    preemption: opt.PreemptionKind = DEFAULTS.preemption,
    samples: opt.Samples = None,
    beams: Annotated[
        int | None,
        typer.Option(metavar="N", help="Beams of every request, instead of samples.", rich_help_panel=opt.SCHEDULING),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of the largest contiguous reservation. Default: the model's context, or the longest request.",
            rich_help_panel=opt.MEMORY,
        ),
    ] = None,
    speed: opt.Speed = DEFAULTS.speed,
    seed: opt.Seed = DEFAULTS.seed,
    session_interval: opt.SessionInterval = SESSION_INTERVAL_S,
    max_gap: opt.MaxGap = None,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time",
            help="No clock: serve each request to its end before the next. Knows --num-blocks and --block-size alone.",
            rich_help_panel=opt.SCHEDULING,
        ),
    ] = False,
    trace_block_size: opt.TraceBlockSize = None,
    limit: opt.Limit = None,
    json_file: opt.JsonFile = None,
) -> None:
    """Serve a request trace on a virtual clock, with continuous batching, through the block space that serves.

    Requests arrive when the trace says; steps take as long as the cost model says. What is hit, shared, preempted,
    evicted and wasted is the block space's own doing. docs/replay.md tells the rules.

    For example:

    pagedkv replay mooncake_conversation.jsonl.gz --model llama-3.1-70b --gpu 8xh100

    pagedkv replay requests.csv.gz --num-blocks 20000 --preemption swap --host-blocks 50000 --json result.json

    zcat trace.jsonl.gz | pagedkv replay /dev/stdin --limit 1000 --samples 4 --json -
    """
    with reported():
        if json_file is not None:
            require_writable(json_file, trace)
        options = ServingOptions(
            num_blocks=num_blocks,
            block_size=block_size,
            memory_gib=memory,
            model=model,
            kv_dtype=kv_dtype,
            gpu=gpu,
            cost_model=cost_model,
            host_blocks=host_blocks,
            max_sequences=max_sequences,
            max_batched_tokens=max_batched_tokens,
            watermark=watermark,
            policy=policy,
            preemption=preemption,
            samples=samples,
            beams=beams,
            speed=speed,
            seed=seed,
            max_length=max_length,
            trace=TraceOptions(session_interval, max_gap, trace_block_size, limit),
        )
        if one_at_a_time:
            _replay_one_at_a_time(trace, options, json_file)
            return
        served = serve_trace(trace, options)
        if json_file is not None:
            write_json(json_file, {"trace": trace, "command": command_line(), **served.result.as_dict()})
        if json_file != STANDARD_OUTPUT:
            print_served(f"Replay of {Path(trace).name}", served)


def _replay_one_at_a_time(trace: str, options: ServingOptions, json_file: Path | None) -> None:
    trace_options = replace(WHOLE_TRACE, block_size=options.trace.block_size, limit=options.trace.limit)
    known = replace(DEFAULTS, num_blocks=options.num_blocks, block_size=options.block_size, trace=trace_options)
    if options != known:
        raise ConfigurationError(
            "--one-at-a-time has no clock, no model and no policy but LRU: it takes --num-blocks, --block-size, "
            "--trace-block-size, --limit and --json alone"
        )
    num_blocks = options.num_blocks
    blocks = default_num_blocks(options.block_size) if num_blocks is None else parse_blocks(num_blocks)
    if not isinstance(blocks, int):
        raise ConfigurationError(f"--one-at-a-time has one pool: give --num-blocks one number, got {num_blocks}")
    config = ReplayConfig(blocks, options.block_size)
    summary = replay_trace(trace, config, replace(options.trace, session_interval_s=None))
    if json_file is not None:
        head = {"trace": trace, "command": command_line(), "limit": options.trace.limit}
        write_json(json_file, {**head, **summary.as_dict()})
    if json_file != STANDARD_OUTPUT:
        print_summary(f"Replay of {Path(trace).name}, one request at a time", summary)
