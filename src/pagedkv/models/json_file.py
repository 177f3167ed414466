"""A small JSON file, read whole or refused.

All faults of a *file* that a user names (missing, a folder, huge, not text, not JSON, not an object) are reported here,
as a :class:`~pagedkv.errors.ConfigurationError` with the file and a remedy.
"""

import json
from pathlib import Path
from typing import Final

from pagedkv.errors import ConfigurationError

__all__ = ["MAX_NBYTES", "read_json_object"]

MAX_NBYTES: Final = 8 * 2**20
"""Largest file read. Configs have a few kilobytes; those with long tables of labels have about one megabyte."""


def read_json_object(path: Path) -> dict[str, object]:
    """Read a file with one JSON object.

    Raises:
        ConfigurationError: the file does not hold such an object.
    """
    try:
        # A pipe or a device has no size: the bytes read are counted.
        with path.open("rb") as file:
            content = file.read(MAX_NBYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}. Name a readable file") from error
    if len(content) > MAX_NBYTES:
        raise ConfigurationError(
            f"{path}: has more than {MAX_NBYTES:,} bytes, which no configuration needs. Name a JSON file of settings"
        )
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, or a number of 5,000 digits
        raise ConfigurationError(f"{path}: not a JSON file: {error}. Fetch or write it again") from error
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{path}: holds a JSON {type(value).__name__}, where an object with named settings was expected. "
            "Fetch or write it again"
        )
    return value
