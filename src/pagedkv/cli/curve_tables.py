"""A capacity curve for humans: what the trace holds, and two tables with a row for each capacity."""

from collections.abc import Callable, Mapping
from functools import partial

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagedkv.capacity.curve import OPTIMAL, CapacityCurve
from pagedkv.capacity.model_curve import ModelCurve
from pagedkv.cli.tables import share

__all__ = ["print_curve", "print_model_curve"]


def print_curve(title: str, curve: CapacityCurve) -> None:
    """Print what was found out about a trace."""
    console = Console()
    console.print(_facts(title, curve))
    console.print(_hit_ratios(curve))
    console.print(_gaps(curve))


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


def _hit_ratios(curve: CapacityCurve) -> Table:
    columns = {name: partial(curve.hit_ratio, name) for name in curve.hits}
    return _by_capacity("Hit ratio by block", curve, columns)


def _gaps(curve: CapacityCurve) -> Table:
    columns = {name: partial(curve.policy_gap, name) for name in curve.hits if name != OPTIMAL}
    title = "Policy gaps, to the optimum; and the capacity gap, from there to the ideal"
    return _by_capacity(title, curve, {**columns, "capacity gap": curve.capacity_gap})


def _by_capacity(title: str, curve: CapacityCurve, columns: Mapping[str, Callable[[int], float]]) -> Table:
    """Show shares of all references, a row for each capacity: each column with its heading and what it shows."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("blocks", *columns):
        table.add_column(heading, justify="right", overflow="fold")
    for capacity in curve.capacities:
        table.add_row(f"{capacity:,}", *(f"{share_at(capacity):.2%}" for share_at in columns.values()))
    return table


def print_model_curve(title: str, curve: ModelCurve) -> None:
    """Print what the prompts of a trace hit in the memory of a model."""
    console = Console()
    facts = Table(title=escape(title), title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    facts.add_row("requests", f"{curve.num_requests:,}")
    facts.add_row("prompt tokens", f"{curve.num_prompt_tokens:,}")
    facts.add_row("ideal hit ratio", share(curve.ideal_ratio, curve.ideal_hit_tokens, curve.num_prompt_tokens))
    console.print(facts)
    table = Table(title="Hit ratio by token", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("GiB", *curve.points[0].num_blocks, *curve.hits, "not served"):
        table.add_column(escape(heading), justify="right", overflow="fold")
    for place, point in enumerate(curve.points):
        table.add_row(
            f"{point.memory_gib:g}",
            *(f"{num_blocks:,}" for num_blocks in point.num_blocks.values()),
            *(f"{curve.hit_ratio(policy, place):.2%}" for policy in curve.hits),
            f"{max(hits[place].num_unserved for hits in curve.hits.values()):,}",
        )
    console.print(table)
