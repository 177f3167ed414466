"""Sections on settings, and by tenant and window.

Settings and command lines: how each run was made, and the settings in which runs differ.

Tables of the results of each tenant, and of each window of recorded time, if a run was divided.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagedkv.report.captions import SECTIONS, TABLES
from pagedkv.report.documents import ReportRun, seconds_source, without_folders
from pagedkv.report.elements import Cell, Section, Table
from pagedkv.report.key_figures import COUNT, NONE, RATIO, SECONDS, rate

__all__ = ["divided_section", "settings_section"]
DIFFERS: Final = "differs"


def settings_section(runs: Sequence[ReportRun], names: Sequence[str]) -> Section:
    """List every setting of every run, marking those that differ, and the command lines."""
    settings = [
        _flattened(
            {
                "trace": run.replay["trace"],
                "read as": run.replay.get("read_as") or None,
                **run.replay["config"],
                "source of the seconds": seconds_source(run.replay),
            }
        )
        for run in runs
    ]
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    return Section(
        "settings",
        SECTIONS["settings"],
        tables=(
            Table(
                TABLES["settings"],
                ("setting", *(names if len(runs) > 1 else ("value",))),
                tuple(_row(key, [of_run.get(key, NONE) for of_run in settings]) for key in keys),
            ),
        ),
        lines=tuple(
            (f"Command line of {name}" if len(runs) > 1 else "Command line", without_folders(run.replay["command"]))
            for name, run in zip(names, runs, strict=True)
        ),
    )


def _row(key: str, values: Sequence[str]) -> tuple[Cell, ...]:
    note = DIFFERS if len(set(values)) > 1 else ""
    return (Cell(key, note), *(Cell(value) for value in values))


def _flattened(settings: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Flatten settings; nested names are joined by dots."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = _text(value)
    return flat


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.12g}"
    return NONE if value is None else without_folders(str(value))


MOST_ROWS: Final = 100
TITLES: Final = {"by_tenant": "By tenant", "by_window": "By window of recorded time"}
FIRST: Final = {"by_tenant": "tenant", "by_window": "window"}


def divided_section(parts: Mapping[str, Any], *, has_bounds: bool = False) -> Section | None:
    """Lay out a run by its parts; None if it was not divided.

    Args:
        parts: by_tenant, by_window, busiest_window and quietest_window, as far as they exist.
        has_bounds: whether there are bounds, so that not every answer is good.
    """
    tables = tuple(_table(kind, parts[kind], has_bounds=has_bounds) for kind in TITLES if parts.get(kind))
    if not tables:
        return None
    title = " and ".join(TITLES[kind] for kind in TITLES if parts.get(kind)).replace("and By", "and by")
    return Section("divided", title, tuple(_sentences(parts)), tables=tables)


def _sentences(parts: Mapping[str, Any]) -> Iterator[str]:
    yield "All requests were served together; a request counts for the window that it arrived in."
    names = {each["name"]: each for each in parts.get("by_window", ())}
    busiest, quietest = (names.get(parts.get(f"{which}_window")) for which in ("busiest", "quietest"))
    if busiest is not None and quietest is not None:
        yield f"The busiest window is {_described(busiest)}, the quietest {_described(quietest)}."
    for kind, title in TITLES.items():
        if len(parts.get(kind, ())) > MOST_ROWS:
            yield f"{title}, the {MOST_ROWS} largest of {COUNT.text(len(parts[kind]))} are shown."


def _described(window: Mapping[str, Any]) -> str:
    seconds = window["ttft_s"]["p99"]
    hits = "" if window["hit_ratio"] is None else f", {window['hit_ratio']:.1%} of the prompt tokens hit"
    began = "" if seconds is None else f", 99% of its answers began within {SECONDS.text(seconds)}"
    return f"{window['name']} ({rate(window['offered_tokens_per_s'])} tokens a second requested{hits}{began})"


def _table(kind: str, parts: Sequence[Mapping[str, Any]], *, has_bounds: bool) -> Table:
    largest = sorted(range(len(parts)), key=lambda place: -parts[place]["num_offered_tokens"])[:MOST_ROWS]
    good = ("good",) if has_bounds else ()
    columns = (FIRST[kind], "requests", "requested", "hit ratio", *good, "TTFT p50", "TTFT p99", "TPOT p99")
    return Table(
        TITLES[kind], columns, tuple(_part_row(parts[place], has_bounds=has_bounds) for place in sorted(largest))
    )


def _part_row(part: Mapping[str, Any], *, has_bounds: bool) -> tuple[Cell, ...]:
    is_timed = part["span_s"] is not None
    requested = (
        f"{rate(part['offered_tokens_per_s'])} tokens/s" if is_timed else f"{part['num_offered_tokens']:,} tokens"
    )
    ratio = NONE if part["has_content"] else "unknown"
    good = part["num_good"] / part["num_requests"] if part["num_requests"] else None
    return (
        Cell(part["name"]),
        Cell(COUNT.text(part["num_requests"])),
        Cell(requested),
        Cell(ratio if part["hit_ratio"] is None else RATIO.text(part["hit_ratio"])),
        *((Cell(RATIO.text(good)),) if has_bounds else ()),
        Cell(SECONDS.text(part["ttft_s"]["p50"])),
        Cell(SECONDS.text(part["ttft_s"]["p99"])),
        Cell(SECONDS.text(part["tpot_s"]["p99"])),
    )
