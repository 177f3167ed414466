"""An index of ours that follows vLLM's own cache manager and publisher: what it predicts is what the manager hits."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from pagedkv import FullAttention, RequestKeys, SlidingWindow
from pagedkv.events import EventFollower, follow
from pagedkv.routing import IndexState, ReplicaIndex
from tests.peers.vllm_engine import BLOCK_SIZE, WINDOW, VllmEngine

FULL: Final = (FullAttention(BLOCK_SIZE),)
MIXED: Final = (FullAttention(BLOCK_SIZE), SlidingWindow(WINDOW, BLOCK_SIZE))


class Index:
    """An index that follows one engine."""

    def __init__(self, engine: VllmEngine, *, has_window: bool) -> None:
        self.index = ReplicaIndex(MIXED if has_window else FULL)
        self.index.add_replica("a")
        self.follower = EventFollower(engine.endpoint, engine.replay, None)

    def catch_up(self, engine: VllmEngine) -> None:
        """Follow until all batches are applied; the last one is asked for if it was lost."""
        for _ in range(600):
            if self.index.view("a").next_batch >= engine.num_batches:
                return
            for message in self.follower.poll(0.05):
                follow(self.index, "a", message, 0.0)
        pytest.fail(f"{self.index.view('a')} after {engine.num_batches} batches")

    def predict(self, prompt: list[int], adapter: str | None) -> int:
        """Give the tokens that the index expects to hit."""
        keys = RequestKeys(adapter)
        return self.index.hits(self.index.hash(np.array(prompt, np.int32), keys))["a"]


def prompts(num: int) -> Callable[[], list[tuple[list[int], str | None]]]:
    draw = random.Random(1)

    def one() -> tuple[list[int], str | None]:
        family = 1000 * draw.randrange(4)
        shared = [family + place for place in range(draw.choice((4, 8, 12, 16)))]
        return [*shared, *([50_000 + draw.randrange(30)] * draw.choice((1, 4, 9)))], draw.choice((None, None, "a"))

    return lambda: [one() for _ in range(num)]


@pytest.mark.parametrize("has_window", [False, True], ids=["full", "window"])
def test_what_is_predicted_is_what_the_manager_hits(tmp_path: Path, *, has_window: bool) -> None:
    engine = VllmEngine(tmp_path, num_blocks=40, has_window=has_window)
    index = Index(engine, has_window=has_window)
    try:
        for prompt, adapter in prompts(150)():
            index.catch_up(engine)
            predicted = index.predict(prompt, adapter)
            engine.serve(prompt, adapter=adapter)
            assert predicted == engine.hits[-1], (prompt, adapter)
        assert index.index.state("a") is IndexState.DEGRADED
        assert sum(engine.hits) > 300
    finally:
        index.follower.close()
        engine.wire.close()
