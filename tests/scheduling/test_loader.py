"""Requests that wait for loads: others go on, none is lost, and loads give way before anybody is preempted."""

from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings, strategies as st

from pagedkv.contract.answers import Load, Shortage
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.scheduling import Batch, Request, SchedulingConfig
from pagedkv.space import PrefixHit
from tests.scheduling.engine import Engine


@dataclass
class RandomLoader:
    """Loads what it likes, and ends loads when it likes, with as much as it likes."""

    engine: Engine
    random: Random
    loads: dict[Load, list[Request]] = field(default_factory=dict)
    asked: dict[Request, int] = field(default_factory=dict)
    num_given_way: int = 0

    def begins_load(self, request: Request, token_ids: npt.NDArray[np.int32], match: PrefixHit) -> bool:
        """Load some of the prompt, or join a load."""
        assert not request.rows
        self.asked[request] = self.asked.get(request, 0) + 1
        if self.asked[request] > 3 or self.random.random() < 0.3:
            return False
        if match.loading is not None:
            self.loads[match.loading].append(request)
            return True
        load = self.engine.space.load(token_ids, self.random.randint(0, len(token_ids)), keys=request.keys)
        if load is None or isinstance(load, Shortage):
            return False
        self.loads[load] = [request]
        return True

    def give_way(self) -> bool:
        """End all loads."""
        ended = list(self.loads)
        for load in ended:
            self.end(load, 0)
        self.num_given_way += bool(ended)
        return bool(ended)

    def end(self, load: Load, num_tokens: int) -> None:
        """End a load."""
        waiters = self.loads.pop(load)
        self.engine.space.finish_load(load, num_tokens)
        for request in waiters:
            self.engine.scheduler.loaded(request)

    def advance(self) -> None:
        """End some loads."""
        for load in list(self.loads):
            if self.random.random() < 0.5:
                self.end(load, self.random.randint(0, load.num_tokens))


def loading_engine(seed: int, num_blocks: int) -> tuple[Engine, RandomLoader]:
    space = SpaceConfig((FullAttention(4),), {"device": num_blocks}, max_sequences=6, max_tokens=64, watermark=0.0)
    engine = Engine(SchedulingConfig(6, 16), space, seed)
    engine.end_probability = 0.1
    loader = RandomLoader(engine, Random(seed))
    engine.scheduler._state.loader = loader
    return engine, loader


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), num_blocks=st.integers(12, 40))
def test_whatever_a_loader_does_all_requests_are_served(seed: int, num_blocks: int) -> None:
    engine, loader = loading_engine(seed, num_blocks)
    random = Random(seed)
    prompts = [[random.randrange(2) for _ in range(random.randint(1, 30))] for _ in range(4)]
    for _ in range(10):
        engine.add(random.choice(prompts), random.randint(1, 12), priority=random.randint(0, 1))
    for num_steps in range(2000):
        if engine.scheduler.is_idle:
            break
        if num_steps == 3:
            waiting = [served.request for served in engine.served if served.request in engine.scheduler._state.loading]
            for request in waiting[:1]:
                assert engine.scheduler.abort(request)
        waits = [each for waiters in loader.loads.values() for each in waiters if not each.is_done]
        assert engine.scheduler.num_loading == len(waits)
        assert engine.scheduler.num_waiting >= engine.scheduler.num_loading
        num_given_way = loader.num_given_way
        batch: Batch = engine.step()
        assert not (batch.rejected and loader.num_given_way > num_given_way and loader.loads)
        loader.advance()
    assert engine.scheduler.is_idle, "a request is stuck"
    loader.give_way()
    assert engine.space.statistics().pools[0].num_in_use == 0
    assert all(served.request.is_done for served in engine.served)


def test_loads_give_way_before_a_running_request_is_preempted() -> None:
    engine, loader = loading_engine(0, 12)
    engine.end_probability = 0.0
    running = engine.add(list(range(8)), 25)
    engine.scheduler._state.loader = None
    engine.step()
    load = engine.space.load([9] * 24, 24)
    assert isinstance(load, Load)
    engine.scheduler._state.loader = loader
    loader.loads[load] = []
    engine.run()
    assert loader.num_given_way == 1
    assert running.num_preemptions == 0
    assert running in engine.finished
