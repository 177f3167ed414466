"""Ray Serve 2.60: deployments of stock engines, routed by what each replica has cached.

::

    from ray import serve
    from ray.serve.config import RequestRouterConfig


    @serve.deployment(
        num_replicas=2,
        request_router_config=RequestRouterConfig(
            request_router_class="pagedkv.plugins.ray.EngineRequestRouter",
            request_router_kwargs={"tokenizer": "MODEL"},
        ),
    )
    class Engine: ...

The tokens of a request are those of its keyword ``request_token_ids``, as of Ray's own KV-aware router, or of the
``prompt`` or ``messages`` of an argument: a mapping, or a model of pydantic, as those of ``ray.serve.llm``. Texts need
a tokenizer. Without tokens the load decides.

A replica that publishes KV events tells where by Serve's method ``record_routing_stats``, as Ray's engines do::

    {"kv_event_metadata": {"endpoint": "tcp://HOST:5557", "replay_endpoint": "tcp://HOST:5558"}}

One that tells nothing is routed to by what was sent there. Each handle has a router of its own, which knows the events
of all replicas and the requests of this handle.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagedkv.errors import ConfigurationError, NoEngineError
from pagedkv.route import Engine, EngineRouter, Placed, Prompts, Tokenizer, tokenizer_named
from pagedkv.routing import Routing, RoutingRules

__all__ = ["EngineRequestRouter"]

LOG: Final = logging.getLogger("pagedkv.plugins.ray")
TOKEN_IDS: Final = "request_token_ids"  # noqa: S105 - no secret
EVENTS: Final = "kv_event_metadata"
TOKENISE_S: Final = 5.0
PREFILL_S: Final = 2.0
PATHS: Final = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


@dataclass(slots=True, eq=False)
class Sent:
    """A request until it has ended: where it is, and where it was before.

    Args:
        placed: the choice; None: no replica could be chosen.
        timer: counts its prompt as computed.
        tried: replicas that have not taken it.
    """

    placed: Placed | None = None
    timer: asyncio.TimerHandle | None = None
    tried: set[str] = field(default_factory=set)


@final
class EngineRequestRouter(RequestRouter):
    """Routes by the replicas' cached blocks and outstanding work. Serve makes it, and calls it."""

    def initialize_state(  # type: ignore[override] # those of its keywords that there are
        self,
        *,
        tokenizer: str | Tokenizer | None = None,
        routing: Routing = "prefix",
        rules: Mapping[str, float] | None = None,
        prefill_s: float = PREFILL_S,
    ) -> None:
        """Make the router. Serve calls it with ``request_router_kwargs``.

        Args:
            tokenizer: one of transformers, or its folder or name; None: only prompts of tokens are understood.
            routing: ``prefix``, ``least-loaded`` or ``round-robin``.
            rules: fields of :class:`~pagedkv.routing.RoutingRules`.
            prefill_s: after so many seconds a prompt counts as computed: Serve does not tell first tokens.

        Raises:
            ConfigurationError: an unknown routing, or a rule out of range.
        """
        local = tokenizer_named(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._prompts = Prompts(None, TOKENISE_S, local)
        self._router = EngineRouter([], routing=routing, rules=RoutingRules(**(rules or {})))
        self._prefill_s = prefill_s
        self._sent: dict[str, Sent] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set the running replicas, and follow the events of those that tell where."""
        super().update_replicas(replicas)
        self._take_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._take_replicas()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose one replica. Serve asks again where it has not taken the request: then another one is chosen."""
        if pending_request is None:
            return [candidate_replicas]
        number = pending_request.metadata.internal_request_id
        token_ids, keys, num_tokens = await self._read(pending_request)
        by_url = {_url_of(each): each for each in candidate_replicas}
        sent = self._sent.setdefault(number, Sent())
        self._take_back(sent)
        if sent.tried >= by_url.keys():
            sent.tried.clear()
            pending_request.routing_context.should_backoff = True
        left_out = {each.url for each in self._router.engines if each.url not in by_url} | sent.tried
        try:
            sent.placed = self._router.choose(token_ids, keys=keys, num_tokens=num_tokens, without=left_out)
        except NoEngineError:  # all replicas have changed since
            pending_request.routing_context.should_backoff = True
            return [candidate_replicas]
        placed = sent.placed
        LOG.debug("request %s: %s", number, placed.choice.explain)
        sent.timer = asyncio.get_running_loop().call_later(self._prefill_s, self._router.prefilled, placed)
        pending_request.future.add_done_callback(partial(self._note_cancelled, number))
        return [[by_url[placed.url]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended, if it is still where it ended."""
        sent = self._sent.get(internal_request_id)
        if sent is not None and sent.placed is not None and sent.placed.url == _url(replica_id):
            del self._sent[internal_request_id]
            self._router.prefilled(sent.placed)
            self._router.ended(sent.placed)
            if sent.timer is not None:
                sent.timer.cancel()

    async def _read(self, request: PendingRequest) -> tuple[Any, Any, int]:
        """Return a request's tokens, or None, its adapter and salt, and the length of its prompt."""
        lora = request.metadata.multiplexed_model_id or None
        path, body = _body_of(request)
        prompt = await self._prompts.read(path, json.dumps(body, default=str).encode(), None, None)
        return prompt.token_ids, replace(prompt.keys, lora_name=lora), prompt.num_tokens

    def _take_back(self, sent: Sent) -> None:
        """Take back a choice that its replica has not taken."""
        if sent.timer is not None:
            sent.timer.cancel()
        if sent.placed is not None:
            sent.tried.add(sent.placed.url)
            self._router.take_back(sent.placed)
            sent.placed = None

    def _note_cancelled(self, number: str, future: "asyncio.Future[RunningReplica]") -> None:
        """Forget a request that its caller has cancelled before it was sent."""
        if future.cancelled() and number in self._sent:
            self._take_back(self._sent.pop(number))

    def _take_replicas(self) -> None:
        engines = []
        for replica in self.curr_replicas.values():
            told = (replica.routing_stats or {}).get(EVENTS) or {}
            url = _url_of(replica)
            try:
                engines.append(Engine(url, told.get("endpoint"), told.get("replay_endpoint")))
            except (ConfigurationError, AttributeError) as problem:
                LOG.warning("replica %s is routed to by what is sent there: %s is %r: %s", url, EVENTS, told, problem)
                engines.append(Engine(url))
        self._router.set_engines(engines)


def _url(replica_id: ReplicaID) -> str:
    """Name a replica as engines are named; nothing is sent to this address."""
    return f"http://{replica_id.unique_id}"


def _url_of(replica: RunningReplica) -> str:
    return _url(replica.replica_id)


def _body_of(request: PendingRequest) -> tuple[str, dict[str, Any]]:
    """Return a request as the body that it would be over HTTP, and the path; without a prompt both are empty."""
    tokens = request.kwargs.get(TOKEN_IDS)
    for each in (*request.args, *request.kwargs.values()):
        dump = getattr(each, "model_dump", None)
        body = each if isinstance(each, Mapping) else dump(exclude_none=True) if callable(dump) else {}
        for name, path in PATHS.items():
            if name in body:
                return (PATHS["prompt"], {**body, "prompt": list(tokens)}) if tokens else (path, dict(body))
    return (PATHS["prompt"], {"prompt": list(tokens)}) if tokens else ("", {})
