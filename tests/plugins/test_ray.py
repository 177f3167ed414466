"""The router of stock engines in Serve's own loop of attempts, without Ray: replicas that answer or not stand in.

The last test is Ray Serve itself: make test-ray.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import pytest
import ray
from ray import serve
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagedkv import BlockSpace, FullAttention, SpaceConfig
from pagedkv.events import EventPublisher
from pagedkv.plugins.ray import EngineRequestRouter
from pagedkv.route import EngineRouter

pytestmark = pytest.mark.filterwarnings("ignore")

DEPLOYMENT: Final = DeploymentID("engines", "theirs")
GROUPS: Final = (FullAttention(4),)
PROMPT: Final = list(range(100, 500))
PATIENCE_S: Final = 60.0


class Replica:
    """What a router sees of a replica, which answers questions about its queue or does not."""

    def __init__(self, name: str, *, answers: bool = True, stats: dict[str, Any] | None = None) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.max_ongoing_requests = 100
        self.routing_stats = stats or {}
        self._answers = answers

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Answer how many requests run."""
        del deadline_s
        if not self._answers:
            raise ActorUnavailableError("it is not there", None)
        return 0


class Tokenizer:
    """Tokens are bytes."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Tokenise a text."""
        del add_special_tokens
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> dict[str, list[int]]:
        """Tokenise a conversation."""
        return self("".join(each["content"] for each in messages), add_special_tokens=False)


class Handle:
    """A router, and requests that Serve routes by it."""

    def __init__(self, *replicas: Replica, **kwargs: Any) -> None:  # noqa: ANN401 - of the router
        self.router = EngineRequestRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        self.router.queue_len_response_deadline_s = 0.01
        self.router.max_queue_len_response_deadline_s = 0.02
        self.router.initialize_state(**kwargs)
        self.show(*replicas)
        self._number = 0

    @property
    def engines(self) -> EngineRouter:
        """The router of engines behind it."""
        return self.router._router

    def show(self, *replicas: Replica) -> None:
        """Tell it the running replicas."""
        self.router.update_replicas(cast("list[RunningReplica]", list(replicas)))

    def pending(self, *args: Any, lora: str = "", **kwargs: Any) -> PendingRequest:  # noqa: ANN401 - of a request
        """Make a request."""
        self._number += 1
        name = str(self._number)
        return PendingRequest(list(args), kwargs, RequestMetadata(name, name, multiplexed_model_id=lora))

    async def route(self, *args: Any, ends: bool = True, **kwargs: Any) -> str:  # noqa: ANN401 - of a request
        """Let Serve route a request; return where it went."""
        pending = self.pending(*args, **kwargs)
        chosen = await self.router._choose_replica_for_request(pending)
        if ends:
            self.router.on_request_completed(chosen.replica_id, pending.metadata.internal_request_id)
        return chosen.replica_id.unique_id

    def outstanding(self) -> int:
        """Count the requests under way."""
        return sum(each.num_waiting + each.num_decoding for each in self.engines.statuses())


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


class Dumped:
    """A request as models of pydantic are."""

    def model_dump(self, *, exclude_none: bool) -> dict[str, Any]:
        """Return its fields."""
        assert exclude_none
        return {"prompt": "one text " * 40, "model": "m"}


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


async def until(is_so: Callable[[], bool]) -> None:
    """Let Serve's loop go on until something is so."""
    ends_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"request_token_ids": PROMPT}),
        (({"prompt": PROMPT},), {}),
        ((body("a text " * 60),), {}),
        ((), {"request": Dumped()}),
        ((body("another"),), {"request_token_ids": PROMPT}),
    ],
    ids=["token ids", "a prompt of tokens", "messages", "pydantic", "both"],
)
def test_a_prompt_goes_where_it_was_sent_before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    async def test() -> None:
        handle = Handle(Replica("a"), Replica("b"), tokenizer=Tokenizer())
        first = await handle.route(*args, **kwargs)
        other = await handle.route(request_token_ids=list(range(1000, 1400)))
        assert other != first, "it has the least to do"
        assert [await handle.route(*args, **kwargs) for _ in range(4)] == [first] * 4
        assert handle.outstanding() == 0

    run(test)


def test_adapters_and_salts_are_told_apart() -> None:
    async def test() -> None:
        handle = Handle(Replica("a"), Replica("b"))
        where = [
            await handle.route({"prompt": PROMPT, "cache_salt": salt}, lora=lora)
            for salt, lora in (("", ""), ("x", ""), ("", "tuned"))
        ]
        for (salt, lora), home in zip((("", ""), ("x", ""), ("", "tuned")), where, strict=True):
            placed = await handle.router._read(handle.pending({"prompt": PROMPT, "cache_salt": salt}, lora=lora))
            choice = handle.engines.choose(placed[0], keys=placed[1])
            assert (choice.url, choice.num_predicted) == (f"http://{home}", 384)
            others = [each.num_hit_tokens for each in choice.choice.candidates[1:]]
            assert others == [0]
            handle.engines.ended(choice)

    run(test)


