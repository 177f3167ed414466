"""Results for humans: tables on the standard output."""

from collections.abc import Iterable
from dataclasses import fields

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagedkv.simulation.one_at_a_time.summary import ReplaySummary
from pagedkv.traces.workload import ConversationWorkload

__all__ = ["print_summary", "print_table", "print_workload", "share"]


def print_summary(title: str, summary: ReplaySummary) -> None:
    """Print what a replay found out."""
    counts = summary.counts
    print_table(
        title,
        (
            ("blocks in the pool", f"{summary.num_blocks:,}, the null block included"),
            ("tokens a block", f"{summary.block_size:,}"),
            ("requests", f"{counts.num_requests:,}"),
            ("rejected, larger than the pool", f"{counts.num_rejected:,}"),
            ("prompt tokens", f"{counts.num_prompt_tokens:,}"),
            ("output tokens", f"{counts.num_output_tokens:,}"),
            ("hit ratio by block", share(summary.block_hit_ratio, counts.num_hit_blocks, counts.num_prompt_blocks)),
            ("hit ratio by token", share(summary.token_hit_ratio, counts.num_hit_tokens, counts.num_prompt_tokens)),
            ("blocks in use, peak", f"{counts.peak_blocks_in_use:,}"),
            ("blocks in use, mean over requests", f"{summary.mean_blocks_in_use:,.1f}"),
            ("waste, slots without a token", f"{summary.waste:.2%}"),
            ("evictions", f"{summary.num_evictions:,}"),
            (
                "bookkeeping time",
                f"{summary.timing.bookkeeping_s:.2f} s, {summary.timing.ns_per_token:.1f} ns a token",
            ),
        ),
    )


def print_workload(workload: ConversationWorkload) -> None:
    """Print the parameters of a generated workload."""
    parameters = ((field.name, str(getattr(workload, field.name))) for field in fields(workload))
    print_table("Generated conversations", parameters)


def share(ratio: float, part: int, whole: int) -> str:
    """Write a ratio with the numbers behind it."""
    return f"{ratio:.2%} ({part:,} of {whole:,})"


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print two columns."""
    table = Table(title=escape(title), title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)
