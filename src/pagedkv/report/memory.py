"""The section on memory: waste, sharing, the pools and the tiers."""

from typing import Final

from pagedkv.report.captions import PLOTS, SECTIONS, TABLES
from pagedkv.report.documents import Pool, ReportRun, TierCounts, Tiers, Waste, has_known_content
from pagedkv.report.drawing import (
    FILLS,
    NARROW_PANELS,
    PERCENT_TICKS,
    WIDE,
    Axes,
    Figure,
    Fill,
    draw_both,
    fill_legend,
    panels,
)
from pagedkv.report.elements import Cell, Plot, Section, Table
from pagedkv.report.key_figures import COUNT, GIB, MEAN, RATIO, SECONDS, level_nbytes

__all__ = ["memory_section", "tier_tables"]


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


BLOCKS_FILL: Final = FILLS[0]
RESERVED_FILL: Final = FILLS[1]
LEVELS: Final = ("live", "cached", "free")
ROOM_FOR_LABELS: Final = 0.12
LABEL_SIZE: Final = 11
"""Size in points, small enough for seven bars with two decimals each."""


def memory_section(run: ReportRun) -> Section:
    """Draw waste, and list waste and pools."""
    waste = run.replay["waste"]
    pools = run.replay["pools"]
    tables = [_waste_table(waste), _pool_table(pools)]
    if any(pool["block_nbytes"] is not None for pool in pools.values()):
        tables.append(_nbytes_table(pools))
    shares = {label: share for label, share in _shares(waste).items() if share is not None}
    return Section(
        "memory",
        SECTIONS["memory"],
        (_sharing_sentence(run), *(() if shares else ("No token was decoded, so there is no waste to show.",))),
        (_waste_plot(shares, len(waste["by_block_size"])),) if shares else (),
        tuple(tables),
    )


def _sharing_sentence(run: ReportRun) -> str:
    sharing = run.replay["sharing"]
    if sharing["mean_saving"] is None:
        return "No request had more than one sequence, so none shared blocks with a sibling."
    return (
        f"Sequences of one request shared blocks: this saved {RATIO.text(sharing['mean_saving'])} of the blocks they "
        f"would have had without sharing, over {COUNT.text(sharing['num_decode_steps'])} decode steps."
    )


def _shares(waste: Waste) -> dict[str, float | None]:
    """Waste of each scheme, blocks first, then the contiguous reservations."""
    contiguous = waste["contiguous"]
    maximum = "maximum" if waste["max_length"] is None else f"maximum\n{COUNT.text(waste['max_length'])}"
    return {
        **{f"{int(size):,}": share for size, share in waste["by_block_size"].items()},
        "exact\nlength": contiguous["exact"],
        "power\nof two": contiguous["power_of_two"],
        maximum: contiguous["maximum"],
    }


def _waste_plot(shares: dict[str, float], num_block_sizes: int) -> Plot:
    """Draw blocks and reservations on separate scales; on that of reservations all block sizes would look alike."""
    named = list(shares.items())
    parts = [
        (dict(named[:num_block_sizes]), BLOCKS_FILL, "tokens a block"),
        (dict(named[num_block_sizes:]), RESERVED_FILL, "length reserved in one piece"),
    ]
    drawn = [part for part in parts if part[0]]

    def paint(figure: Figure) -> None:
        for axes, (bars, fill, label) in zip(panels(figure, len(drawn)), drawn, strict=True):
            _draw_bars(axes, bars, fill, label)

    caption = PLOTS["waste"]
    label = "Bars of the waste of each block size and of each reservation in one piece"
    return Plot(
        caption.title,
        caption.sentence,
        *draw_both("waste", WIDE, label, paint, NARROW_PANELS),
        (
            fill_legend("waste-legend-blocks", BLOCKS_FILL, "blocks"),
            fill_legend("waste-legend-reserved", RESERVED_FILL, "reserved in one piece"),
        ),
        wide=True,
    )


def _draw_bars(axes: Axes, shares: dict[str, float], fill: Fill, label: str) -> None:
    places = range(len(shares))
    bars = axes.bar(places, list(shares.values()), color=fill.colour, hatch=fill.hatch, width=0.7)
    axes.bar_label(bars, [RATIO.text(share) for share in shares.values()], padding=2, fontsize=LABEL_SIZE)
    axes.set_xticks(places, list(shares))
    axes.set_xlabel(label)
    axes.set_ylabel("slots without a token")
    axes.yaxis.set_major_formatter(PERCENT_TICKS)
    axes.grid(visible=False, axis="x")
    axes.margins(y=ROOM_FOR_LABELS)


def _waste_table(waste: Waste) -> Table:
    rows = [("blocks as configured, measured", waste["mean"])]
    rows += [
        (f"own blocks for each sequence, size {int(size):,}", share) for size, share in waste["by_block_size"].items()
    ]
    contiguous = waste["contiguous"]
    rows += [
        ("in one piece: final length", contiguous["exact"]),
        ("in one piece: power of two", contiguous["power_of_two"]),
        (f"in one piece: maximum, {COUNT.text(waste['max_length'])}", contiguous["maximum"]),
    ]
    return Table(
        TABLES["waste"], ("scheme", "waste"), tuple((Cell(name), Cell(RATIO.text(share))) for name, share in rows)
    )


def _pool_table(pools: dict[str, Pool]) -> Table:
    columns = ("pool", "blocks", *(f"{level}, {what}" for level in LEVELS for what in ("mean", "peak")), "evictions")
    return Table(
        TABLES["pools"],
        (*columns, "never reused"),
        tuple(
            (
                Cell(name),
                Cell(COUNT.text(pool["num_blocks"])),
                *(
                    Cell(text)
                    for level in (pool["num_live"], pool["num_cached"], pool["num_free"])
                    for text in (MEAN.text(level["mean"]), COUNT.text(level["peak"]))
                ),
                Cell(COUNT.text(pool["num_evictions"])),
                Cell(COUNT.text(pool["num_never_reused"])),
            )
            for name, pool in pools.items()
        ),
    )


def _nbytes_table(pools: dict[str, Pool]) -> Table:
    columns = ("pool", "bytes a block", "pool, all blocks")
    return Table(
        TABLES["pool_nbytes"],
        (*columns, *(f"{level}, {what}" for level in LEVELS for what in ("mean", "peak"))),
        tuple(
            (
                Cell(name),
                Cell(COUNT.text(pool["block_nbytes"])),
                Cell(GIB.text(level_nbytes(pool, pool["num_blocks"]))),
                *(
                    Cell(GIB.text(level_nbytes(pool, value)))
                    for level in (pool["num_live"], pool["num_cached"], pool["num_free"])
                    for value in (level["mean"], level["peak"])
                ),
            )
            for name, pool in pools.items()
        ),
    )
