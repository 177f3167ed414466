"""Values sent between the two processes for the inspector, by a socket pair of its own.

The server's process sends requests, and the engine's process one reply to each. A watcher's events are requested one by
one, so at most one event of a client that does not read is on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pagedkv.errors import EngineError
from pagedkv.server.errors import ApiError
from pagedkv.server.sendable_errors import as_sendable

__all__ = ["EndWatcher", "Failure", "NextEvent", "Question", "Reply", "Request", "failure_of"]


@dataclass(frozen=True, slots=True)
class Question:
    """Answer a question.

    Args:
        number: identifies its reply; no other question or watcher has it.
        about: the method of :class:`~pagedkv.server.inspector.Inspected` that answers.
        arguments: of the method, by name.
    """

    number: int
    about: Literal["block", "prefixes", "history"]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NextEvent:
    """Send a watcher's next event, once there is one. The first of a number begins the watcher.

    Args:
        number: identifies the watcher and its replies.
        title: of its page.
    """

    number: int
    title: str


@dataclass(frozen=True, slots=True)
class EndWatcher:
    """End a watcher; no reply. Without effect where there is none of this number."""

    number: int


Request: TypeAlias = Question | NextEvent | EndWatcher


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer.

    Args:
        status: of HTTP; None: the engine has ended, or it is a fault.
        message: the reason, for the client, or for the server's log.
        is_fault: whether it is a fault of the inspector.
    """

    status: int | None
    message: str
    is_fault: bool = False

    def as_error(self) -> Exception:
        """Return the error that an inspector in the server's process would raise."""
        if self.status is not None:
            return ApiError(self.status, self.message)
        return RuntimeError(self.message) if self.is_fault else EngineError(self.message)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a question, or a watcher's event.

    Args:
        number: of the question or the watcher.
        value: the answer; None where it failed.
        failure: why there is none; None where there is one.
    """

    number: int
    value: Any = None
    failure: Failure | None = None


def failure_of(problem: Exception) -> Failure:
    """Turn an error into a value that crosses to the other process."""
    match problem:
        case ApiError():
            return Failure(problem.status, problem.message)
        case EngineError():
            return Failure(None, str(problem))
        case _:
            return Failure(None, f"the inspector failed in the engine's process: {as_sendable(problem)}", is_fault=True)
