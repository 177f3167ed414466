"""Reads the rows of a Parquet file as lines of JSON, so that a Parquet file can have every format of JSON lines.

A row's number serves as its line number. Only a batch of rows is in memory.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pagedkv.contract.extras import needing, to_install
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.lines import Line

with needing("cli", "reading traces"):
    import msgspec

__all__ = ["parquet_rows"]

ROWS_AT_ONCE: Final = 256


def parquet_rows(path: str) -> Iterator[Line]:
    """Yield the rows of a file, each as an object.

    Raises:
        ConfigurationError: the package is missing.
        TraceError: the file cannot be read; may be raised while iterating.
    """
    try:
        parquet: Any = import_module("pyarrow.parquet")  # an optional package
    except ModuleNotFoundError as error:
        reason = f"reading Parquet files needs the package pyarrow: {to_install('parquet')}"
        raise ConfigurationError(f"{reason}, or write the rows as JSON lines") from error
    if not Path(path).is_file():
        raise TraceError(path, None, "a Parquet file cannot come through a pipe", "Save it to a file first")
    return _rows(path, parquet)


def _rows(path: str, parquet: Any) -> Iterator[Line]:  # noqa: ANN401 - a module, imported late
    encoder = msgspec.json.Encoder(enc_hook=str)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield Line(path, number, encoder.encode(row).decode())
    except (OSError, ValueError) as error:  # base classes of pyarrow's errors
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, number + 1, f"not a whole Parquet file: {error}", "Fetch the file again") from error
