"""Requests that are kept back: nothing changes for anybody, and of a long queue only the head is in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.simulation import ServingConfig, VirtualServer, virtual_clock
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.virtual_clock import QueueFile
from tests.simulation.naive_server import run
from tests.simulation.traffic import assert_same, costs, request_of, scenes, serve

COSTS = CostModel(fixed_s=0.01, token_compute_s=0.001)


class CountedQueueFile(QueueFile):
    """Notes how many waited in it at a time, at most."""

    longest: ClassVar[int] = 0

    def push(self, request: Request | TokenizedRequest) -> None:
        """Let a request wait, and count."""
        super().push(request)
        CountedQueueFile.longest = max(CountedQueueFile.longest, len(self))


@contextmanager
def hardly_any_memory() -> Iterator[None]:
    """Let no more requests wait in the scheduler than may run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_clock, "MOST_WAITING", 0)
        patch.setattr(virtual_clock, "QueueFile", CountedQueueFile)
        CountedQueueFile.longest = 0
        yield


@given(st.data(), st.sampled_from(["recompute", "swap"]), costs)
def test_who_is_kept_back_is_served_as_the_naive_server_serves(
    data: st.DataObject, preemption: str, cost: CostModel
) -> None:
    requests, config = data.draw(scenes(preemption))
    if data.draw(st.booleans(), "all of one priority"):
        requests = [replace(request, priority=0) for request in requests]
    config = replace(config, max_sequences=min(config.max_sequences, 4))
    with hardly_any_memory():
        assert_same(serve(requests, config, cost), run(requests, config, cost))


def overload(num_requests: int, *, last_priority: int = 0) -> list[TokenizedRequest]:
    """Make requests that all come at once."""
    priorities = [0] * (num_requests - 1) + [last_priority]
    return [request_of(range(n, n + 9), range(5), priority=priority) for n, priority in enumerate(priorities)]


@pytest.mark.parametrize("last_priority", [0, 1, -1])
def test_a_long_queue_is_kept_back_until_a_priority_could_change_its_order(last_priority: int) -> None:
    requests = overload(100, last_priority=last_priority)
    config = ServingConfig(num_blocks=40, block_size=4, max_sequences=4, max_batched_tokens=32)
    expected = VirtualServer(config, COSTS).run(requests)
    with hardly_any_memory():
        server = VirtualServer(config, COSTS)
        for request in requests:
            server.offer(request)
        assert server.num_requests == 100
        assert CountedQueueFile.longest == (96 if last_priority == 0 else 95)
        server.finish()
    assert server.result() == expected
    assert expected.requests["num_finished"] == 100


def test_what_no_machine_could_serve_is_rejected_when_its_turn_comes() -> None:
    requests = overload(20)
    requests[12] = request_of(range(200), range(5))
    config = ServingConfig(num_blocks=40, block_size=4, max_sequences=4, max_batched_tokens=32)
    with hardly_any_memory():
        result = VirtualServer(config, COSTS).run(requests)
    assert (result.requests["num_rejected"], result.requests["num_finished"]) == (1, 19)


def test_a_queue_file_keeps_every_field_in_order_and_empties_its_file() -> None:
    queue_file = QueueFile()
    requests = [
        Request(0.5, 100, 7, np.arange(1, 7, dtype=np.int64), 16, "talk", 2, 1),
        Request(1.0, 5, 0),
        Request(1.5, 3, 1, prompt_token_ids=np.array([1, 2, 3], np.int32), output_token_ids=np.array([4], np.int32)),
    ]
    for _ in range(2):
        queue_file.push(requests[0])
        queue_file.push(requests[1])
        got = [queue_file.pop()]
        queue_file.push(requests[2])
        got += [queue_file.pop(), queue_file.pop()]
        assert [repr(request) for request in got] == [repr(request) for request in requests]
        assert len(queue_file) == 0
