"""``pagedkv replay``: runs a trace on the virtual clock, and by the engine if requested; its tables."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.interrupting import leaving_at_once
from pagedkv.cli.options import InspectOptions, command, flag, option
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.progress import working
from pagedkv.cli.serving import (
    CLOSED_LOOP,
    Follow,
    ServedTrace,
    ServingOptions,
    TierOptions,
    parts_as_dict,
    serve_trace,
)
from pagedkv.cli.tables import print_first, print_numbers, print_table, print_warnings, share, show, show_parts
from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.model_folder import require_model
from pagedkv.report.documents import Replay
from pagedkv.report.figures import need_of
from pagedkv.report.tables import replay_tables
from pagedkv.simulation import ServingResult

ENGINE: Final = "Engine"
NO_TIERS: Final = TierOptions()
ENGINE_NUM_TOKENS: Final = 2**16
"""Tokens of an engine's pools without --num-blocks: 64 MB for the demonstration's model."""


@command
def replay(  # noqa: PLR0913 - typer needs a parameter for each option
    trace: Annotated[str, typer.Argument(help=opt.LOG)],
    *,
    serving: ServingOptions,
    page: InspectOptions,
    engine: Annotated[
        bool,
        flag(
            "Also serve it with a model by the engine, step by step the same; predicted beside measured.", panel=ENGINE
        ),
    ] = False,
    model_path: Annotated[
        str | None, option("DIR", "Model for --engine. Default: that of pagedkv demo.", panel=ENGINE)
    ] = None,
    json_file: opt.JsonFile = None,
) -> None:
    """Serve a request trace on a virtual clock, with continuous batching, through the production block space.

    Requests arrive at the times of the trace; steps take the time of the cost model. The production block space decides
    what is hit, shared, preempted, evicted and wasted. docs/replay.md has the rules.

    For example:

    pagedkv replay mooncake_conversation.jsonl.gz --model llama-3.1-70b --gpu 8xh100

    pagedkv replay trace.jsonl.gz --model llama-3.1-8b --gpu h100 --eviction lru

    pagedkv replay requests.csv.gz --num-blocks 20000 --preemption swap --host-blocks 50000 --json result.json

    pagedkv replay trace.jsonl.gz --model llama-3.1-8b --gpu h100 --host-memory 64GiB --disk 1TB

    pagedkv replay trace.jsonl --engine --limit 200 --num-blocks 2000

    pagedkv replay trace.jsonl --num-blocks 2000 --inspect --inspect-speed 10

    zcat trace.jsonl.gz | pagedkv replay /dev/stdin --limit 1000 --samples 4 --json -
    """
    if json_file is not None:
        require_writable(json_file, trace)
    if engine and page.inspect:
        raise ConfigurationError(
            "--inspect shows the replay on the virtual clock: leave out --engine, or see pagedkv serve --inspect"
        )
    if engine:
        _replay_with_engine(trace, serving, model_path, json_file)
        return
    if model_path is not None:
        raise ConfigurationError("--model-path names the model of --engine: give both; --model gives only sizes")
    if page.inspect:
        _replay_on_page(trace, serving, json_file, page)
    else:
        _replay(trace, serving, json_file)


def _replay(trace: str, serving: ServingOptions, json_file: Path | None, follow: Follow | None = None) -> None:
    served = serve_trace(trace, serving, follow)
    if json_file is not None:
        write_json(json_file, {"trace": trace, "command": command_line(), **served.as_dict()})
    if json_file != STANDARD_OUTPUT:
        print_served(f"Replay of {Path(trace).name}", served)


def _replay_on_page(trace: str, serving: ServingOptions, json_file: Path | None, options: InspectOptions) -> None:
    """Show the replay as it runs, and after its end until Ctrl-C."""
    options.require_free()
    serving.configuration()
    with working("Loading the page's server"), leaving_at_once(), needing("server", "pagedkv replay --inspect"):
        from pagedkv.cli.replay_page import replay_page  # noqa: PLC0415 - needs torch, and not without a page

    with replay_page(Path(trace).name, options) as page:
        _replay(trace, serving, json_file, page.follow)
        sys.stdout.flush()
        page.stay()


def _replay_with_engine(trace: str, options: ServingOptions, model: str | None, json_file: Path | None) -> None:
    options = _own_model(options)
    options.configuration()
    with options.trace.open(trace) as opened:
        requests = list(options.trace.requests(opened))
    if model is not None:
        require_model(model)
    with working("Loading torch"), leaving_at_once(), needing("hf", "pagedkv replay --engine"):
        from pagedkv.cli.engine_replay import replay_with_engine  # noqa: PLC0415 - checks come before torch

    comparison = replay_with_engine(Path(trace).name, requests, options, model)
    if json_file is not None:
        write_json(json_file, {"trace": trace, "command": command_line(), **comparison.as_dict()})
    if json_file != STANDARD_OUTPUT:
        print_warnings(comparison.warnings)
        title = f"Replay of {Path(trace).name}; seconds predicted by the cost model {comparison.seconds}"
        print_numbers(title, ("", "predicted", "measured"), comparison.rows())


def _own_model(options: ServingOptions) -> ServingOptions:
    """Refuse options that describe another model, and choose pools that a small model can fill."""
    if options.model or options.gpu or options.memory is not None or options.kv_dtype or options.beams:
        raise ConfigurationError(
            "--engine runs a model of its own, without beams: it takes no --model, --gpu, --memory, --kv-dtype and "
            "--beams; name its model by --model-path"
        )
    if options.tier != NO_TIERS:
        raise ConfigurationError(
            "--engine serves without tiers here: leave out --host-memory, --disk and their options"
        )
    if options.num_blocks is not None:
        return options
    return replace(options, num_blocks=str(max(2, ENGINE_NUM_TOKENS // max(1, options.block_size))))


def print_served(title: str, served: ServedTrace) -> None:
    """Print the results."""
    result = served.result
    print_first(need_of(result.as_dict()).sentence)
    print_warnings(served.warnings)
    facts = [("read as", served.read_as)] if served.read_as else []
    facts += [("arrivals", CLOSED_LOOP)] if served.is_closed else []
    facts += [
        *_requests(result),
        *_hits(result),
        ("eviction policy (--eviction)", str(result.config["policy"])),
        ("cost model of the seconds", served.seconds.in_short),
        *_steps(result),
        *_here(served),
    ]
    print_table(title, facts)
    for table in replay_tables(cast("Replay", served.as_dict())):
        show(table)
    show_parts(parts_as_dict(served.parts))


def _requests(result: ServingResult) -> Iterable[tuple[str, str]]:
    requests = result.requests
    yield "requests", f"{requests['num_requests']:,}"
    yield "rejected, too large for the pool", f"{requests['num_rejected']:,}"
    yield "prompt tokens", f"{requests['num_prompt_tokens']:,}"
    yield "output tokens", f"{requests['num_output_tokens']:,}"


def _hits(result: ServingResult) -> Iterable[tuple[str, str]]:
    hits = result.hits
    yield (
        "hit ratio by block",
        share(hits["block_hit_ratio"], hits["num_hit_blocks"], hits["num_prompt_blocks"]),
    )
    yield (
        "hit ratio by token",
        share(hits["token_hit_ratio"], hits["num_hit_tokens"], result.requests["num_prompt_tokens"]),
    )


def _steps(result: ServingResult) -> Iterable[tuple[str, str]]:
    steps = result.steps
    yield "steps", f"{steps['num_steps']:,}, of which {steps['num_decode_steps']:,} decode"
    yield "virtual time", f"{steps['virtual_s']:,.1f} s, busy {steps['busy_s']:,.1f} s"
    yield "sequences running", f"mean {steps['mean_sequences']:,.1f}, peak {steps['peak_sequences']:,}"
    if result.sharing["mean_saving"] is not None:
        yield "blocks saved by sharing among samples or beams", f"{result.sharing['mean_saving']:.2%}"


def _here(served: ServedTrace) -> Iterable[tuple[str, str]]:
    num_tokens = served.result.requests["num_prompt_tokens"] + served.result.requests["num_output_tokens"]
    ns_per_token = served.wall_s * 1e9 / max(1, num_tokens)
    yield "time of this run, in all", f"{served.wall_s:.1f} s, {ns_per_token:,.0f} ns a token"
