"""Errors that can be sent to another process."""

from pagedkv.errors import EngineError, PagedKVError

__all__ = ["as_sendable"]


def as_sendable(problem: Exception) -> PagedKVError:
    """Return an error that can be pickled: one of ours by itself, any other as an EngineError with its text."""
    if isinstance(problem, PagedKVError) and problem.args and all(isinstance(each, str) for each in problem.args):
        plain = type(problem)
        try:
            return plain(*problem.args)
        except TypeError:  # its constructor takes more than a text
            pass
    return EngineError(f"{type(problem).__name__}: {problem}")
