"""EngineReplica: an engine behind Ray Serve, which calls its methods by name; its specification; how Serve scales.

Serve constructs one in each replica's process, calls ``check_health`` and ``record_routing_stats`` periodically, and
calls :meth:`EngineReplica.generate` for each request. After a failed step the health check fails, and Serve replaces
the replica.

Serve's autoscaler calls :func:`scale_by_blocks` periodically with the numbers that replicas report
(``EngineReplica.record_autoscaling_stats``), and applies its own factors, delays and bounds to the result, as to that
of its default policy. The default policy counts ongoing requests, of which an engine may hold a hundred short ones or
four long ones. This policy measures what engines run out of: it counts blocks in use, and requests that wait for blocks
or rows.
"""

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, final, get_args

from pagedkv.cluster.messages import (
    HEARTBEAT_S,
    WEIGHTS,
    ReplicaAnswer,
    ReplicaCall,
    ReplicaFacts,
    ReplicaMessage,
    RoutedRequest,
)
from pagedkv.contract.arguments import as_choice
from pagedkv.contract.extras import needing
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine import AnswerStream, EngineConfig, StepRecord
from pagedkv.errors import EngineError
from pagedkv.events import EventPublisher
from pagedkv.server import ApiError, EngineFacts, LocalEngine
from pagedkv.server.answer_formats import with_matchers
from pagedkv.server.config import Inspector
from pagedkv.server.engines import EventsOut, build_engine
from pagedkv.server.http import as_sendable
from pagedkv.server.inspector import InspectedEngine

with needing("cluster", "replicas"):
    import ray
    from ray import serve

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext
Name = TypeVar("Name")
POLICY: Final = "pagedkv.cluster.replica:scale_by_blocks"
NUM_WAITING: Final = "num_waiting"
BLOCKS_IN_USE: Final = "blocks_in_use"
TARGET_BLOCKS: Final = 0.7
TARGET_WAITING: Final = 4.0

RESCAN_S: Final = 30.0
"""Seconds between two scans of a shared tier. A scan of 100,000 files took 0.6 s of one core (2 % of it); a
conversation that comes back sooner is usually routed to the replica that has it."""


def desired_replicas(blocks_in_use: Mapping[Name, float], num_waiting: Mapping[Name, float], current: int) -> float:
    """Return how many replicas the load needs, not rounded.

    ::

        replicas = sum of blocks_in_use / 0.7 + sum of num_waiting / 4

    The first term is the number of replicas of which the running requests fill 0.7 of the blocks. Requests wait where
    blocks or rows are full, so the second term adds to it: a replica for each four waiting requests. Blocks that are
    cached and not in use do not count, so an idle cluster with full caches shrinks to its smallest size.

    Args:
        blocks_in_use: fraction of the blocks that running requests hold, by replica.
        num_waiting: requests that wait, by replica.
        current: number of running replicas; those without a report count like the mean of the others.
    """
    reported = len(blocks_in_use.keys() | num_waiting.keys())
    if not reported:
        return float(current)
    needed = math.fsum(blocks_in_use.values()) / TARGET_BLOCKS + math.fsum(num_waiting.values()) / TARGET_WAITING
    return needed * max(1.0, current / reported)


