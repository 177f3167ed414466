"""The tables of results, made once for pages and for terminals: a heading and a format for each column.

They read documents (:mod:`pagedkv.report.documents`), and need neither matplotlib nor Jinja2.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from pagedkv.report.documents import Plan, PlanPointDocument, Replay, has_known_content, seconds_source, traffic_of
from pagedkv.report.figures import COUNT, GIB, MEAN, MISSES, NONE, RATIO, SECONDS, TABLES, Unit, memory_text, rate

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: a text, a smaller note below it, and a tone: "better", "worse" or none.

    The note states in words what the tone shows by colour.
    """

    text: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: a heading for each column, and rows that begin with a heading of their own.

    Args:
        caption: the title.
        columns: the headings.
        rows: as many cells each.
        num_keys: leading columns that identify a row, which a narrow terminal repeats.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    num_keys: int = 1


Columns: TypeAlias = Mapping[str, Callable[[_Row], "str | Cell"]]
"""What a row has in each column, by the column's heading."""
Json: TypeAlias = Mapping[str, Any]


def table(caption: str, columns: Columns[_Row], rows: Iterable[_Row], num_keys: int = 1) -> Table:
    """Lay out rows, each by the formats of all columns."""
    cells = ([column(row) for column in columns.values()] for row in rows)
    shown = (tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in cells)
    return Table(caption, tuple(columns), tuple(shown), num_keys)


def at(unit: Unit, *keys: str) -> Callable[[Json], str]:
    """Return the column of a value that lies under these keys of a row; none where the document is older."""

    def text(row: Json) -> str:
        value: Any = row
        for key in keys:
            value = value.get(key)
        return unit.text(value)

    return text


def named(rows: Mapping[str, Any]) -> list[Json]:
    """Return rows that are filed under their names."""
    return [{"name": name, **row} for name, row in rows.items()]


def _name(row: Json) -> str:
    return str(row["name"])


TIMES: Final = tuple((name, percentile) for name in ("TTFT", "TPOT", "ITL") for percentile in ("p50", "p99"))

# A replay

UNNAMED: Final = "that the configuration lists"
PERCENTILES: Final = ("mean", "p50", "p90", "p99", "max")
LEVELS: Final = tuple((level, what) for level in ("live", "cached", "free") for what in ("mean", "peak"))
EVENTS: Final = {
    "queueing_s": "first admission (queueing)",
    "first_token_s": "first token",
    "request_s": "end of the request",
}
PREEMPTIONS: Final = {
    "num_recompute": "preemptions by recompute",
    "num_swap": "preemptions by swap",
    "num_recomputed_tokens": "tokens computed again",
    "num_swapped_out_blocks": "blocks swapped out",
    "num_swapped_in_blocks": "blocks swapped in",
}
RESERVATIONS: Final = {
    "exact": "contiguous, exactly the final length",
    "power_of_two": "contiguous, a power of two",
    "maximum": "contiguous, {} tokens",
}


def replay_tables(replay: Replay) -> Iterator[Table]:
    """List all tables of a replay, for a terminal; pages put them into their sections."""
    yield from pool_tables(replay)
    if has_known_content(replay):
        yield miss_table(replay, explains=False)
    yield from tier_tables(replay)
    yield latency_table(replay)
    yield preemption_table(replay)
    yield waste_table(replay)


def pool_tables(replay: Replay) -> Iterator[Table]:
    """List the blocks of all pools, and their GiB where they are known."""
    pools = named(replay["pools"])

    def never_hit(pool: Json) -> str:
        number, total = pool["num_never_reused"], pool["num_evictions"]
        if not has_known_content(replay):
            return "unknown"
        return f"{COUNT.text(number)} ({number / total:.1%})" if total else COUNT.text(number)

    def gib(level: str, what: str) -> Callable[[Json], str]:
        def text(pool: Json) -> str:
            count = pool[f"num_{level}"][what]
            return GIB.text(None if count is None else count * pool["block_nbytes"])

        return text

    columns: Columns[Json] = {
        "pool": _name,
        "blocks": at(COUNT, "num_blocks"),
        **{f"{level}, {what}": at(MEAN if what == "mean" else COUNT, f"num_{level}", what) for level, what in LEVELS},
        "evicted": at(COUNT, "num_evictions"),
        "never hit": never_hit,
    }
    yield table(TABLES["pools"], columns, pools)
    sizes: Columns[Json] = {
        "pool": _name,
        "bytes a block": at(COUNT, "block_nbytes"),
        "pool, all blocks": lambda pool: GIB.text(pool["block_nbytes"] * pool["num_blocks"]),
        **{f"{level}, {what}": gib(level, what) for level, what in LEVELS},
    }
    known = [pool for pool in pools if pool["block_nbytes"] is not None]
    if known:
        yield table(TABLES["pool_nbytes"], sizes, known)


