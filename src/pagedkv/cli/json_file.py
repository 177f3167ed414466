"""Results for programs: a JSON file that is written whole or not at all. ``-`` is the standard output."""

import json
from collections.abc import Mapping
from pathlib import Path

from pagedkv.cli.atomic_file import atomic_file

__all__ = ["write_json"]


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a document, its keys in their order.

    Raises:
        OutputError: writing failed; the target is unchanged.
    """
    text = json.dumps(document, indent=2) + "\n"
    with atomic_file(path) as file:
        file.write(text.encode())
