"""What travels between a front and a replica: a request, what is new of it, and what a replica is.

Values are pickled by Ray. ``SamplingParams`` has read-only mappings, which pickle refuses, so it travels as its fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, final

import numpy as np

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import EngineError, PagedKVError
from pagedkv.memory.contract.spec import GroupSpec
from pagedkv.memory.routing import Choice
from pagedkv.serving.engine import Intent, RequestOutput, SamplingParams, TokenUpdate
from pagedkv.serving.server import EngineFacts

__all__ = ["ReplicaFacts", "ReplicaMessage", "RoutedRequest", "as_sendable"]


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What does not change while a replica lives.

    Args:
        engine: what a service needs of an engine.
        groups: the KV-cache groups of its block space.
        weights_epoch: part of the name of a prompt's first block.
        process: number of its process; node: address of its machine.
        events: the address of its events; replays: of events that are sent again, and of snapshots.
    """

    engine: EngineFacts
    groups: tuple[GroupSpec, ...]
    weights_epoch: str
    process: int
    node: str
    events: str
    replays: str


@final
@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request on its way to a replica.

    Args:
        number: of the front; unique.
        prompt_token_ids: int32 ``[n]``.
        params: its parameters, with a seed, so that every replica gives the same answer.
        intent: what its caller says beside that.
        deadline_s: seconds from when it reaches a replica; None: no deadline.
        board: gets the choice for it; it stays in the front's process.
        choice: why it goes where it goes; it stays in the front's process.
    """

    number: int
    prompt_token_ids: Int32Array
    params: SamplingParams
    intent: Intent
    deadline_s: float | None = None
    board: Any = None
    choice: Choice | None = None

    @property
    def known_token_ids(self) -> Int32Array:
        """Prompt and answered tokens, which a replica computes: int32 ``[n]``."""
        return np.concatenate([self.prompt_token_ids, np.array(self.intent.answered, np.int32)])

    @property
    def prompt(self) -> str:
        """What a replica computes, a character a token: routers of Serve's own compare texts. O(tokens)."""
        return "".join(map(chr, self.known_token_ids.tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel without what stays."""
        parts = self.number, self.prompt_token_ids, _fields_of(self.params), self.intent, self.deadline_s
        return _arrived, parts


@dataclass(frozen=True, slots=True)
class ReplicaMessage:
    """What is new of a request.

    Args:
        updates: new tokens.
        num_cached_tokens: tokens of the prompt that were hit, once it is known.
        output: its end.
        problem: why it was not served.
        is_lost: whether the replica's engine has failed, so that another replica is to go on.
    """

    updates: tuple[TokenUpdate, ...] = ()
    num_cached_tokens: int | None = None
    output: RequestOutput | None = field(default=None, repr=False)
    problem: PagedKVError | None = None
    is_lost: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of this life of the request."""
        return self.output is not None or self.problem is not None


def as_sendable(problem: Exception) -> PagedKVError:
    """Return an error that can be pickled: one of ours by itself, any other as an EngineError with its text."""
    if isinstance(problem, PagedKVError) and problem.args and all(isinstance(each, str) for each in problem.args):
        plain = type(problem)
        try:
            return plain(*problem.args)
        except TypeError:  # it takes more than its text
            pass
    return EngineError(f"{type(problem).__name__}: {problem}")


def _fields_of(params: SamplingParams) -> dict[str, Any]:
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _arrived(
    number: int,
    prompt_token_ids: Sequence[int] | Int32Array,
    params: Mapping[str, Any],
    intent: Intent,
    deadline_s: float | None,
) -> RoutedRequest:
    return RoutedRequest(number, np.asarray(prompt_token_ids, np.int32), SamplingParams(**params), intent, deadline_s)
