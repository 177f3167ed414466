"""The result for humans: a recommendation on one screen, and the table of all points."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from pagedkv.cli.parts_tables import print_parts
from pagedkv.cli.tables import print_first, print_numbers, print_warnings
from pagedkv.report.documents import Plan, PlanPointDocument, traffic_of
from pagedkv.report.key_figures import rate
from pagedkv.simulation.planning.figures import PartFigures

__all__ = ["print_plan"]

WHOLE_FROM: Final = 100
"""Seconds from this value on are written without decimals, never with an exponent."""
VERDICTS: Final = {"holds": "yes", "too short": "?"}
BINDS: Final = {"queue": "queue", "ttft": "TTFT", "tpot": "TPOT", "rejected": "size"}
"""Words for the causes of a load that does not hold."""
CLUSTERS: Final = (
    "Clusters, at the highest load that holds, else the lowest that was run, compared with the same requests routed in "
    "turn and with one pool of all their memory; imbalance: tokens computed in a minute, the largest over the mean; "
    "TTFT in seconds"
)
CLUSTER_HEADINGS: Final = ("setting", "load", "routing", "hit ratio", "imbalance", "TTFT p50", "TTFT p99")
INTERVALS: Final = (
    "In brackets: 95 % intervals of paired differences, by eighths of the trace. --json has those of both halves."
)


def print_plan(plan: Plan, *, has_every_load: bool) -> None:
    """Print the results.

    Args:
        plan: the document.
        has_every_load: whether the table has all loads that were run; else each setting has one row.
    """
    print_first(plan["need"]["sentence"])
    print_warnings(plan["warnings"])
    console = Console()
    console.print()
    console.print(f"[bold]{escape(plan['headline'])}.[/bold]", highlight=False)
    console.print()
    for reason in plan["reasons"]:
        console.print(f"- {escape(reason[:1].upper() + reason[1:])}.", highlight=False)
    console.print()
    console.print(f"Arrivals: {escape(plan['arrivals'])}. {INTERVALS}", style="dim", highlight=False)
    console.print()
    console.print(f"The trace was read as {plan['read_as']}.", highlight=False, markup=False)
    console.print()
    _print_points(plan, has_every_load=has_every_load)
    if any(setting["beside"] for setting in plan["settings"]):
        print_numbers(CLUSTERS, CLUSTER_HEADINGS, _cluster_rows(plan), num_keys=2)
    has_bounds = any(bound is not None for bound in plan["bounds"].values())
    kinds = ("by_tenant", "by_window")
    parts = [PartFigures.from_dict(part) for kind in kinds for part in plan["divided"].get(kind, ())]
    print_parts(parts, has_bounds=has_bounds)


def _print_points(plan: Plan, *, has_every_load: bool) -> None:
    """Print a row for each setting, at its highest load that holds, else at its lowest; or a row for each load."""
    has_bounds = any(bound is not None for bound in plan["bounds"].values())
    points = plan["points"] if has_every_load else list(_points_at_best(plan))
    which = "at each load" if has_every_load else "at the highest load that holds, else the lowest that was run"
    left_out = len(plan["points"]) - len(points)
    more = f" (--every-load has {left_out:,} more)" if left_out else ""
    title = (
        f"Settings for {plan['model']}, {which}{more}; TTFT, TPOT and ITL in seconds; * marks the headline's setting; "
        "holds: yes, or the cause if not (? if the trace is too short to decide); answers/s as in the headline"
    )
    rows = (_row(point, has_bounds=has_bounds) for point in points)
    print_numbers(title, _headings(has_bounds=has_bounds), rows, num_keys=2)


def _points_at_best(plan: Plan) -> Iterator[PlanPointDocument]:
    """Yield each setting's run at the highest load that holds, or at the lowest load."""
    for setting in plan["settings"]:
        yield _at_best(plan, setting["choices"], setting["held"])


def _at_best(plan: Plan, choices: Mapping[str, str], held: float | None) -> PlanPointDocument:
    runs = [point for point in plan["points"] if point["choices"] == choices]
    load = min(point["load"] for point in runs) if held is None else held
    return next(point for point in runs if point["load"] == load)


def _headings(*, has_bounds: bool) -> list[str]:
    return [
        "setting",
        "load",
        "holds",
        "GiB",
        "answers/s",
        *(["good"] if has_bounds else []),
        "tokens/s",
        "hit ratio",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "ITL p99",
        "preempted",
    ]


def _row(point: PlanPointDocument, *, has_bounds: bool) -> tuple[str, ...]:
    figures = point["figures"]
    good = figures["num_good"] / figures["num_requests"] if figures["num_requests"] else 0.0
    return (
        f"{'* ' if point['is_chosen'] else ''}{', '.join(point['choices'].values())}",
        f"{point['load']:g}x",
        _holds(point),
        f"{point['kv_gib']:,.1f}",
        f"{traffic_of(figures):.3g}",
        *([f"{good:.1%}"] if has_bounds else []),
        rate(figures["output_tokens_per_s"]),
        "unknown" if figures["hit_ratio"] is None else f"{figures['hit_ratio']:.1%}",
        _seconds(figures["ttft_s"], "p50"),
        _seconds(figures["ttft_s"], "p99"),
        _seconds(figures["tpot_s"], "p50"),
        _seconds(figures["tpot_s"], "p99"),
        _seconds(figures["itl_s"], "p99"),
        f"{figures['num_preemptions']:,}",
    )


def _cluster_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Return the rows of each cluster: its own, and those for comparison."""
    for setting in (each for each in plan["settings"] if each["beside"]):
        point = _at_best(plan, setting["choices"], setting["held"])
        figures = point["figures"]
        key = (", ".join(point["choices"].values()), f"{point['load']:g}x")
        own = setting["choices"].get("routing", "prefix")
        yield *key, own, *_cluster_cells(figures["hit_ratio"], figures["cluster"]["imbalance"], figures["ttft_s"])
        for each in setting["beside"]:
            if each["name"] != own:
                yield *key, each["name"], *_cluster_cells(each["hit_ratio"], each["imbalance"], each["ttft_s"])


def _cluster_cells(
    hit_ratio: float | None, imbalance: float | None, ttft_s: dict[str, float | None] | None
) -> tuple[str, ...]:
    return (
        "unknown" if hit_ratio is None else f"{hit_ratio:.1%}",
        "-" if imbalance is None else f"{imbalance:.2f}",
        *("-" if ttft_s is None else _seconds(ttft_s, name) for name in ("p50", "p99")),
    )


def _holds(point: PlanPointDocument) -> str:
    """Return whether a load holds, or the cause if not, in a word or two."""
    return VERDICTS.get(point["verdict"]) or ", ".join(BINDS[bind] for bind in point["binds"])


def _seconds(times: dict[str, Any], name: str) -> str:
    seconds = times[name]
    if seconds is None:
        return "-"
    return f"{seconds:,.0f}" if seconds >= WHOLE_FROM else f"{seconds:.3g}"
