"""Settings and command lines: how each run was made, and the settings in which runs differ."""

from collections.abc import Mapping, Sequence
from typing import Final

from pagedkv.report.captions import SECTIONS, TABLES
from pagedkv.report.documents import ReportRun, seconds_source
from pagedkv.report.elements import Cell, Section, Table
from pagedkv.report.number_text import NONE
from pagedkv.report.shared_text import without_folders

__all__ = ["settings_section"]

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
