"""Draw the pictures of pages that documents show.

    python -m tools.draw_pictures --traces FOLDER [--only report-light ...]

Pages are made by the commands that docs/report.md names, or served by replays of the example, and drawn by Chromium;
needs the traces, and some minutes.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer

from tests.browser.chromium import BROWSER, Scheme, browser_tab
from tests.browser.waiting import until
from tests.cli.inspecting.pages import EXAMPLE, replaying
from tests.report.rendering import render
from tests.report.sample_runs import sample_run

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"
CONVERSATION: Final = "mooncake_conversation.jsonl.gz"
AGENTS: Final = "agentic_coding_interleaved.jsonl.gz"
TIME_OF_TRACE: Final = "parseFloat(document.querySelector('#figures [data-figure=time] dd')?.textContent)"
FIRST_VALUES: Final = """
(plot => { plot.focus(); window.scrollTo(0, plot.getBoundingClientRect().top + window.scrollY - 300); })(
    document.querySelectorAll('figure')[0].querySelector('.scroll'))
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a page.

    Args:
        commands: make ``page.html`` in the folder in which they run; ``{traces}`` is the folder of traces. None: the
            page of a made-up run.
        width, height: in pixels; scheme: of the colours.
        is_pointed_at: whether the first plot shows values.
    """

    commands: Sequence[str] | None
    width: int
    height: int
    scheme: Scheme = "light"
    is_pointed_at: bool = False


ON_H100: Final = "--model llama-3.1-8b --gpu h100"
BOUNDS: Final = "--block-size 64 --ttft 5 --tpot 0.1 --window 5m"
PICTURES: Final = {
    "report-light": Picture(
        [f"report {{traces}}/{CONVERSATION} --model qwen3-32b --gpu 8xh200 -o page.html"], 1200, 1500
    ),
    "report-compared-dark": Picture(
        [
            f"replay {{traces}}/{AGENTS} {ON_H100} --eviction lru --json agents-lru.json",
            f"replay {{traces}}/{AGENTS} {ON_H100} --eviction adaptive --json agents-adaptive.json",
            "report agents-lru.json agents-adaptive.json -o page.html",
        ],
        1200,
        1900,
        "dark",
    ),
    "plan-light": Picture(
        [f"plan {{traces}}/{CONVERSATION} --limit 3000 --model qwen3-32b --gpu 8xh100 {BOUNDS} --report page.html"],
        1200,
        1500,
    ),
    "report-phone": Picture(None, 400, 900, is_pointed_at=True),
}


@dataclass(frozen=True, slots=True)
class ReplayPicture:
    """A picture of the page over a replay.

    Args:
        options: of the replay of the example.
        until_s: seconds of the trace at which it is paused.
        width, height: in pixels; scheme: of the colours.
    """

    options: str
    until_s: float
    width: int
    height: int
    scheme: Scheme = "light"


REPLAY_PICTURES: Final = {
    "replay-page-light": ReplayPicture(
        "--limit 400 --num-blocks 900 --max-sequences 24 --inspect-speed 2", 24.0, 1200, 1700
    ),
}


def draw_replay(picture: ReplayPicture) -> bytes:
    """Replay the example until a moment, and take the picture of its page."""
    with replaying(EXAMPLE, *picture.options.split()) as shown, browser_tab(_browser()) as tab:
        tab.open(shown.url, picture.width, picture.height, picture.scheme)
        until(tab, f"{TIME_OF_TRACE} > {picture.until_s}")
        tab.evaluate("document.getElementById('hold').click()")
        until(tab, "document.getElementById('status').textContent === 'The replay is paused'")
        tab.evaluate("document.getElementById('refresh').click()")
        until(tab, "document.querySelectorAll('.tree li').length > 1")
        return tab.picture(picture.width, picture.height)


def make_page(picture: Picture, traces: Path, folder: Path) -> Path:
    """Make the page of a picture."""
    page = folder / "page.html"
    if picture.commands is None:
        page.write_text(render(sample_run()))
    for command in picture.commands or ():
        arguments = command.format(traces=traces.resolve()).split()
        subprocess.run([sys.executable, "-m", "pagedkv", *arguments], cwd=folder, check=True)  # noqa: S603 - our own
    return page


NAMES: Final = (*PICTURES, *REPLAY_PICTURES)


def draw(picture: Picture, page: Path) -> bytes:
    """Open a page, and take its picture."""
    with browser_tab(_browser()) as tab:
        tab.open(page, picture.width, picture.height, picture.scheme)
        if picture.is_pointed_at:
            tab.evaluate(FIRST_VALUES)
            for _ in range(3):
                tab.press("ArrowRight")
        return tab.picture(picture.width, picture.height)


def _browser() -> str:
    if BROWSER is None:
        raise typer.BadParameter("there is no Chromium here: apt-get install chromium")
    return BROWSER


def main(
    traces: Annotated[Path, typer.Option(help="The folder of public traces.")] = ROOT.parent / "shared" / "traces",
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(NAMES)}; more than once.")] = None,
) -> None:
    """Draw the pictures into docs/images."""
    for name in only or NAMES:
        if name in REPLAY_PICTURES:
            (IMAGES / f"{name}.png").write_bytes(draw_replay(REPLAY_PICTURES[name]))
            typer.echo(f"{name}.png")
            continue
        with TemporaryDirectory() as folder:
            page = make_page(PICTURES[name], traces, Path(folder))
            (IMAGES / f"{name}.png").write_bytes(draw(PICTURES[name], page))
        typer.echo(f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
