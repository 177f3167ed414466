"""Tiers below the device: hits by medium, and loads, reads and writes of each tier."""

from pagedkv.report.captions import TABLES
from pagedkv.report.documents import ReportRun, TierCounts, Tiers, has_known_content
from pagedkv.report.elements import Cell, Table
from pagedkv.report.number_text import COUNT, GIB, RATIO, SECONDS

__all__ = ["tier_tables"]


def tier_tables(run: ReportRun) -> list[Table]:
    """List the tables of a run's tiers; none without tiers."""
    tiers = run.replay.get("tiers")
    if tiers is None:
        return []
    return [*([_hits(tiers)] if has_known_content(run.replay) else []), _media(tiers)]


def _hits(tiers: Tiers) -> Table:
    rows = [
        (Cell(medium), Cell(COUNT.text(hits["num_tokens"])), Cell(RATIO.text(hits["share"])))
        for medium, hits in tiers["hits"].items()
    ]
    return Table(TABLES["tier_hits"], ("medium", "tokens", "share of prompts"), tuple(rows))


def _media(tiers: Tiers) -> Table:
    columns = ("tier", "loads", "tokens loaded", "mean load", "computed instead of loaded", "written", "read", "kept")
    return Table(TABLES["tiers"], columns, tuple(_row(medium, each) for medium, each in tiers["media"].items()))


def _row(medium: str, counts: TierCounts) -> tuple[Cell, ...]:
    mean_s = counts["mean_load_s"]
    return (
        Cell(medium),
        Cell(COUNT.text(counts["num_loads"])),
        Cell(COUNT.text(counts["num_loaded_tokens"])),
        Cell("-" if mean_s is None else SECONDS.text(mean_s)),
        Cell(COUNT.text(counts["num_computed_instead"])),
        *(Cell(GIB.text(nbytes)) for nbytes in (counts["written_nbytes"], counts["read_nbytes"], counts["nbytes"])),
    )
