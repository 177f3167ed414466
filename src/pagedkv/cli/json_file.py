"""Results for programs: a JSON file that is there whole or not at all.

The text goes to a temporary file in the same folder, which then takes the target's name in one step; whoever looks
sees the old file or the new one, whatever happens in between. ``-`` is the standard output.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import typer

from pagedkv.cli.user_errors import OutputError

__all__ = ["STANDARD_OUTPUT", "require_writable", "write_json"]

STANDARD_OUTPUT: Final = Path("-")


def require_writable(path: Path) -> None:
    """Refuse a target that cannot be written, before the work whose result it is to hold.

    Raises:
        OutputError: the folder is missing or not writable, or the target is a folder.
    """
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(f"{path}: cannot be written, there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(f"{path}: cannot be written, name a file in a writable folder")


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a document, its keys in their order.

    Raises:
        OutputError: writing failed; the target is as it was.
    """
    text = json.dumps(document, indent=2) + "\n"
    if path == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
        return
    try:
        _write(path.resolve(), text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write(target: Path, text: str) -> None:
    if target.exists() and not target.is_file():
        # A device or a pipe: renaming a file over it would replace it.
        target.write_text(text)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        temporary.write_text(text)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
