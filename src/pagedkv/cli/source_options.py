"""How to read a file that does not tell everything by itself: the options of all commands that read one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from pagedkv.cli import options as opt
from pagedkv.traces.clocks import require_time_unit
from pagedkv.traces.formats.csv_rows import CSV_ROLES, parse_columns
from pagedkv.traces.reader import TraceReader
from pagedkv.traces.texts import TextTokens, text_tokens

__all__ = ["SourceOptions"]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options, as typed.

    Raises:
        ConfigurationError: a unit is none, columns name nothing known, or there is no such tokenizer.
    """

    time_unit: Annotated[
        str | None,
        typer.Option(metavar="UNIT", help="Of arrivals: s, ms, us, ns. Default: as told.", rich_help_panel=opt.TRACE),
    ] = None
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=COLUMN,...",
            help=f"Of a CSV file, by name or number: {', '.join(CSV_ROLES)}.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A tokenizer.json that texts become tokens by.", rich_help_panel=opt.TRACE),
    ] = None
    chars_per_token: Annotated[
        float | None,
        typer.Option(metavar="X", help="Of texts, without a tokenizer. Default: 4.", rich_help_panel=opt.TRACE),
    ] = None

    def __post_init__(self) -> None:
        """Refuse what cannot be used, whatever the file."""
        require_time_unit(self.time_unit)
        self._columns()
        self._texts()

    def open(self, path: str, trace_block_size: int | None, *, any_order: bool = False) -> TraceReader:
        """Open a file. Raises ConfigurationError and TraceError as TraceReader does."""
        return TraceReader(
            path,
            trace_block_size,
            any_order=any_order,
            time_unit=self.time_unit,
            columns=self._columns(),
            texts=self._texts(),
        )

    def _columns(self) -> Mapping[str, str] | None:
        return None if self.columns is None else parse_columns(self.columns)

    def _texts(self) -> TextTokens:
        return text_tokens(self.tokenizer, self.chars_per_token)
