"""An index of ours that follows SGLang's own radix cache and publisher: what it predicts is what the cache hits."""

import random
from pathlib import Path

import numpy as np
import pytest

from tests.peers.sglang_engine import PAGE_SIZE, SglangEngine  # isort: skip - SGLang comes behind what stands in for it

from pagedkv import FullAttention
from pagedkv.events import EventFollower, follow
from pagedkv.routing import IndexState, ReplicaIndex


def test_what_is_predicted_is_what_the_radix_cache_hits(tmp_path: Path) -> None:
    draw, index = random.Random(1), ReplicaIndex((FullAttention(PAGE_SIZE),))
    index.add_replica("a")
    engine = SglangEngine(tmp_path, num_pages=40)
    try:
        with EventFollower(engine.endpoint, engine.replay, (FullAttention(PAGE_SIZE),)) as follower:
            for _ in range(150):
                for _ in range(600):
                    if index.view("a").next_batch >= engine.num_batches:
                        break
                    for message in follower.poll(0.05):
                        follow(index, "a", message, 0.0)
                else:
                    pytest.fail(f"{index.view('a')} after {engine.num_batches} batches")
                family = 1000 * draw.randrange(4)
                prompt = [family + place for place in range(draw.choice((4, 8, 12, 16)))]
                prompt += [50_000 + draw.randrange(30)] * draw.choice((1, 4, 9))
                predicted = index.hits(index.hash(np.array(prompt, np.int32)))["a"]
                engine.serve(prompt)
                assert predicted == min(engine.hits[-1], (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE), prompt
            assert follower.groups_seen == (FullAttention(PAGE_SIZE),)
        assert index.state("a") is IndexState.DEGRADED
        assert sum(engine.hits) > 300
    finally:
        engine.wire.close()