def miss_table(replay: Replay, *, explains: bool) -> Table:
    """List the prompt tokens that did not hit, by cause: all causes and their meanings, or those with tokens."""
    misses = replay["misses"]
    counts = {cause: misses["by_cause"].get(cause, 0) for cause in MISSES}
    columns: Columns[str] = {
        "cause": lambda cause: MISSES[cause].title,
        "tokens": lambda cause: COUNT.text(counts[cause]),
        "share": lambda cause: f"{counts[cause] / max(1, misses['num_tokens']):.1%}",
        **({"meaning": lambda cause: MISSES[cause].sentence} if explains else {}),
    }
    return table(TABLES["misses"], columns, [cause for cause in counts if explains or counts[cause]])


HITS_BY_MEDIUM: Final[Columns[Json]] = {
    "medium": _name,
    "tokens": at(COUNT, "num_tokens"),
    "share of prompts": at(RATIO, "share"),
}
TIERS: Final[Columns[Json]] = {
    "tier": _name,
    "loads": at(COUNT, "num_loads"),
    "tokens loaded": at(COUNT, "num_loaded_tokens"),
    "mean load": at(SECONDS, "mean_load_s"),
    "computed instead of loaded": at(COUNT, "num_computed_instead"),
    "tokens computed instead": at(COUNT, "num_tokens_computed_instead"),
    "written": at(GIB, "written_nbytes"),
    "read": at(GIB, "read_nbytes"),
    "kept": at(GIB, "nbytes"),
    "entries evicted": at(COUNT, "num_evicted"),
}


def tier_tables(replay: Replay) -> Iterator[Table]:
    """List the tiers, if there are any: hits by medium, loads and bytes."""
    if "tiers" in replay:
        if has_known_content(replay):
            yield table(TABLES["tier_hits"], HITS_BY_MEDIUM, named(replay["tiers"]["hits"]))
        yield table(TABLES["tiers"], TIERS, named(replay["tiers"]["media"]))


def latency_table(replay: Replay) -> Table:
    """List the percentiles of the three latencies."""
    columns = {"from arrival to": _name, **{name: at(SECONDS, name) for name in PERCENTILES}}
    latency: Json = dict(replay["latency"])
    caption = TABLES["latency"].format(seconds_source(replay) or UNNAMED)
    return table(caption, columns, named({event: latency[key] for key, event in EVENTS.items()}))


def preemption_table(replay: Replay) -> Table:
    """List the preemptions, and their cost."""
    counts: Json = dict(replay["preemptions"])
    columns: Columns[str] = {"what": PREEMPTIONS.__getitem__, "number": lambda name: COUNT.text(counts[name])}
    return table(TABLES["preemptions"], columns, PREEMPTIONS)


def waste_table(replay: Replay) -> Table:
    """List the share of slots without a token: in blocks in use, in blocks of other sizes, in contiguous memory."""
    waste = replay["waste"]
    contiguous: Json = dict(waste["contiguous"])
    shares = {
        "blocks in use": waste["mean"],
        **{f"blocks of {int(size):,}, none shared": share for size, share in waste["by_block_size"].items()},
        **{words.format(COUNT.text(waste["max_length"])): contiguous[key] for key, words in RESERVATIONS.items()},
    }
    columns: Columns[str] = {"reservation": str, "waste": lambda name: RATIO.text(shares[name])}
    return table(TABLES["waste"], columns, shares)


# Parts of a replay, or of the headline's setting of a plan

KINDS: Final = {"by_tenant": ("tenant", "By tenant"), "by_window": ("window", "By window of recorded time")}
WHOLE: Final[Columns[Json]] = {"requested": lambda part: f"{COUNT.text(part['num_offered_tokens'])} tokens"}
RATES: Final[Columns[Json]] = {
    "requests/s": lambda part: f"{part['num_requests'] / part['span_s']:.3g}" if part["span_s"] else NONE,
    "requested": lambda part: f"{rate(part['offered_tokens_per_s'])} tokens/s" if part["span_s"] else NONE,
}
GOOD: Final[Columns[Json]] = {"good": lambda part: RATIO.text(part["num_good"] / max(1, part["num_requests"]))}


