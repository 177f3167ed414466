"""Figures of points that were run before: one file each, written whole or not at all, named by a digest.

The digest covers the version, the trace's bytes, how it is read, and the point. So a plan with an equal point uses the
file, and no other plan does. An unreadable file counts as missing.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pagedkv import __version__
from pagedkv.cli.atomic_file import atomic_file
from pagedkv.errors import OutputError
from pagedkv.simulation.planning import PlanPoint, PointFigures

__all__ = ["PointStore", "default_folder", "digest_of_files"]

FORMAT: Final = 4
"""Version of the files and of the meaning of figures; it grows when either changes."""


def default_folder() -> Path:
    """Return the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv-plans"


def digest_of_files(paths: Sequence[str]) -> str:
    """Compute a digest of files, in their order.

    Raises:
        OutputError: a path is not an ordinary file, which every point can read again.
    """
    digests = [_digest_of_file(path) for path in paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest_of_file(path: str) -> str:
    file = Path(path)
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise OutputError(f"{path}: a plan reads the trace once for each point: name a file, not a pipe")
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise OutputError(f"{path}: cannot be opened: {error.strerror}") from error


class PointStore:
    """A folder of figures.

    Args:
        folder: created if missing.
        trace_digest: digest of the trace.
        reading: how the trace is read, as text.

    Raises:
        OutputError: the folder cannot be made.
    """

    def __init__(self, folder: Path, trace_digest: str, reading: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{folder}: cannot be made: {error.strerror or error}. Name another folder for results (--results)"
            ) from error
        self._folder = folder
        self._trace = {"version": __version__, "format": FORMAT, "trace": trace_digest, "reading": reading}

    def get(self, point: PlanPoint) -> PointFigures | None:
        """Return the figures of a point, if it was run before."""
        try:
            values = json.loads(self._path(point).read_bytes())
            return PointFigures.from_dict(values["figures"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, point: PlanPoint, figures: PointFigures) -> None:
        """Store the figures of a point. Raises OutputError."""
        values: Mapping[str, object] = {**self._trace, "point": point.as_dict(), "figures": figures.as_dict()}
        with atomic_file(self._path(point)) as file:
            file.write(json.dumps(values).encode() + b"\n")

    def _path(self, point: PlanPoint) -> Path:
        key = json.dumps({**self._trace, "point": point.as_dict()}, sort_keys=True)
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
