"""More replicas under load and fewer after it: the policy on scripted numbers, and real replicas."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from pagedkv.cluster import ClusterSpec, ReplicaSpec, add_routes, deploy, shut_down
from pagedkv.cluster.deployment import autoscaling_of
from pagedkv.cluster.replica import (
    BLOCKS_IN_USE,
    NUM_WAITING,
    POLICY,
    desired_replicas,
    scale_by_blocks,
)
from pagedkv.engine import EngineConfig
from pagedkv.server import OpenAccess, ServerConfig, Service
from pagedkv.server.engines import tokenizer_of
from tests.server.serving import PATIENCE_S, running

ENGINES: Final = DeploymentID("engines", "pagedkv")
AT_ONCE: Final[dict[str, Any]] = {"upscale_delay_s": 0, "downscale_delay_s": 0}
SPEC: Final = ReplicaSpec(None, "float32", EngineConfig(num_blocks=200, block_size=8))


def name(number: int) -> ReplicaID:
    return ReplicaID(str(number), ENGINES)


def context(config: AutoscalingConfig, blocks: list[float], waiting: list[float], at_s: float = 0.0) -> Any:  # noqa: ANN401
    """What Serve passes to a policy, for one replica a number."""
    count = len(blocks)
    return AutoscalingContext(
        deployment_id=ENGINES,
        deployment_name="engines",
        app_name="pagedkv",
        current_num_replicas=count,
        target_num_replicas=count,
        running_replicas=[],
        total_num_requests=1.0,
        total_queued_requests=0.0,
        aggregated_metrics={
            BLOCKS_IN_USE: {name(number): value for number, value in enumerate(blocks)},
            NUM_WAITING: {name(number): value for number, value in enumerate(waiting)},
        },
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=at_s,
        config=config,
    )


@pytest.mark.parametrize(
    ("blocks", "waiting", "expected"),
    [
        ([0.0], [0.0], 0.0),
        ([0.7], [0.0], 1.0),
        ([1.0], [8.0], 1 / 0.7 + 2),
        ([0.35, 0.35], [0.0, 0.0], 1.0),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], 3 / 0.7),
    ],
)
def test_blocks_in_use_and_waiting_requests_add_up(blocks: list[float], waiting: list[float], expected: float) -> None:
    needed, state = scale_by_blocks(context(AutoscalingConfig(max_replicas=8), blocks, waiting))
    assert needed == pytest.approx(expected)
    assert state == {}


def test_replicas_without_a_report_count_like_the_others() -> None:
    assert desired_replicas({}, {}, 3) == 3.0, "no report at all changes nothing"
    assert desired_replicas({"a": 0.7}, {"a": 0.0}, 2) == pytest.approx(2.0)


def test_a_scripted_load_grows_and_shrinks_the_cluster_by_serves_own_rules() -> None:
    """One replica is full with requests waiting; the load spreads over what was started; then it ends."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=8, **AT_ONCE)
    policy = _apply_autoscaling_config(scale_by_blocks)
    script = [([1.0], [6.0]), ([0.8] * 3, [0.0] * 3), ([0.3] * 4, [0.0] * 4), ([0.0] * 2, [0.0] * 2)]
    numbers = [policy(context(config, blocks, waiting))[0] for blocks, waiting in script]
    assert numbers == [3, 4, 2, 1]


def test_a_short_rush_starts_nothing_before_the_delay() -> None:
    config = AutoscalingConfig(min_replicas=1, max_replicas=8, upscale_delay_s=30)
    assert _apply_autoscaling_config(scale_by_blocks)(context(config, [1.0], [6.0]))[0] == 1


def test_the_policy_is_ours_unless_another_is_wished() -> None:
    ours = autoscaling_of(ClusterSpec(SPEC, 1, autoscaling={"max_replicas": 4}))
    assert ours["policy"].policy_function == POLICY
    assert AutoscalingConfig(**ours).policy.get_policy().__name__ == "scale_by_blocks"
    assert "policy" not in autoscaling_of(ClusterSpec(SPEC, 1, autoscaling={"target_ongoing_requests": 3}))
    theirs: Any = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function="ray.serve.autoscaling_policy:default_autoscaling_policy"
    )
    assert autoscaling_of(ClusterSpec(SPEC, 1, autoscaling={"policy": theirs}))["policy"] is theirs


@pytest.fixture
def url() -> Iterator[str]:
    """A front over one replica, which Serve may double."""
    engine = EngineConfig(num_blocks=60, block_size=8, self_test=False, max_sequences=2)
    scaling = {"max_replicas": 2, "look_back_period_s": 2.0, "metrics_interval_s": 0.5, **AT_ONCE}
    try:
        replicas = deploy(ClusterSpec(ReplicaSpec(None, "float32", engine), 1, autoscaling=scaling))
        service = Service(replicas, ServerConfig("demo"), OpenAccess(), tokenizer=tokenizer_of(None))
        with running(service, adds=lambda app, service: add_routes(app, service, replicas)) as address:
            yield address
    finally:
        shut_down()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_load_makes_a_second_replica_and_its_end_takes_it_away(url: str) -> None:
    body = {"model": "demo", "prompt": list(range(20, 60)), "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    failures: list[int] = []
    is_over = False

    def ask(number: int) -> None:
        while not is_over:
            prompt = [*body["prompt"], 20 + number]  # type: ignore[misc]
            answer = httpx.post(f"{url}/v1/completions", json={**body, "prompt": prompt}, timeout=PATIENCE_S)
            if not answer.is_success:
                failures.append(answer.status_code)

    def wait_for(count: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while len(httpx.get(f"{url}/inspect/routes").json()["replicas"]) != count:
            assert time.monotonic() < until, f"never {count} replicas"
            time.sleep(0.2)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(8)]
        try:
            wait_for(2)
        finally:
            is_over = True
        for each in asked:
            each.result()
    wait_for(1)
    assert not failures