def part_tables(parts: Json, most: int, left_out: str, *, has_bounds: bool) -> Iterator[Table]:
    """List figures by tenant and by window of recorded time, as far as there are any.

    Args:
        parts: ``by_tenant`` and ``by_window``, as far as they exist.
        most: most rows of a table: those with the most tokens, in their order.
        left_out: behind the caption of a table that has fewer rows than there are parts; {} is their number.
        has_bounds: whether there are bounds, so that not every answer is good.
    """
    for key, (kind, title) in KINDS.items():
        rows: Sequence[Json] = parts.get(key, ())
        largest = sorted(range(len(rows)), key=lambda place: -rows[place]["num_offered_tokens"])[:most]
        if rows:
            columns: Columns[Json] = {
                kind: _name,
                "requests": at(COUNT, "num_requests"),
                **(RATES if kind == "window" else WHOLE),
                "prompt tokens": at(COUNT, "num_prompt_tokens"),
                "output tokens": at(COUNT, "num_output_tokens"),
                "hit ratio": lambda part: RATIO.text(part["hit_ratio"]) if part["has_content"] else "unknown",
                **(GOOD if has_bounds else {}),
                **{f"{name} {each}": at(SECONDS, f"{name.lower()}_s", each) for name, each in TIMES[:4]},
            }
            note = left_out.format(f"{len(rows):,}") if len(rows) > most else ""
            yield table(f"{title}{note}", columns, [rows[place] for place in sorted(largest)])


# A plan

VERDICTS: Final = {"holds": "yes", "too short": "undecided"}
BINDS: Final = {"queue": "queue", "ttft": "TTFT", "tpot": "TPOT", "rejected": "size"}
"""Words for the causes of a load that does not hold."""


def _setting(point: Json) -> Cell:
    return Cell(", ".join(point["choices"].values()), "chosen" if point["is_chosen"] else "")


def _ratio(row: Json) -> str:
    return "unknown" if row["hit_ratio"] is None else RATIO.text(row["hit_ratio"])


NAMED: Final[Columns[Json]] = {"setting": _setting, "load": lambda point: f"{point['load']:g}x"}
"""The columns that identify a run of a plan."""
OUTCOMES: Final[Columns[Json]] = {
    **NAMED,
    "holds": lambda point: VERDICTS.get(point["verdict"]) or ", ".join(BINDS[each] for each in point["binds"]) or "no",
    "memory": lambda point: memory_text(point["kv_gib"]),
    "answers/s": lambda point: f"{traffic_of(point['figures']):.3g}",
    "good": lambda point: RATIO.text(point["figures"]["num_good"] / max(1, point["figures"]["num_requests"])),
    "tokens/s": lambda point: rate(point["figures"]["output_tokens_per_s"]),
    "hit ratio": lambda point: _ratio(point["figures"]),
    "preempted": at(COUNT, "figures", "num_preemptions"),
}
LATENCIES: Final[Columns[Json]] = {
    **NAMED,
    **{f"{name} {each}": at(SECONDS, "figures", f"{name.lower()}_s", each) for name, each in TIMES},
}
CAUSES: Final[Columns[Json]] = {
    **NAMED,
    "limited by": lambda point: point["reason"],
    "change": lambda point: point["change"] or NONE,
}
BESIDE: Final[Columns[Json]] = {
    **NAMED,
    "routing": _name,
    "hit ratio": _ratio,
    "imbalance": lambda row: NONE if row["imbalance"] is None else f"{row['imbalance']:.2f}",
    "TTFT p50": lambda row: SECONDS.text((row["ttft_s"] or {}).get("p50")),
    "TTFT p99": lambda row: SECONDS.text((row["ttft_s"] or {}).get("p99")),
}


def point_table(caption: str, columns: Columns[Json], points: Iterable[PlanPointDocument]) -> Table:
    """List runs of a plan by ``OUTCOMES``, ``LATENCIES`` or ``CAUSES``."""
    return table(caption, columns, map(dict, points), len(NAMED))


def points_at_best(plan: Plan) -> list[PlanPointDocument]:
    """Return each setting's run at the highest load that holds, or at the lowest load that was run."""
    return list(_at_best(plan).values())


def _at_best(plan: Plan) -> dict[tuple[str, ...], PlanPointDocument]:
    held = {tuple(setting["choices"].values()): setting["held"] for setting in plan["settings"]}
    best: dict[tuple[str, ...], PlanPointDocument] = {}
    for point in plan["points"]:
        key = tuple(point["choices"].values())
        load = held.get(key)
        if point["load"] == load or (load is None and (key not in best or point["load"] < best[key]["load"])):
            best[key] = point
    return best


def cluster_table(caption: str, plan: Plan) -> Table | None:
    """List each cluster of a plan beside the runs that it is compared with; None without clusters."""
    rows: list[Json] = []
    points = _at_best(plan)
    for setting in plan["settings"]:
        others = setting.get("beside", [])  # older documents have none
        if others:
            point = points[tuple(setting["choices"].values())]
            own, figures = setting["choices"].get("routing", "prefix"), point["figures"]
            run = {**figures, "name": own, "imbalance": figures["cluster"]["imbalance"]}
            rows += [{**point, **each} for each in (run, *others) if each is run or each["name"] != own]
    return table(caption, BESIDE, rows, len(NAMED)) if rows else None
