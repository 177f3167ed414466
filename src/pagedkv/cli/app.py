"""The application: its commands, which are modules of :mod:`pagedkv.cli.commands`."""

from typing import Annotated

import typer

from pagedkv import __version__
from pagedkv.cli.commands.calibrate import calibrate
from pagedkv.cli.commands.convert import convert
from pagedkv.cli.commands.curve import curve
from pagedkv.cli.commands.demo import demo
from pagedkv.cli.commands.demo_replay import demo_replay
from pagedkv.cli.commands.generate import generate
from pagedkv.cli.commands.plan import plan
from pagedkv.cli.commands.presets import presets
from pagedkv.cli.commands.record import record
from pagedkv.cli.commands.replay import replay
from pagedkv.cli.commands.report import report
from pagedkv.cli.commands.validate import validate

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
for each in (generate, replay, curve, plan, report, convert, record, calibrate, validate, presets, demo, demo_replay):
    app.command()(each)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - called by typer with the flag's value
    if wanted:
        typer.echo(f"pagedkv {__version__}")
        raise typer.Exit


@app.callback()
def pagedkv(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Paged KV-cache bookkeeping: block tables, prefix cache, eviction; replayed over request traces."""
