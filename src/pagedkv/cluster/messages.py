"""Values sent between a front and a replica: requests, their results, questions of pages, and the facts of a replica.

Ray pickles them. ``SamplingParams`` has read-only mappings, which cannot be pickled, so its fields are sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import GroupSpec
from pagedkv.engine import Intent, RequestOutput, SamplingParams, TokenUpdate
from pagedkv.errors import PagedKVError
from pagedkv.routing import Choice
from pagedkv.server import EngineFacts

HEARTBEAT_S: Final = 1.0
"""Most seconds between two messages of a replica's events."""
WEIGHTS: Final = "tier_weights"
"""Name of the measured weights of media among a replica's numbers."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Properties of a replica that do not change during its life.

    Args:
        engine: properties of its engine.
        groups: the KV-cache groups of its block space.
        weights_epoch: part of the name of a prompt's first block.
        process: id of its process.
        node: address of its machine.
        events: endpoint of its events.
        replays: endpoint for requests of earlier events and of snapshots.
        is_inspected: whether it has data for the inspector.
    """

    engine: EngineFacts
    groups: tuple[GroupSpec, ...]
    weights_epoch: str
    process: int
    node: str
    events: str
    replays: str
    is_inspected: bool = False


@final
@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request to a replica.

    Args:
        number: the front's number of the request; unique in the front.
        prompt_token_ids: int32 ``[n]``.
        params: its sampling parameters, with a seed, so that every replica generates the same answer.
        intent: the caller's further wishes: tenant, salt, priority and so on.
        deadline_s: seconds from its arrival at a replica to its deadline; None: no deadline.
        link: receives the router's choice; not sent to the replica.
        choice: the router's latest choice, once it is made; not sent to the replica.
        attempt: 1, and one more after each lost replica; not sent to the replica.
        failed: replicas that did not take it or were lost with it, the latest last; not sent to the replica.
    """

    number: int
    prompt_token_ids: Int32Array
    params: SamplingParams
    intent: Intent
    deadline_s: float | None = None
    link: Any = None
    choice: Choice | None = None
    attempt: int = 1
    failed: list[str] = field(default_factory=list)

    @property
    def known_token_ids(self) -> Int32Array:
        """Tokens that the replica computes before it samples, of prompt and answer: int32 ``[n]``."""
        return np.concatenate([self.prompt_token_ids, np.array(self.intent.answered, np.int32)])

    @property
    def prompt(self) -> str:
        """The known tokens as a text, one character each, since Serve's own routers compare texts. O(tokens)."""
        return "".join(map(chr, self.known_token_ids.tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the request without the fields that stay in the front's process."""
        parts = self.number, self.prompt_token_ids, _fields_of(self.params), self.intent, self.deadline_s
        return _rebuilt, parts


@final
@dataclass(slots=True, eq=False)
class ReplicaCall:
    """A question about a replica, for the front's pages.

    Args:
        replica: name of the replica; None: any.
        what: ``hello``, which only gives the router this link, or a method of
            :class:`~pagedkv.server.inspector.Inspected`.
        arguments: of the method, by name.
        link: receives the router's placements; not sent to the replica.
    """

    replica: str | None
    what: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    link: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the call without what stays in the front's process."""
        return ReplicaCall, (self.replica, self.what, self.arguments)


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """The answer to a call: its values; or, with a status of HTTP above 200, why there is none."""

    status: int
    values: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaMessage:
    """News of a request, from its replica.

    Args:
        updates: new tokens.
        num_cached_tokens: hit tokens of the prompt; None: not known yet.
        output: the final output; None while the request is served.
        problem: why the request was not served; None if it was.
        is_lost: whether the replica's engine has failed, so that another replica should continue the request.
    """

    updates: tuple[TokenUpdate, ...] = ()
    num_cached_tokens: int | None = None
    output: RequestOutput | None = field(default=None, repr=False)
    problem: PagedKVError | None = None
    is_lost: bool = False

    @property
    def is_over(self) -> bool:
        """Whether this is the last message of this attempt."""
        return self.output is not None or self.problem is not None


def _fields_of(params: SamplingParams) -> dict[str, Any]:
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _rebuilt(
    number: int,
    prompt_token_ids: Sequence[int] | Int32Array,
    params: Mapping[str, Any],
    intent: Intent,
    deadline_s: float | None,
) -> RoutedRequest:
    return RoutedRequest(number, np.asarray(prompt_token_ids, np.int32), SamplingParams(**params), intent, deadline_s)