def test_what_is_not_understood_is_routed_by_load() -> None:
    async def test() -> None:
        handle = Handle(Replica("a"), Replica("b"))
        where = [await handle.route(*args, ends=False) for args in ((body("no tokenizer"),), (3,), ())]
        assert set(where) == {"a", "b"}
        assert handle.outstanding() == 3

    run(test)


def test_events_say_what_a_replica_has() -> None:
    async def test(publisher: EventPublisher, space: BlockSpace) -> None:
        told = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        handle = Handle(Replica("a"), Replica("b", stats={"kv_event_metadata": told}))
        space.allocate(np.array(PROMPT, np.int32))
        publisher.publish(space.drain_events(), space)
        await until(lambda: sum(each.num_blocks for each in handle.engines.statuses()) > 0)
        assert await handle.route(request_token_ids=PROMPT) == "b"
        handle.engines.close()

    space = BlockSpace(SpaceConfig(GROUPS, num_blocks=200, events=True))
    with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", groups=GROUPS) as publisher:
        publisher.serve_snapshots(lambda: publisher.snapshot(space))
        run(lambda: test(publisher, space))


@pytest.mark.parametrize("told", [{"endpoint": "nonsense"}, {"replay_endpoint": "tcp://127.0.0.1:1"}, "nonsense"])
def test_a_replica_that_tells_nonsense_is_routed_to_by_what_was_sent(
    told: object, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        handle = Handle(Replica("a", stats={"kv_event_metadata": told}), Replica("b"))
        assert len({await handle.route(request_token_ids=PROMPT) for _ in range(3)}) == 1

    run(test)
    assert "is routed to by what is sent there" in caplog.text


def test_another_replica_is_tried_where_one_does_not_answer() -> None:
    async def test() -> None:
        for gone in ("a", "b"):
            handle = Handle(*(Replica(name, answers=name != gone) for name in ("a", "b")))
            assert await handle.route(request_token_ids=PROMPT, ends=False) != gone
            assert handle.outstanding() == 1, "what was not taken is taken back"

    run(test)


def test_a_request_that_is_cancelled_or_whose_replica_goes_is_forgotten() -> None:
    async def test() -> None:
        handle = Handle(Replica("a", answers=False))
        waiting = asyncio.create_task(handle.route(request_token_ids=PROMPT))
        await until(lambda: handle.outstanding() > 0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert (handle.outstanding(), handle.router._sent) == (0, {})
        handle.show(Replica("a"), Replica("b"))
        first = await handle.route(request_token_ids=PROMPT, ends=False)
        handle.show(Replica("b" if first == "a" else "a"))
        assert await handle.route(request_token_ids=PROMPT) != first
        assert handle.outstanding() == 0

    run(test)


def test_a_prompt_counts_as_computed_after_a_while() -> None:
    async def test() -> None:
        handle = Handle(Replica("a"), prefill_s=0.0)
        await handle.route(request_token_ids=PROMPT, ends=False)
        await until(lambda: handle.engines.statuses()[0].num_decoding == 1)
        status = handle.engines.statuses()[0]
        assert (status.num_waiting, status.num_prefill_tokens) == (0, 0)

    run(test)


def test_serve_calls_it_as_it_did() -> None:
    for name in ("choose_replicas", "update_replicas", "on_replica_actor_died", "on_request_completed"):
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (EngineRequestRouter, RequestRouter))
        assert list(ours.parameters) == list(theirs.parameters)


class TheirEngine:
    """A deployment of an engine that is not ours, as far as Serve sees it."""

    def __init__(self) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id

    async def __call__(self, request: dict[str, Any]) -> str:
        """Say who answers."""
        assert request["prompt"]
        return self._name


@pytest.mark.ray
def test_ray_serve_routes_by_it() -> None:
    named: dict[str, Any] = {"request_router_class": "pagedkv.plugins.ray.EngineRequestRouter"}
    routing = RequestRouterConfig(**named)
    deployment: Any = serve.deployment(TheirEngine, name="theirs", num_replicas=2, request_router_config=routing)
    try:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        handle = serve.run(deployment.bind(), name="theirs", route_prefix=None)
        prompts = [list(range(first, first + 400)) for first in range(0, 4000, 1000)]
        first = [handle.remote({"prompt": each}).result() for each in prompts]
        assert len(set(first)) == 2
        for _ in range(3):
            assert [handle.remote({"prompt": [*each, 7]}).result() for each in prompts] == first
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
