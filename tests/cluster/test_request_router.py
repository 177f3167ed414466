"""Our router in Serve's own loop of attempts, without Ray: replicas that answer, hang or are unreachable stand in."""

import asyncio
import itertools
from typing import Any, Final, cast

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from pagedkv.cluster import PrefixRequestRouter
from pagedkv.cluster.messages import RoutedRequest
from pagedkv.cluster.placements import Placements
from tests.cluster.test_placements import new_request
from tests.cluster.test_routes_page import facts_of

pytestmark = pytest.mark.filterwarnings("ignore")

DEPLOYMENT: Final = DeploymentID("engines", "pagedkv")


class Replica:
    """What a router sees of a replica. It hangs, as a stopped process does, or answers after some failures."""

    def __init__(self, name: str, *, hangs: bool = False, num_failures: int = 0) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.max_ongoing_requests = 100
        self.routing_stats: dict[str, Any] = {}
        self.replica_metadata = {"facts": facts_of(8081)}
        self.num_asked = 0
        self._hangs, self._num_failures = hangs, num_failures

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Answer how many requests run."""
        del deadline_s
        self.num_asked += 1
        if self._hangs:
            await asyncio.Event().wait()
        if self.num_asked <= self._num_failures:
            raise ActorUnavailableError("it is not there", None)
        return 0


class Link:
    """Takes what a front takes of its router."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def placed(self, request: RoutedRequest, placements: Placements) -> None:
        """Note a choice."""
        del placements
        assert request.choice is not None
        self.reasons.append(str(request.choice.reason))


async def routed(*replicas: Replica) -> tuple[str, list[str], int]:
    """Let Serve route one fresh request; return where it went, all reasons, and how often the router paused."""
    pauses: list[int] = []

    class Counting(PrefixRequestRouter):  # type: ignore[misc] # it is final, and only pauses are counted
        async def _backoff(self, attempt: int) -> None:
            pauses.append(attempt)
            await asyncio.sleep(0)

    router = Counting(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    router.queue_len_response_deadline_s = 0.01
    router.max_queue_len_response_deadline_s = 0.02
    router.initialize_state()
    router.update_replicas(cast("list[RunningReplica]", list(replicas)))
    link, request = Link(), new_request()
    request.link = link
    pending = PendingRequest([request], {}, RequestMetadata(request_id="1", internal_request_id="1"))
    chosen = await router._choose_replica_for_request(pending)
    router.update_replicas([])
    return chosen.replica_id.unique_id, link.reasons, len(pauses)


def test_a_fresh_prompt_goes_to_the_idle_replica_where_the_first_choice_hangs() -> None:
    for names in itertools.permutations(("a", "b")):
        where, reasons, num_pauses = asyncio.run(routed(Replica(names[0], hangs=True), Replica(names[1])))
        assert where == names[1]
        assert reasons[1:] in ([], ["no other replica can take it now"])
        assert num_pauses == 0, "another replica is tried at once"


def test_two_of_three_that_hang_are_passed_over() -> None:
    where, reasons, _ = asyncio.run(routed(Replica("a", hangs=True), Replica("b", hangs=True), Replica("c")))
    assert where == "c"
    assert reasons == [
        "no replica has any of the prompt, and it has the least to do",
        "no replica has any of the prompt, and it has the least to do",
        "no other replica can take it now",
    ]


def test_serve_pauses_between_attempts_while_no_replica_is_there() -> None:
    replicas = [Replica(name, num_failures=25) for name in ("a", "b")]
    _, reasons, num_pauses = asyncio.run(routed(*replicas))
    assert len(reasons) > 40
    assert num_pauses >= len(reasons) - 3, "each attempt but the first ones comes after a pause"
