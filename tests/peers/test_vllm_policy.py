"""vLLM's own tests of its CPU tier and of policies, with our learning policy in the place of LRU."""

from random import Random
from typing import Any, Final

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from pagedkv.plugins.vllm import HazardPolicy
from tests.peers.borrowed_server_tests import borrowed, leave_out, their_tests

MANAGER: Final = borrowed("v1/kv_offload/cpu/test_manager.py")

OWN_PARTS: Final = "looks into the class of vLLM's LRU"
UNFINISHED: Final = "what an unfinished request has brought goes last here, and by its time in vLLM's LRU"
LATE: Final = "content that comes after the end of its request is as new here as its coming"
ORDER: Final = "test_request_finish_orders_lru_prefix_independent_of"
LEFT_OUT: Final = {
    "test_lru_batch_eviction_failure_is_atomic": OWN_PARTS,
    "test_lru_repeated_pin_cycles_compact_lazy_heap_entries": OWN_PARTS,
    "test_cpu_manager": UNFINISHED,
    "test_older_lru_request_does_not_demote_a_newer_shared_access": UNFINISHED,
    "test_unfinished_lru_reused_prefix_outlives_new_tail": "a prefix is used here when the request that hits it ends",
    f"{ORDER}_store_completion[True]": LATE,
    f"{ORDER}_load_completion[True]": LATE,
    "test_late_old_completion_does_not_override_newer_request_recency": LATE,
}
"""Cases that fail here, and why: which chunk goes first is another one than by vLLM's LRU."""

globals().update(their_tests(MANAGER))


@pytest.fixture(autouse=True)
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(request, LEFT_OUT)
    monkeypatch.setitem(CachePolicyFactory._registry, "lru", lambda: HazardPolicy)


def test_what_is_left_out_is_theirs() -> None:
    assert {name.partition("[")[0] for name in LEFT_OUT} <= their_tests(MANAGER).keys()


@pytest.mark.parametrize("seed", range(3))
def test_every_chunk_is_counted_and_what_recurs_is_hit(seed: int) -> None:
    draw, num_hits = Random(seed), 0
    manager = CPUOffloadingManager(40, "HazardPolicy", "pagedkv.plugins.vllm")
    policy: Any = manager._policy
    for number in range(400):
        context, family = ReqContext(req_id=str(number)), draw.randrange(6)
        manager.on_new_request(context)
        names = [f"{family}-{place}" if place < 4 else f"{number}-{place}" for place in range(draw.randrange(1, 8))]
        keys = [make_offload_key(name.encode(), 0) for name in names]
        for place, key in enumerate(keys, 1):
            context.set_offload_key_position(key, 16 * place)
        found = [manager.lookup(key, context) is LookupResult.HIT for key in keys]
        hits = keys[: [*found, False].index(False)]
        num_hits += len(hits)
        if hits:
            manager.prepare_load(hits, context)
            manager.complete_load(hits, context)
        prepared = manager.prepare_store(keys[len(hits) :], context)
        if prepared is not None:
            manager.complete_store(prepared.keys_to_store, context, success=draw.random() > 0.1)
        if draw.random() > 0.05:
            manager.on_request_finished(context)
        policy._index.check()
        assert policy._num_evictable == sum(not chunk.status.ref_cnt for chunk in policy._chunks.values())
        assert len(policy._chunks) <= 40
    assert num_hits > 600
