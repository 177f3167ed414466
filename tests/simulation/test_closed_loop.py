"""Closed loops: turns wait for answers; what agents waited for is found in their recorded times, and kept."""

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pagedkv.planner.traces.formats.agent_waits import AgentCall, Wait, waits_of
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import anonymized
from pagedkv.planner.traces.writer import TraceWriter
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.closed_loop import ClosedLoop, serve_closed
from pagedkv.simulation.cost import CostModel

SAMPLES = Path(__file__).parents[1] / "traces" / "samples"
CONFIG = ServingConfig(num_blocks=200, block_size=4, max_sequences=8, max_batched_tokens=512)
"""A step of one second computes any prompt here whole, so that an answer of n tokens takes n seconds, whoever runs."""
ONE_S = CostModel(fixed_s=1.0)


class Arrivals:
    """Notes when each request arrives and ends."""

    def __init__(self, requests: list[Request], *, load: float = 1.0, speed: float = 50.0) -> None:
        server = VirtualServer(CONFIG, ONE_S, is_closed=True)
        self.at: list[float] = []
        offer = server.offer

        def noting(request: Request) -> None:
            self.at.append(request.arrival_s)
            offer(request)

        server.offer = noting  # type: ignore[method-assign, assignment] # looks, and changes nothing
        serve_closed(server, server.take_ended, requests, loop=ClosedLoop(speed), load=load)
        self.result = server.result()
        server.check()


def request(
    arrival_s: float, seconds: int, session: str, waits_for: tuple[str, ...] = (), pause_s: float | None = None
) -> Request:
    return Request(arrival_s, 8, seconds, session=session, waits_for=waits_for, pause_s=pause_s)


def test_a_turn_comes_a_pause_after_the_answer_before_it() -> None:
    turns = [request(0, 3, "a"), request(100, 2, "a", ("a",), 4.0), request(101, 1, "a", ("a",), 0.0)]
    assert Arrivals(turns).at == [0, 7, 9]
    alone = [request(5, 1, "b"), *turns[1:]]
    assert Arrivals(alone).at == [5, 100, 102], "the first of a session waits for nothing"


def test_subagents_run_side_by_side_and_their_parent_waits_for_the_slowest() -> None:
    requests = [
        request(0, 2, "a"),
        request(3, 5, "a agent 1", ("a",), 1.0),  # 3 to 8
        request(4, 3, "a agent 2", ("a",), 2.0),  # 4 to 7
        request(5, 1, "a agent 1", ("a agent 1",), 0.5),  # at 8.5, in the step of 9
        request(6, 1, "a", ("a", "a agent 1", "a agent 2"), 3.0),
    ]
    at = Arrivals(requests).at
    assert at[:3] == [0, 3, 4]
    assert at[3] == 8.5
    assert at[4] == 9.5 + 3


def test_pauses_do_not_depend_on_the_load_and_beginnings_do() -> None:
    requests = [request(0, 1, "a"), request(10, 1, "b"), request(10.5, 1, "a", ("a",), 4.0)]
    assert Arrivals(requests).at == [0, 5, 10]
    assert Arrivals(requests, load=4.0).at == [0, 10, 20], "arrivals on the recorded clock: seconds times the load"


def test_without_recorded_ends_the_pause_is_the_gap_less_the_answer_at_a_speed() -> None:
    requests = [request(0, 4, "a"), request(10, 1, "a"), request(11, 1, "a")]
    assert Arrivals(requests, speed=2.0).at == [0, 4 + (10 - 2), 12 + 1 + (1 - 0.5)]
    with_agent = [request(0, 4, "a"), request(3, 8, "s", ("a",)), request(9, 1, "a", ("a", "s"))]
    assert Arrivals(with_agent, speed=2.0).at == [0, 5, 5 + 8 + 2]


def test_requests_of_no_session_come_as_recorded() -> None:
    requests = [Request(float(number), 8, 3) for number in range(4)]
    assert Arrivals(requests).at == [0, 1, 2, 3]


CALLS = st.lists(
    st.tuples(st.sampled_from(["", "1", "2", "1.1"]), st.floats(0, 5), st.floats(0.1, 9)), min_size=1, max_size=25
)


