"""What a replay on the virtual clock found out, for humans: tables on the standard output."""

from collections.abc import Iterable
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from pagedkv.cli.serving import ServedTrace
from pagedkv.cli.tables import print_table, share
from pagedkv.models.memory import GIB
from pagedkv.simulation import ServingResult

__all__ = ["print_served"]

FULL: Final = 0.9
IDLE: Final = 0.5
"""Shares of a pool that are live at its peak: beyond the one it is short of blocks, below the other it has too many."""
LATENCIES: Final = {
    "queueing_s": "in the queue",
    "first_token_s": "first token",
    "request_s": "whole request",
}

MISSES: Final = {
    "capacity": "evicted, or gone with a window",
    "changed": "the prompt differs from what is cached",
    "keys": "another salt, adapter, medium or epoch",
    "short": "no full block, or the last token",
    "new": "never stored",
    "being_computed": "being computed",
    "unknown": "never stored, or forgotten",
    "other": "other causes",
}


def print_served(title: str, served: ServedTrace) -> None:
    """Print what was found out."""
    result = served.result
    print_table(title, [*_requests(result), *_hits(result), *_steps(result), *_preemptions(result), *_here(served)])
    Console().print(_pools(result))
    Console().print(_evictions(result))
    Console().print(_misses(result))
    hint = _hint(result)
    if hint:
        Console().print(hint)
    Console().print(_latencies(result))
    Console().print(_waste(result))


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
    yield "time it took here, all in all", f"{served.wall_s:.1f} s, {ns_per_token:,.0f} ns a token"


def _pools(result: ServingResult) -> Table:
    title = "Blocks by pool: means over time, and the peak of live ones"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("pool", "all", "live", "peak", "cached", "free"):
        table.add_column(heading, justify="left" if heading == "pool" else "right")
    for name, pool in result.pools.items():
        means = (pool[level]["mean"] for level in ("num_cached", "num_free"))
        counts = [pool["num_blocks"], *pool["num_live"].values(), *means]
        table.add_row(name, *(f"{count:,.0f}" for count in counts))
        if pool["block_nbytes"] is not None:
            table.add_row("  GiB", *(f"{count * pool['block_nbytes'] / GIB:,.2f}" for count in counts))
    return table


def _hint(result: ServingResult) -> str:
    """Say so where one pool was full while another one's memory lay idle."""
    shares = {name: pool["num_live"]["peak"] / pool["num_blocks"] for name, pool in result.pools.items()}
    full = max(shares, key=lambda name: shares[name])
    idle = min(shares, key=lambda name: shares[name])
    if shares[full] < FULL or shares[idle] > IDLE:
        return ""
    blocks = ",".join(f"{name}={pool['num_blocks'] + 1}" for name, pool in result.pools.items())
    return (
        f"Pool {full} was {shares[full]:.0%} live at its peak, {idle} {shares[idle]:.0%}: to move memory from one to "
        f"the other, give each its own number, now --num-blocks {blocks}\n"
    )


def _evictions(result: ServingResult) -> Table:
    title = "Evicted blocks by pool, and those of them that no request ever hit"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("pool", "evicted", "never hit"):
        table.add_column(heading, justify="left" if heading == "pool" else "right")
    for name, pool in result.pools.items():
        num_evictions = pool["num_evictions"]
        never = f"{pool['num_never_reused'] / num_evictions:.1%}" if num_evictions else "-"
        table.add_row(name, f"{num_evictions:,}", never)
    return table


def _misses(result: ServingResult) -> Table:
    misses = result.misses
    table = Table(title="Prompt tokens that did not hit, by cause", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("cause")
    for heading in ("tokens", "share"):
        table.add_column(heading, justify="right")
    for cause, words in MISSES.items():
        num_tokens = misses["by_cause"][cause]
        if num_tokens:
            table.add_row(words, f"{num_tokens:,}", f"{num_tokens / misses['num_tokens']:.1%}")
    table.add_row("all", f"{misses['num_tokens']:,}", "")
    return table


def _latencies(result: ServingResult) -> Table:
    table = Table(title="Seconds", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, words in LATENCIES.items():
        values = result.latency[name].values()
        table.add_row(words, *("-" if value is None else f"{value:,.3f}" for value in values))
    return table


def _waste(result: ServingResult) -> Table:
    waste = result.waste
    table = Table(title="Slots without a token, mean over decode steps", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("reservation")
    table.add_column("waste", justify="right")
    table.add_row("blocks in use", f"{waste['mean']:.2%}")
    for block_size, ratio in waste["by_block_size"].items():
        table.add_row(f"blocks of {block_size}, none shared", f"{ratio:.2%}")
    for name, words in (
        ("exact", "contiguous, exactly the final length"),
        ("power_of_two", "contiguous, a power of two"),
        ("maximum", f"contiguous, {waste['max_length']:,} tokens"),
    ):
        table.add_row(words, f"{waste['contiguous'][name]:.2%}")
    return table
