"""A capacity curve for humans: what the trace holds, and a row for each capacity."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagedkv.cli.tables import share
from pagedkv.replay.capacity.curve import OPTIMAL, CapacityCurve

__all__ = ["print_curve"]


def print_curve(title: str, curve: CapacityCurve) -> None:
    """Print what was found out about a trace."""
    console = Console()
    console.print(_facts(title, curve))
    console.print(_points(curve))


def _facts(title: str, curve: CapacityCurve) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    table.add_row("tokens a block", f"{curve.block_size:,}")
    table.add_row("requests", f"{curve.num_requests:,}")
    table.add_row("block references", f"{curve.num_block_refs:,}")
    table.add_row("distinct blocks", f"{curve.num_unique_blocks:,}")
    table.add_row("ideal hit ratio by block", share(curve.ideal_block_ratio, curve.ideal_hits, curve.num_block_refs))
    table.add_row(
        "ideal hit ratio by token", share(curve.ideal_token_ratio, curve.ideal_hit_tokens, curve.num_prompt_tokens)
    )
    table.add_row("content ceiling, never seen before", f"{curve.content_ceiling:.2%}")
    for fraction, capacity in curve.capacity_for.items():
        table.add_row(f"LRU reaches {float(fraction):.0%} of the ideal at", f"{capacity:,} block{'s'[: capacity > 1]}")
    return table


def _points(curve: CapacityCurve) -> Table:
    online = [name for name in curve.hits if name != OPTIMAL]
    table = Table(title="Hit ratio by block, and the gaps to the ideal", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("blocks", *curve.hits, *(f"policy gap, {name}" for name in online), "capacity gap"):
        table.add_column(heading, justify="right", overflow="fold")
    for capacity in curve.capacities:
        ratios = [
            *(curve.hit_ratio(name, capacity) for name in curve.hits),
            *(curve.policy_gap(name, capacity) for name in online),
            curve.capacity_gap(capacity),
        ]
        table.add_row(f"{capacity:,}", *(f"{ratio:.2%}" for ratio in ratios))
    return table
