"""``pagedkv replay``: runs a trace on the virtual clock, and by the engine if requested; its tables."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.interrupting import leaving_at_once
from pagedkv.cli.options import InspectOptions, command, flag, option
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.progress import working
from pagedkv.cli.serving import Follow, ServedTrace, ServingOptions, TierOptions, print_parts, serve_trace
from pagedkv.cli.tables import (
    UNKNOWN_CONTENT,
    print_first,
    print_numbers,
    print_table,
    print_warnings,
    share,
)
from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.model_folder import require_model
from pagedkv.models.memory import GIB
from pagedkv.report.figures import need_of
from pagedkv.simulation import ServingResult
from pagedkv.simulation.meters import MISS_LABELS

ENGINE: Final = "Engine"
NO_TIERS: Final = TierOptions()
ENGINE_NUM_TOKENS: Final = 2**16
"""Tokens of an engine's pools without --num-blocks: 64 MB for the demonstration's model."""


@command
def replay(  # noqa: PLR0913 - typer needs a parameter for each option
    trace: Annotated[str, typer.Argument(help="Trace file, plain or gzip.")],
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


def print_tiers(result: ServingResult) -> None:
    """Print the tiers, if there are any."""
    if result.tiers is None:
        return
    if result.requests["num_with_content"]:
        rows = [
            (medium, f"{hits['num_tokens']:,}", f"{hits['share']:.2%}") for medium, hits in result.tiers["hits"].items()
        ]
        print_numbers("Prompt tokens that hit, by the medium that had them", ("medium", "tokens", "share"), rows)
    media = result.tiers["media"]
    print_numbers(
        "Loads from tiers, and loads left out since computing was predicted to be faster",
        ("tier", "loads", "tokens", "mean s", "computed instead", "tokens computed instead"),
        [(medium, *_loads(counts)) for medium, counts in media.items()],
    )
    print_numbers(
        "GiB of tiers: kept at the end, written, read; and evicted entries",
        ("tier", "kept", "written", "read", "evicted"),
        [(medium, *_bytes(counts)) for medium, counts in media.items()],
    )


def _loads(counts: Mapping[str, Any]) -> tuple[str, ...]:
    mean_s = counts["mean_load_s"]
    return (
        f"{counts['num_loads']:,}",
        f"{counts['num_loaded_tokens']:,}",
        "-" if mean_s is None else f"{mean_s:,.4f}",
        f"{counts['num_computed_instead']:,}",
        f"{counts['num_tokens_computed_instead']:,}",
    )


def _bytes(counts: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = (counts["nbytes"], counts["written_nbytes"], counts["read_nbytes"])
    return (*(f"{nbytes / GIB:,.2f}" for nbytes in sizes), f"{counts['num_evicted']:,}")


LATENCIES: Final = {
    "queueing_s": "admission",
    "first_token_s": "first token",
    "request_s": "last token",
}


def print_served(title: str, served: ServedTrace) -> None:
    """Print the results."""
    result = served.result
    print_first(need_of(result.as_dict()).sentence)
    print_warnings(served.warnings)
    print_table(
        title,
        [
            *([("read as", served.read_as)] if served.read_as else []),
            *_requests(result),
            *_hits(result),
            ("eviction policy (--eviction)", str(result.config["policy"])),
            ("cost model of the seconds", served.seconds.in_short),
            *_steps(result),
            *_preemptions(result),
            *_here(served),
        ],
    )
    _print_pools(result)
    _print_evictions(result)
    _print_misses(result)
    print_tiers(result)
    _print_latencies(served)
    _print_waste(result)
    print_parts(served.parts)


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


def _preemptions(result: ServingResult) -> Iterable[tuple[str, str]]:
    preemptions = result.preemptions
    again = f"{preemptions['num_recomputed_tokens']:,} tokens again"
    yield "preemptions by recompute", f"{preemptions['num_recompute']:,}, {again}"
    moved = f"{preemptions['num_swapped_out_blocks']:,} blocks out, {preemptions['num_swapped_in_blocks']:,} in"
    yield "preemptions by swap", f"{preemptions['num_swap']:,}, {moved}"
    if result.sharing["mean_saving"] is not None:
        yield "blocks saved by sharing among samples or beams", f"{result.sharing['mean_saving']:.2%}"


def _here(served: ServedTrace) -> Iterable[tuple[str, str]]:
    num_tokens = served.result.requests["num_prompt_tokens"] + served.result.requests["num_output_tokens"]
    ns_per_token = served.wall_s * 1e9 / max(1, num_tokens)
    yield "time of this run, in all", f"{served.wall_s:.1f} s, {ns_per_token:,.0f} ns a token"


def _print_pools(result: ServingResult) -> None:
    rows: list[tuple[str, ...]] = []
    for name, pool in result.pools.items():
        means = (pool[level]["mean"] for level in ("num_cached", "num_free"))
        counts = [pool["num_blocks"], *pool["num_live"].values(), *means]
        rows.append((name, *(f"{count:,.0f}" for count in counts)))
        if pool["block_nbytes"] is not None:
            rows.append(("  GiB", *(f"{count * pool['block_nbytes'] / GIB:,.2f}" for count in counts)))
    title = "Blocks by pool: means over time, and the peak of live ones"
    print_numbers(title, ("pool", "all", "live", "peak", "cached", "free"), rows)


def _print_evictions(result: ServingResult) -> None:
    rows = [
        (name, f"{pool['num_evictions']:,}", _never_hit(result, pool["num_never_reused"], pool["num_evictions"]))
        for name, pool in result.pools.items()
    ]
    title = "Evicted blocks by pool, and those of them that no request ever hit"
    print_numbers(title, ("pool", "evicted", "never hit"), rows)


def _never_hit(result: ServingResult, num_never_reused: int, num_evictions: int) -> str:
    if not num_evictions:
        return "-"
    return f"{num_never_reused / num_evictions:.1%}" if result.requests["num_with_content"] else "unknown"


def _print_misses(result: ServingResult) -> None:
    misses = result.misses
    title = "Prompt tokens that did not hit, by cause"
    if not result.requests["num_with_content"]:
        print_table(title, [("all", UNKNOWN_CONTENT)])
        return
    rows = [
        (words, f"{num_tokens:,}", f"{num_tokens / misses['num_tokens']:.1%}")
        for cause, words in MISS_LABELS.items()
        if (num_tokens := misses["by_cause"][cause])
    ]
    print_numbers(title, ("cause", "tokens", "share"), [*rows, ("all", f"{misses['num_tokens']:,}", "")])


def _print_latencies(served: ServedTrace) -> None:
    result = served.result
    rows = [
        (words, *("-" if value is None else f"{value:,.3f}" for value in result.latency[name].values()))
        for name, words in LATENCIES.items()
    ]
    title = f"Seconds, by the cost model {served.seconds.in_short}"
    print_numbers(title, ("from arrival to", "mean", "p50", "p90", "p99", "max"), rows)


def _print_waste(result: ServingResult) -> None:
    waste = result.waste
    rows = [("blocks in use", f"{waste['mean']:.2%}")]
    rows += [
        (f"blocks of {block_size}, none shared", f"{ratio:.2%}") for block_size, ratio in waste["by_block_size"].items()
    ]
    rows += [
        (words, f"{waste['contiguous'][name]:.2%}")
        for name, words in (
            ("exact", "contiguous, exactly the final length"),
            ("power_of_two", "contiguous, a power of two"),
            ("maximum", f"contiguous, {waste['max_length']:,} tokens"),
        )
    ]
    print_numbers("Slots without a token, mean over decode steps", ("reservation", "waste"), rows)
