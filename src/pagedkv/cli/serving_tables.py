"""The results of a replay on the virtual clock, for humans: tables on the standard output, with those of its tiers."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pagedkv.cli.parts_tables import print_parts
from pagedkv.cli.serving import ServedTrace
from pagedkv.cli.tables import (
    UNKNOWN_CONTENT,
    print_first,
    print_numbers,
    print_table,
    print_warnings,
    share,
)
from pagedkv.models.memory import GIB
from pagedkv.report.headlines import need_of
from pagedkv.simulation import ServingResult
from pagedkv.simulation.meters.meters import MISS_LABELS

__all__ = ["print_served", "print_tiers"]


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
