"""Reuse and eviction: how long blocks were free before they were hit or evicted."""

from typing import Final

from pagedkv.report.captions import MISSES, PLOTS, SECTIONS, TABLES
from pagedkv.report.documents import AgeHistogram, Misses, Pool, ReportRun, has_known_content
from pagedkv.report.drawing import COUNT_TICKS, FILLS, HALF, Figure, Fill, draw_both, only_axes, read_out
from pagedkv.report.elements import Cell, Plot, Section, Table
from pagedkv.report.number_text import COUNT, RATIO, edge
from pagedkv.report.tier_tables import tier_tables

__all__ = ["age_section"]

UNKNOWN: Final = "The trace has lengths but no content: hits are unknown."


def age_section(run: ReportRun) -> Section:
    """Draw and list the ages in every pool; without ages, or without known content, explain why there are none."""
    if not has_known_content(run.replay):
        return Section("ages", SECTIONS["ages"], (UNKNOWN,))
    pools = run.replay["pools"]
    several = len(pools) > 1
    sentences: list[str] = []
    plots: list[Plot] = []
    tables: list[Table] = []
    for number, (name, pool) in enumerate(pools.items()):
        suffix = f", pool {name}" if several else ""
        sentences.append(_sentence(pool, suffix))
        for key, fill in (("hits_by_age", FILLS[0]), ("evictions_by_age", FILLS[1])):
            histogram = pool["hits_by_age"] if key == "hits_by_age" else pool["evictions_by_age"]
            if any(histogram["num_blocks"]):
                plots.append(_bars(f"{key}-{number}", key, histogram, fill, suffix))
        if any(pool["hits_by_age"]["num_blocks"]) or any(pool["evictions_by_age"]["num_blocks"]):
            tables.append(_table(pool, suffix))
    if "misses" in run.replay:
        sentences.append(_missed(run.replay["misses"]))
        tables.append(_miss_table(run.replay["misses"]))
    tables += tier_tables(run)
    return Section("ages", SECTIONS["ages"], tuple(sentences), tuple(plots), tuple(tables))


def _missed(misses: Misses) -> str:
    """Return the cause of most of the missed tokens."""
    if not misses["num_tokens"]:
        return "No prompt token was missed."
    counts = {cause: misses["by_cause"].get(cause, 0) for cause in MISSES}
    most = max(counts, key=lambda cause: counts[cause])
    ratio = counts[most] / misses["num_tokens"]
    caption = MISSES[most]
    return (
        f"{COUNT.text(misses['num_tokens'])} prompt tokens did not hit, most of them ({RATIO.text(ratio)}) for one "
        f"cause. {caption.title}: {caption.sentence[0].lower()}{caption.sentence[1:]}"
    )


def _miss_table(misses: Misses) -> Table:
    return Table(
        TABLES["misses"],
        ("cause", "tokens", "meaning"),
        tuple(
            (Cell(caption.title), Cell(COUNT.text(misses["by_cause"].get(cause, 0))), Cell(caption.sentence))
            for cause, caption in MISSES.items()
        ),
    )


def _sentence(pool: Pool, suffix: str) -> str:
    num_hits = sum(pool["hits_by_age"]["num_blocks"])
    num_evictions = pool["num_evictions"]
    hits = f"{COUNT.text(num_hits)} blocks were hit{suffix}" if num_hits else f"No block was hit{suffix}"
    if not num_evictions:
        return f"{hits}; none was evicted."
    never = pool["num_never_reused"]
    return (
        f"{hits}; {COUNT.text(num_evictions)} were evicted, {COUNT.text(never)} of them "
        f"({RATIO.text(never / num_evictions)}) without having been hit once."
    )


def _bars(key: str, kind: str, histogram: AgeHistogram, fill: Fill, suffix: str) -> Plot:
    numbers = [float(number) for number in histogram["num_blocks"]]
    edges_s = histogram["upper_edges_s"]
    labels = [f"> {edges_s[-2]:,g}" if edge_s is None and len(edges_s) > 1 else _short(edge_s) for edge_s in edges_s]

    def paint(figure: Figure) -> None:
        axes = only_axes(figure, "age in seconds, at most", "blocks")
        axes.bar(range(len(numbers)), numbers, color=fill.colour, hatch=fill.hatch, width=0.8)
        axes.set_xticks(range(len(numbers)), labels, rotation=45, ha="right", rotation_mode="anchor")
        axes.yaxis.set_major_formatter(COUNT_TICKS)
        axes.grid(visible=False, axis="x")
        headings = [f"{label} s" for label in labels]
        read_out(axes, range(len(numbers)), headings, [[COUNT.text(number) for number in histogram["num_blocks"]]])

    caption = PLOTS[kind]
    return Plot(
        caption.title + suffix,
        caption.sentence,
        *draw_both(key, HALF, f"Bars: {caption.title.lower()}, blocks in each range of ages", paint),
    )


def _short(edge_s: float | None) -> str:
    return "any" if edge_s is None else f"{edge_s:,g}"


def _table(pool: Pool, suffix: str) -> Table:
    hits, evictions = pool["hits_by_age"], pool["evictions_by_age"]
    lower_edges_s = (None, *hits["upper_edges_s"][:-1])
    return Table(
        TABLES["ages"] + suffix,
        ("age, seconds", "hits", "evictions"),
        tuple(
            (Cell(edge(upper_s, lower_s)), Cell(COUNT.text(num_hits)), Cell(COUNT.text(num_evictions)))
            for upper_s, lower_s, num_hits, num_evictions in zip(
                hits["upper_edges_s"], lower_edges_s, hits["num_blocks"], evictions["num_blocks"], strict=True
            )
        ),
    )
