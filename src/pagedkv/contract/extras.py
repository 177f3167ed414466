"""Packages that come with an extra of pagedkv: if one is missing, the error names the extra.

Modules import such packages inside a ``with needing(...)`` block, below their other imports.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pagedkv.errors import MissingExtraError


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Raise an error that names the extra to install if a package imported inside the block is missing.

    Args:
        extra: its name, as in ``pip install '.[cli]'``.
        what: the feature that needs the package.

    Raises:
        MissingExtraError: names the package and the extra; one that is raised inside the block is passed on unchanged.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package in {"", "pagedkv"}:
            raise  # a fault of pagedkv, which no installation repairs
        raise MissingExtraError(f"{what} needs {package}: {to_install(extra)}", name=package) from problem


def to_install(extra: str) -> str:
    """Return the command that installs an extra; a pagedkv that came from a checkout is installed from there again."""
    checkout = _checkout()
    return f"pip install 'pagedkv[{extra}]'" if checkout is None else f"pip install '.[{extra}]' in {checkout}"


def _checkout() -> Path | None:
    """Return the folder that this package runs in or was installed from, if it still is a checkout."""
    around = Path(__file__).parents[3]
    if not (around / "pyproject.toml").is_file():
        try:
            origin = json.loads(distribution("pagedkv").read_text("direct_url.json") or "{}")
        except (PackageNotFoundError, ValueError):
            return None
        around = Path(unquote(urlsplit(str(origin.get("url", ""))).path)) if "dir_info" in origin else Path("/")
    return around if (around / "pyproject.toml").is_file() else None
