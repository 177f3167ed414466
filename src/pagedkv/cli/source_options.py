"""Options for reading a file that does not state everything, shared by all commands that read one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.bad_lines import BadLines
from pagedkv.planner.traces.clocks import require_time_unit
from pagedkv.planner.traces.formats.csv_rows import CSV_ROLES, parse_columns
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.stamps import GeneratedArrivals, parse_arrivals, spread_stamps
from pagedkv.planner.traces.texts import TextTokens, text_tokens

__all__ = ["SourceOptions"]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options, as typed.

    Raises:
        ConfigurationError: a unit is unknown, columns have unknown roles, or there is no such tokenizer.
    """

    time_unit: Annotated[
        str | None,
        typer.Option(
            metavar="UNIT", help="Unit of arrivals: s, ms, us, ns. Default: the file's own.", rich_help_panel=opt.TRACE
        ),
    ] = None
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=COLUMN,...",
            help=f"Columns of CSV or Parquet, by name or number: {', '.join(CSV_ROLES)}.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A tokenizer.json that turns texts into tokens.", rich_help_panel=opt.TRACE),
    ] = None
    chars_per_token: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Characters a token, without a tokenizer. Default: 4.", rich_help_panel=opt.TRACE
        ),
    ] = None

    fields: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=FIELD,...",
            help="The same for JSON lines; dots lead into objects: prompt=request.text.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="poisson:RATE",
            help="Random times instead of the file's, RATE a second.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    spread_s: Annotated[
        float | None,
        typer.Option(
            "--spread",
            metavar="S",
            help="Spread requests of one stamp over S seconds, as 1 for whole seconds.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    keep_failed: Annotated[
        bool,
        typer.Option("--keep-failed", help="Keep requests that failed.", rich_help_panel=opt.TRACE),
    ] = False
    skip_bad: Annotated[
        int,
        typer.Option(metavar="N", help="Skip up to N lines that cannot be read.", rich_help_panel=opt.TRACE),
    ] = 0

    tenant_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Column or field of the tenant: user, metadata.team. Results are given by tenant.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that are invalid for every file."""
        require_time_unit(self.time_unit)
        if self.columns is not None and self.fields is not None:
            raise ConfigurationError("--columns and --fields both name the parts of a row: give one of them")
        self._columns()
        self._texts()
        self._arrivals()
        self.in_time(())
        BadLines(self.skip_bad)

    def open(self, path: str, trace_block_size: int | None, *, any_order: bool = False) -> TraceReader:
        """Open a file. Raises ConfigurationError and TraceError as TraceReader does."""
        return TraceReader(
            path,
            trace_block_size,
            any_order=any_order,
            time_unit=self.time_unit,
            columns=self._columns(),
            texts=self._texts(),
            keep_failed=self.keep_failed,
            arrivals=self._arrivals(),
            skip_bad=self.skip_bad,
            tenant_by=self.tenant_by,
            is_spread=self.spread_s is not None,
        )

    def in_time(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Spread sorted requests of one stamp, if requested. Raises ConfigurationError."""
        return requests if self.spread_s is None else spread_stamps(requests, self.spread_s)

    def _columns(self) -> Mapping[str, str] | None:
        if self.fields is not None:
            return parse_columns(self.fields, "fields", needs_arrival=self.arrivals is None)
        return None if self.columns is None else parse_columns(self.columns, needs_arrival=self.arrivals is None)

    def _arrivals(self) -> GeneratedArrivals | None:
        return None if self.arrivals is None else parse_arrivals(self.arrivals)

    def _texts(self) -> TextTokens:
        return text_tokens(self.tokenizer, self.chars_per_token)
