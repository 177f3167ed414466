"""The page: its sections, their order, and the template that lays them out.

A report has one of two shapes: one run in full, or several side by side. Equal runs give equal bytes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.report.capacity import capacity_section
from pagedkv.report.captions import METHOD
from pagedkv.report.comparison import MAX_RUNS, figures_section, overlaid_section
from pagedkv.report.documents import ReportRun, without_folders
from pagedkv.report.elements import Section, Tile
from pagedkv.report.headlines import headline_of, headline_of_several, need_of
from pagedkv.report.key_figures import KEY_FIGURES
from pagedkv.report.memory import memory_section
from pagedkv.report.settings import divided_section, settings_section
from pagedkv.report.timelines import age_section, latency_section, time_section

with needing("report", "a report"):
    from jinja2 import Environment, PackageLoader, StrictUndefined, Template

__all__ = ["page_template", "render_report", "require_num_runs"]

TEMPLATE: Final = "report.html.j2"
LONGEST_NAME: Final = 48


def require_num_runs(num_runs: int) -> None:
    """Refuse zero runs, and more runs than can be distinguished in one plot. Raises ConfigurationError."""
    if not 1 <= num_runs <= MAX_RUNS:
        raise ConfigurationError(f"a report shows 1 to {MAX_RUNS} runs, got {num_runs}")


def render_report(runs: Sequence[ReportRun], *, version: str, command: str) -> str:
    """Write the page of one run, or of several side by side.

    Args:
        runs: the runs; all are compared with the first.
        version: version of the program that made the runs.
        command: the command line that made the report.

    Returns:
        One self-contained HTML document.

    Raises:
        ConfigurationError: see :func:`require_num_runs`.
    """
    require_num_runs(len(runs))
    runs = [replace(run, name=without_folders(run.name)) for run in runs]
    names = tuple(f"{number}. {_in_short(run.name)}" for number, run in enumerate(runs, 1))
    single = len(runs) == 1
    return page_template().render(
        need=need_of(runs[0].replay, runs[0].curve).sentence if single else "",
        title=headline_of(runs[0]) if single else headline_of_several(runs, names),
        subtitle=f"report of a replay of {runs[0].name}" if single else "report of replays",
        runs=() if single else tuple(run.name for run in runs),
        tiles=_tiles(runs[0]) if single else (),
        warnings=_warnings(runs, names),
        sections=_sections_of_one(runs[0]) if single else _sections_of_several(runs, names),
        glossary=tuple(figure.caption for figure in KEY_FIGURES),
        method=METHOD,
        version=version,
        command=without_folders(command),
    )


def page_template() -> Template:
    """Return the template of every page."""
    environment = Environment(
        loader=PackageLoader("pagedkv.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE)


def _warnings(runs: Sequence[ReportRun], names: Sequence[str]) -> tuple[str, ...]:
    """List warnings about the figures, with the run's name if there are several."""
    return tuple(
        without_folders(f"{name}: {warning}" if len(runs) > 1 else f"{warning[:1].upper()}{warning[1:]}")
        for run, name in zip(runs, names, strict=True)
        for warning in run.replay.get("warnings", ())
    )


def _in_short(name: str) -> str:
    """Cut the middle out of a long name, for legends and columns; the list at the top has the whole name."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]} ... {name[-LONGEST_NAME // 4 :]}"


def _tiles(run: ReportRun) -> tuple[Tile, ...]:
    optional = {"peak_live_nbytes", "mean_saving"}
    tiles = []
    for figure in KEY_FIGURES:
        value = figure.value(run)
        if figure.in_tiles and not (value is None and figure.key in optional):
            caption = figure.caption
            is_unknown = value is None and figure.key.endswith("hit_ratio")
            text = "unknown" if is_unknown else figure.unit.text(value)
            tiles.append(Tile(caption.title, text, caption.sentence))
    return tuple(tiles)


def _sections_of_one(run: ReportRun) -> tuple[Section, ...]:
    divided = divided_section(run.replay)
    return (
        time_section(run),
        *(() if divided is None else (divided,)),
        capacity_section(run),
        memory_section(run),
        latency_section(run),
        age_section(run),
        settings_section([run], [run.name]),
    )


def _sections_of_several(runs: Sequence[ReportRun], names: Sequence[str]) -> tuple[Section, ...]:
    return (figures_section(runs, names), overlaid_section(runs, names), settings_section(runs, names))