def scale_by_blocks(context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
    """Return the number of replicas for a deployment, and no state: the signature of Serve's policies.

    Args:
        context: of Serve. ``aggregated_metrics`` has each replica's numbers, over ``look_back_period_s``.
    """
    metrics = context.aggregated_metrics or {}
    current = context.current_num_replicas
    return desired_replicas(metrics.get(BLOCKS_IN_USE, {}), metrics.get(NUM_WAITING, {}), current), {}


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Model, engine and limits of each replica.

    Args:
        model: a folder or a name; None: the model of the demonstration.
        dtype: type of the model's weights.
        engine: memory and limits of each replica.
        tenants: limits of tenants, by name; None: tenants are not distinguished.
        max_waiting: most requests that wait in each replica.
        tool_parser: name of the parser of calls.
        host: address at which each replica publishes its events.
        draft_model: a folder or a name of the model that guesses tokens; None: there is none.
        device: for the models' weights and blocks; auto: a GPU where the replica has one.
        inspector: what each replica shows in the inspector; ``texts``: its blocks, and their texts.

    Raises:
        ConfigurationError: an unknown inspector.
    """

    model: str | None
    dtype: str
    engine: EngineConfig
    tenants: Mapping[str, TenantLimits] | None = None
    max_waiting: int = 1024
    tool_parser: str = "auto"
    host: str = "127.0.0.1"
    draft_model: str | None = None
    device: str = "auto"
    inspector: Inspector = "off"

    def __post_init__(self) -> None:
        """Check the inspector's name."""
        as_choice(self.inspector, get_args(Inspector), "inspector")

    @property
    def own_engine(self) -> EngineConfig:
        """The engine of one replica: it records events, and finds what other replicas store in shared tiers."""
        tiers = tuple(
            replace(tier, rescan_s=RESCAN_S) if tier.is_shared and tier.rescan_s is None else tier
            for tier in self.engine.tiers
        )
        return replace(self.engine, events=True, tiers=tiers)


def _inspected(engine: LocalEngine, tokenizer: Any, spec: ReplicaSpec) -> InspectedEngine:  # noqa: ANN401 - transformers'
    """Return the data of an engine for the inspector, with texts if they are wanted and there is a tokenizer."""
    has_texts = spec.inspector == "texts" and tokenizer is not None
    return InspectedEngine(engine, (lambda ids: str(tokenizer.decode(list(ids)))) if has_texts else None)


@final
class EngineReplica:
    """Serves requests of token ids with one engine, and publishes the events of its cache.

    Args:
        spec: model, engine and limits.

    Raises:
        ConfigurationError, UnsupportedModelError: the model cannot be loaded or served.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        llm, tokenizer = build_engine(
            spec.model,
            spec.dtype,
            spec.own_engine,
            spec.tenants,
            draft_model=spec.draft_model,
            device=spec.device,
        )
        self._engine = LocalEngine(llm)
        self._formats = self._engine.formats(tokenizer, spec.tool_parser)
        space = llm.core.space.config
        groups = tuple(space.groups)
        self._publisher = EventPublisher(
            f"tcp://{spec.host}:*", f"tcp://{spec.host}:*", groups=groups, heartbeat_s=HEARTBEAT_S
        )
        assert self._publisher.replay_endpoint is not None
        self._facts = ReplicaFacts(
            EngineFacts.of(llm),
            groups,
            space.weights_epoch if isinstance(space.weights_epoch, str) else "",  # no block's name has a counted epoch
            os.getpid(),
            str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            self._publisher.endpoint,
            self._publisher.replay_endpoint,
            is_inspected=spec.inspector != "off",
        )
        self._inspected = None if spec.inspector == "off" else _inspected(self._engine, tokenizer, spec)
        self._published = EventsOut(self._engine, self._publisher)
        self._engine.start(spec.max_waiting, self._stepped)

    def _stepped(self, record: StepRecord) -> None:
        self._published.stepped(record)
        if self._inspected is not None:
            self._inspected.stepped(record)

    def facts(self) -> ReplicaFacts:
        """Return the replica's constant properties."""
        return self._facts

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return this replica's facts, for routers. Serve calls it once."""
        return {"facts": self._facts}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return this replica's numbers. Serve calls it periodically, and sends them to routers."""
        numbers = await self._engine.numbers()
        weights: dict[str, float] = {}
        with suppress(EngineError):  # the engine has ended
            weights = await self._engine.between_steps(lambda llm: llm.core.tier_weights())
        return {**asdict(numbers), "tiers": numbers.tiers, WEIGHTS: weights}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers by which Serve may scale: waiting requests, and the fraction of blocks in use."""
        numbers = await self._engine.numbers()
        return {NUM_WAITING: float(numbers.num_waiting), BLOCKS_IN_USE: numbers.num_live / numbers.num_blocks}

    async def check_health(self) -> None:
        """Raise EngineError if the engine has failed; Serve then replaces this replica."""
        if not self._engine.is_alive:
            raise EngineError("the engine of this replica has failed")

    async def generate(self, request: RoutedRequest) -> AsyncGenerator[ReplicaMessage, None]:
        """Serve a request: yield an empty message when the engine has accepted it, then its tokens, then its output.

        Serve cancels this when the front cancels the call; the engine then ends the request within a step.
        """
        stream: AnswerStream | None = None
        try:
            params = with_matchers(request.params, self._formats)
            stream = self._engine.generate(
                request.prompt_token_ids.tolist(), params, intent=request.intent, deadline_s=request.deadline_s
            )
            await stream.accepted()
            yield ReplicaMessage()
            while updates := await stream.take():
                yield ReplicaMessage(updates, stream.num_cached_tokens)
            yield ReplicaMessage(output=await stream.output())
        except asyncio.CancelledError:
            raise
        except Exception as problem:  # noqa: BLE001 - sent to the front, which raises it for this request
            is_lost = isinstance(problem, EngineError) and not self._engine.is_alive
            yield ReplicaMessage(problem=as_sendable(problem), is_lost=is_lost)
        finally:
            if stream is not None:
                await stream.aclose()

    # For the front's pages

    async def inspect(self, call: ReplicaCall) -> ReplicaAnswer:
        """Answer a question of the inspector. A refusal is an answer too."""
        if call.what == "hello":
            return ReplicaAnswer(200)
        try:
            answer = getattr(self._require_inspected(call), call.what)
            return ReplicaAnswer(200, await answer(**call.arguments))
        except ApiError as problem:
            return ReplicaAnswer(problem.status, problem=problem.message)
        except EngineError as problem:
            return ReplicaAnswer(503, problem=str(problem))

    async def inspect_events(self, call: ReplicaCall) -> AsyncGenerator[bytes, None]:
        """Yield the inspector's events until the front ends the call, or the engine ends."""
        with suppress(ApiError):  # the front has asked another replica than it named
            async for each in self._require_inspected(call).events(**call.arguments, is_over=lambda: False):
                yield each

    def _require_inspected(self, call: ReplicaCall) -> InspectedEngine:
        """Return this engine's data. Raises ApiError: the call is for another replica, or there are no data."""
        if call.replica != self._name():
            raise ApiError(404, f"replica {call.replica!r} has ended")
        if self._inspected is None:
            raise ApiError(404, "the replicas of this server have no inspector of blocks")
        return self._inspected

    @staticmethod
    def _name() -> str:
        """Return Serve's name of this replica."""
        return str(serve.get_replica_context().replica_id.unique_id)

    def __del__(self) -> None:
        """Close the sockets."""
        publisher = self.__dict__.get("_publisher")
        if publisher is not None:
            publisher.close()
