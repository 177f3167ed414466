"""Values sent between the server's process and the engine's process.

The news of a step are sent together. Updates are sent as plain tuples, which take a tenth of the time of dataclasses.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

from pagedkv.contract.arguments import as_choice
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine import EngineConfig, Intent, RequestOutput, SamplingParams, StepRecord, TokenUpdate
from pagedkv.errors import PagedKVError
from pagedkv.server.config import Inspector
from pagedkv.server.engine_numbers import EngineNumbers
from pagedkv.server.engines import EngineFacts

__all__ = [
    "Begin",
    "Built",
    "Command",
    "EndRequest",
    "EventEndpoints",
    "Item",
    "NewNumbers",
    "News",
    "NotBuilt",
    "ProcessSpec",
    "ReadNumbers",
    "SubmitRequest",
    "packed",
    "unpacked",
]

PackedUpdate: TypeAlias = tuple[object, ...]
"""The fields of a TokenUpdate, without its prompt."""


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Endpoints at which KV events are published.

    Args:
        endpoint: of events; replay_endpoint: of requests for earlier events and snapshots; None: there is none.
        topic: first frame of all events.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Model and settings of an engine in a process of its own.

    Args:
        model: a folder or a name; None: the model of the demonstration.
        dtype: type of its weights.
        engine: memory and limits.
        tenants: limits of tenants, by name; None: tenants are not distinguished.
        device: for the models' weights and blocks; auto: a GPU where there is one.
        draft_model: a folder or a name of the model that guesses tokens; None: there is none.
        tool_parser: name of the parser of calls.
        events: endpoints of KV events; None: they are not published.
        inspector: what :attr:`ProcessEngine.inspected` shows; ``texts``: blocks, and their texts.

    Raises:
        ConfigurationError: an unknown inspector.
    """

    model: str | None
    dtype: str
    engine: EngineConfig
    tenants: Mapping[str, TenantLimits] | None = None
    device: str = "auto"
    draft_model: str | None = None
    tool_parser: str = "auto"
    events: EventEndpoints | None = None
    inspector: Inspector = "off"

    def __post_init__(self) -> None:
        """Check the inspector's name."""
        as_choice(self.inspector, get_args(Inspector), "inspector")


@dataclass(frozen=True, slots=True)
class Built:
    """The engine is built.

    Args:
        facts, numbers: of the engine.
        lifetime: identity of the publisher of its KV events, and ``events`` the bound endpoints; None: no publisher.
    """

    facts: EngineFacts
    numbers: EngineNumbers
    lifetime: str | None = None
    events: EventEndpoints | None = None


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """The engine cannot be built, because of ``problem``; the process ends."""

    problem: PagedKVError


# Commands to the engine's process. The end of the commands ends the engine.


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin to serve, with at most ``max_waiting`` requests in the queue."""

    max_waiting: int


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Serve a request.

    Args:
        number: identifies it, in both processes.
        prompt_token_ids: int32 ``[n]``.
        params, intent: of the request.
        deadline_s: seconds from now to its deadline; None: there is none.
    """

    number: int
    prompt_token_ids: Int32Array
    params: SamplingParams
    intent: Intent
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class EndRequest:
    """End a request, "aborted"."""

    number: int


@dataclass(frozen=True, slots=True)
class ReadNumbers:
    """Send the engine's numbers, as :class:`NewNumbers`."""


Command: TypeAlias = Begin | SubmitRequest | EndRequest | ReadNumbers


# News from the engine's process

Item: TypeAlias = tuple[int, Sequence[PackedUpdate], RequestOutput | None, Exception | None, int | None]
"""News of one request: its number, then the fields of a StreamMessage."""


@dataclass(frozen=True, slots=True)
class News:
    """What has happened since the last news.

    Args:
        records: of steps; items: news of requests; both in order.
        num_waiting: requests in the engine's queue.
        num_submitted: requests that have reached the engine, since it began.
    """

    records: Sequence[StepRecord]
    items: Sequence[Item]
    num_waiting: int
    num_submitted: int


@dataclass(frozen=True, slots=True)
class NewNumbers:
    """The engine's numbers between two steps."""

    numbers: EngineNumbers


def packed(updates: Iterable[TokenUpdate]) -> list[PackedUpdate]:
    """Return updates as tuples."""
    return [(each.index, each.token_ids, each.finish_reason, each.logprobs, each.stop) for each in updates]


def unpacked(updates: Iterable[PackedUpdate]) -> list[TokenUpdate]:
    """Return the updates that were packed."""
    return [TokenUpdate(0, *fields) for fields in updates]  # type: ignore[arg-type]
