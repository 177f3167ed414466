"""Packages that are installed with an extra of pagedkv alone: where one is missing, the error names the extra.

Modules import such packages within :func:`needing`, behind their other imports.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv.memory.contract.errors import MissingExtraError

__all__ = ["needing"]


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Tell which extra to install where a package that is imported within is missing.

    Args:
        extra: its name, as in ``pip install 'pagedkv[cli]'``; what: what cannot be done without it.

    Raises:
        MissingExtraError: names the package and the extra; one that was raised within stays as it is.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package in {"", "pagedkv"}:
            raise  # a fault of ours, which no installing mends
        raise MissingExtraError(f"{what} needs {package}: pip install 'pagedkv[{extra}]'", name=package) from problem
