"""Recorded traces on the virtual clock: what must be true of real traffic, not of random requests alone."""

from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest

from pagedkv.planner.traces.reader import TraceReader
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cost import read_cost_model
from tests.compiling import TESTED_POLICIES

TRACES: Final = Path(__file__).parents[3] / "shared" / "traces"


def served(name: str, num_requests: int, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - passed on
    """Serve the beginning of a recorded trace, or skip the test where there is none."""
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not here")
    server = VirtualServer(ServingConfig(**options), read_cost_model("llama-3.1-8b/h100"))
    with TraceReader(TRACES / name) as trace:
        for request in islice(trace, num_requests):
            server.offer(request)
    server.finish()
    server.check()
    return server.result().as_dict()


@pytest.mark.long
def test_blocks_of_16_waste_less_than_a_hundredth_on_conversation_lengths() -> None:
    waste = served("azure_llm_2023_conv.csv.gz", 600, num_blocks=29_205)["waste"]
    assert 0 < waste["mean"] < 0.01
    assert 0 < waste["by_block_size"]["16"] < 0.01
    by_size = list(waste["by_block_size"].values())
    assert by_size == sorted(by_size)
    assert waste["by_block_size"]["256"] < waste["contiguous"]["exact"] < waste["contiguous"]["power_of_two"]


@pytest.mark.parametrize("policy", TESTED_POLICIES)
def test_blocks_are_hit_evicted_and_accounted_for(policy: str) -> None:
    result = served("mooncake_conversation.jsonl.gz", 300, num_blocks=65_536, eviction=policy)
    (pool,) = result["pools"].values()
    assert result["requests"]["num_finished"] + result["requests"]["num_rejected"] == 300
    assert sum(pool["hits_by_age"]["num_blocks"]) >= result["hits"]["num_hit_blocks"] > 0
    assert pool["num_evictions"] == sum(pool["evictions_by_age"]["num_blocks"]) > 0
    assert pool["num_live"]["peak"] <= pool["num_blocks"]


def test_a_host_pool_saves_computing_again() -> None:
    options = {"num_blocks": 2000, "max_sequences": 64}
    recompute = served("servegen_reason_5rps_30min.csv.gz", 60, **options)
    swap = served("servegen_reason_5rps_30min.csv.gz", 60, **options, preemption="swap", num_host_blocks=20_000)
    assert recompute["preemptions"]["num_recomputed_tokens"] > swap["preemptions"]["num_recomputed_tokens"]
    assert swap["preemptions"]["num_swap"] > 0
    moved = swap["preemptions"]
    assert moved["num_swapped_in_blocks"] <= moved["num_swapped_out_blocks"]
    assert recompute["requests"]["num_finished"] == swap["requests"]["num_finished"] == 60
