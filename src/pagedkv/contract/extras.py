"""Packages that come with an extra of pagedkv: if one is missing, the error names the extra.

Modules import such packages inside a ``with needing(...)`` block, below their other imports.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv.contract.errors import MissingExtraError

__all__ = ["needing"]


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Raise an error that names the extra to install if a package imported inside the block is missing.

    Args:
        extra: its name, as in ``pip install 'pagedkv[cli]'``.
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
        raise MissingExtraError(f"{what} needs {package}: pip install 'pagedkv[{extra}]'", name=package) from problem