@given(CALLS)
def test_calls_that_take_as_long_as_recorded_come_when_recorded(drawn: list[tuple[str, float, float]]) -> None:
    """Unless a call began before the end of the one that it follows, which cannot be: it comes at that end."""
    calls, now_s = [], 0.0
    free_s: defaultdict[str, float] = defaultdict(float)
    for agent, gap_s, api_s in drawn:
        now_s = max(now_s + gap_s, free_s[agent])  # an agent makes one call at a time
        free_s[agent] = now_s + api_s
        calls.append(AgentCall(agent, agent.rpartition(".")[0] if agent else None, now_s, api_s))
    last: dict[str, float] = {}
    for call, wait in zip(calls, waits_of(calls), strict=True):
        assert all(agent in last for agent in wait.agents)
        assert (call.agent in wait.agents) == (call.agent in last)
        ends = [last[agent] for agent in wait.agents]
        if ends:
            assert wait.pause_s is not None
            assert max(ends) + wait.pause_s == pytest.approx(max(call.begin_s, *ends))
        last[call.agent] = call.end_s


def test_a_call_waits_for_the_subagents_that_have_ended_and_for_no_others() -> None:
    def call(agent: str, begin_s: float, api_s: float | None) -> AgentCall:
        return AgentCall(agent, "main" if agent != "main" else None, begin_s, api_s)

    calls = [
        call("main", 0, 2),
        call("quick", 3, 1),
        call("slow", 3, 20),
        call("quick", 5, 1),
        call("main", 8, 1),  # while the slow one runs
        call("main", 30, 1),  # it has ended
        call("main", 40, None),
        call("main", 50, 1),
    ]
    assert list(waits_of(calls)) == [
        Wait((), None),
        Wait(("main",), 1.0),
        Wait(("main",), 1.0),
        Wait(("quick",), 1.0),
        Wait(("main", "quick"), 2.0),
        Wait(("main", "slow"), 7.0),
        Wait(("main",), 9.0),
        Wait(("main",), None),
    ]


def test_wekas_sessions_and_others_name_what_they_wait_for(tmp_path: Path) -> None:
    with TraceReader(SAMPLES / "weka.json") as reader:
        assert reader.is_of_agents
        weka = [(each.session, each.waits_for, each.pause_s) for each in reader]
    main, agent = "trace_0001", "trace_0001 agent 1"
    assert weka == [
        (main, (), None),
        (agent, (main,), 0.5),
        (agent, (agent,), 1.0),
        (main, (main, agent), 2.0),
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text(
        '{"session": "s", "block_size": 4, "requests": ['
        '{"t": 0, "input_length": 4, "output_length": 1, "hash_runs": [[1, 1]], "agent": 0, "api_time": 1.5},'
        '{"t": 2, "input_length": 4, "output_length": 1, "hash_runs": [[1, 1]], "agent": 1, "api_time": 1},'
        '{"t": 5, "input_length": 4, "output_length": 1, "hash_runs": [[1, 1]]}]}\n'
    )
    with TraceReader(path) as reader:
        found = [(each.session, each.waits_for, each.pause_s) for each in reader]
    assert found == [("s", (), None), ("s agent 1", ("s",), 0.5), ("s", ("s", "s agent 1"), 2.0)]
    with TraceReader(SAMPLES / "vllm-debug.log") as reader:
        assert not reader.is_of_agents


def test_what_a_request_waits_for_comes_through_files_and_without_names(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with TraceReader(SAMPLES / "weka.json") as reader:
        requests = list(reader)
    with path.open("wb") as file, TraceWriter(file) as writer:
        for each in requests:
            writer.write(each)
    with TraceReader(path) as again:
        kept = list(again)
    assert [(each.waits_for, each.pause_s) for each in kept] == [(each.waits_for, each.pause_s) for each in requests]
    renamed = list(anonymized(requests, b"salt"))
    names = {each.session: new.session for each, new in zip(requests, renamed, strict=True)}
    assert [each.waits_for for each in renamed] == [tuple(names[name] for name in each.waits_for) for each in requests]
    assert Arrivals(kept).at == Arrivals(renamed).at == Arrivals(requests).at
