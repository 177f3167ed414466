"""Tiers on the virtual clock: hits as a model by hand has them, invariants after each step, and rules of loading."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.spec import FullAttention, SlidingWindow
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation import ServingConfig, ServingResult, SimulatedTier, VirtualServer
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.tiers import Medium, VirtualStore
from pagedkv.tiers import Admission, Delete, Read, Write

pytestmark = pytest.mark.interpreted

BLOCK: Final = 4
ENTRY: Final = 2**25
"""Bytes of a block, so large that a run is one block."""
ENDLESS: Final = 200 * ENTRY
"""More than any trace here fills."""
AT_ONCE: Final = float("inf")
COSTS: Final = CostModel(fixed_s=0.01, token_compute_s=0.001)
LENGTH: Final = 5
"""Blocks of a prompt; the pool has as many."""

Prompt = tuple[int, ...]


def host(nbytes: int = ENDLESS, **given: Any) -> SimulatedTier:  # noqa: ANN401 - fields of any type
    return SimulatedTier("host", nbytes, **{"bandwidth": AT_ONCE, "loads": "always", **given})


def config(*tiers: SimulatedTier, num_blocks: int = LENGTH + 1, **given: Any) -> ServingConfig:  # noqa: ANN401 - fields
    fields: dict[str, Any] = {"max_sequences": 1, "watermark": 0.0, "block_nbytes": {"device": ENTRY}, **given}
    return ServingConfig(num_blocks, BLOCK, tiers=tiers, **fields)


def request(blocks: Sequence[int], num_more: int = 0, arrival_s: float = 0.0, num_output: int = 1) -> TokenizedRequest:
    """Make a request whose prompt has these blocks, and some further tokens."""
    tokens = [block * BLOCK + place for block in blocks for place in range(BLOCK)] + [9000] * num_more
    output = 7000 + np.arange(num_output, dtype=np.int32)
    return TokenizedRequest(arrival_s, np.array(tokens, np.int32), output, None, 1)


def served(config: ServingConfig, requests: Sequence[TokenizedRequest]) -> ServingResult:
    server = VirtualServer(config, COSTS)
    for each in requests:
        server.offer(each)
        server.check()
    server.finish()
    server.check()
    return server.result()


# Hits


class HandModel:
    """A pool that has the blocks of the last prompt alone, above a host tier: a list of prefixes, oldest first."""

    AHEAD: Final = 1
    """Blocks that are looked at beyond those that a request takes."""

    def __init__(self, num_entries: int, admission: str) -> None:
        self.num_entries, self.admission = num_entries, admission
        self.last: Prompt = ()
        self.kept: list[Prompt] = []
        self.seen: set[Prompt] = set()
        self.waits_no_more: list[Prompt] = []
        self.num_written = 0

    def serve(self, prompt: Prompt) -> tuple[int, int]:
        """Serve a prompt; return its hits on the device, and those that the tier brought."""
        prefixes = [prompt[: place + 1] for place in range(LENGTH)]
        on_device = sum(prefix == self.last[: len(prefix)] for prefix in prefixes[:-1])
        if self.admission == "before-eviction":
            self._offer_the_last(LENGTH - on_device + self.AHEAD)
        brought = 0
        if on_device < LENGTH - 1:
            while on_device + brought < LENGTH - 1 and prefixes[on_device + brought] in self.kept:
                brought += 1
        self.last, self.waits_no_more = prompt, []
        if self.admission == "before-eviction":
            self._offer_the_last(self.AHEAD)
        else:
            self._offer(prefixes)
        return on_device, brought

    def _offer_the_last(self, num_blocks: int) -> None:
        """Offer those of the device's blocks that are evicted next, the tail first: each once while it is there."""
        prefixes = [self.last[: place + 1] for place in range(len(self.last))][-num_blocks:]
        self._offer([each for each in prefixes if each not in self.waits_no_more])
        self.waits_no_more += prefixes

    def _offer(self, prefixes: list[Prompt]) -> None:
        there = [each for each in prefixes if each in self.kept]
        self.kept = [each for each in self.kept if each not in there] + there[::-1]  # the tail is evicted first
        wanted = [
            each for each in prefixes if each not in there and (self.admission != "second-offer" or each in self.seen)
        ]
        self.seen.update(prefixes)
        self.num_written += len(wanted)
        while len(self.kept) + len(wanted) > self.num_entries:
            del self.kept[0]
        groups: list[list[Prompt]] = []
        for each in wanted:
            if groups and groups[-1][-1] == each[:-1]:
                groups[-1].append(each)
            else:
                groups.append([each])
        self.kept += [each for group in groups for each in group[::-1]]


@given(
    turns=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 2)), max_size=12),
    num_entries=st.integers(LENGTH, 12),
    admission=st.sampled_from(["always", "second-offer", "before-eviction"]),
)
@settings(max_examples=40, deadline=None)
def test_hits_and_writes_are_those_of_a_model_by_hand(
    turns: list[tuple[int, int, int]], num_entries: int, admission: str
) -> None:
    prompts = [(1, 10 + first, 20, 30 + second, 40 + third) for first, second, third in turns]
    model = HandModel(num_entries, admission)
    expected = [model.serve(prompt) for prompt in prompts]
    result = served(config(host(num_entries * ENTRY, admission=admission)), [request(each) for each in prompts])
    assert result.tiers is not None
    hits = {medium: each["num_tokens"] // BLOCK for medium, each in result.tiers["hits"].items()}
    assert hits == {"device": sum(each[0] for each in expected), "host": sum(each[1] for each in expected)}
    assert result.hits["num_hit_blocks"] == sum(map(sum, expected))
    assert result.tiers["media"]["host"]["written_nbytes"] == model.num_written * ENTRY


CONVERSATIONS: Final = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(1, BLOCK), st.integers(1, 6)), max_size=10
)


@given(conversations=CONVERSATIONS, admission=st.sampled_from(["always", "before-eviction"]))
@settings(max_examples=40, deadline=None)
def test_an_endless_tier_hits_what_an_endless_pool_hits(
    conversations: list[tuple[list[int], int, int]], admission: str
) -> None:
    requests = [request(blocks, more, 0.0, output) for blocks, more, output in conversations]
    with_tier = served(config(host(admission=admission), num_blocks=9), requests)
    endless = served(config(num_blocks=500), requests)
    assert with_tier.hits == endless.hits


@given(
    conversations=CONVERSATIONS,
    bandwidth=st.sampled_from([1e7, 1e9, 1e11]),
    changes=st.sampled_from(
        [{}, {"overlap": True}, {"num_samples": 2}, {"beam_width": 2}, {"preemption": "swap", "num_host_blocks": 9}]
    ),
    caps=st.tuples(st.integers(0, 9), st.integers(0, 30)),
    admission=st.sampled_from(["second-offer", "before-eviction"]),
)
@settings(max_examples=25, deadline=None)
def test_whatever_is_served_all_invariants_hold_and_every_request_ends(
    conversations: list[tuple[list[int], int, int]],
    bandwidth: float,
    changes: dict[str, Any],
    caps: tuple[int, int],
    admission: Admission,
) -> None:
    tiers = (
        SimulatedTier("host", caps[0] * ENTRY, bandwidth, 0.0, admission),
        SimulatedTier("disk", caps[1] * ENTRY, bandwidth / 10, 1e-3),
    )
    requests = [
        request(blocks, more, 0.05 * place, output) for place, (blocks, more, output) in enumerate(conversations)
    ]
    setting = config(*tiers, num_blocks=20, max_sequences=4, **changes)
    result = served(setting, requests)
    assert result.requests["num_finished"] == len(requests)
    assert result.as_dict() == served(setting, requests).as_dict()
    if result.tiers is not None:
        hits = [each["num_tokens"] for each in result.tiers["hits"].values()]
        assert min(hits) >= 0
        assert sum(hits) == result.hits["num_hit_tokens"]


def test_a_tier_of_no_size_is_no_tier() -> None:
    requests = [request((1, number % 3, 3)) for number in range(6)]
    assert served(config(host(0)), requests).as_dict() | {"config": None} == served(config(), requests).as_dict() | {
        "config": None
    }


def test_windows_and_states_are_loaded_at_ends() -> None:
    groups = (FullAttention(BLOCK, pool="full"), SlidingWindow(window=8, block_size=BLOCK, pool="window"))
    setting = config(host(), groups=groups, block_nbytes={"full": ENTRY, "window": ENTRY}, num_blocks=8)
    prompts = [(1, 2, 3, 4), (5, 6, 7, 8), (1, 2, 3, 4)]
    result = served(setting, [request(each, 1) for each in prompts])
    assert result.tiers is not None
    assert result.tiers["hits"]["host"]["num_tokens"] == 4 * BLOCK


# Loading or computing


def returning(num_times: int) -> list[TokenizedRequest]:
    """Two prompts in turn, far apart; the pool has room for one."""
    return [request((1 + number % 2, 2, 3, 4, 5), 0, 10.0 * number) for number in range(num_times)]


def test_a_slow_disk_is_tried_and_then_not_loaded_from() -> None:
    slow = SimulatedTier("disk", ENDLESS, 4 * ENTRY / 0.1)  # 0.025 s a block, which 4 ms compute
    result = served(config(slow), returning(20))
    assert result.tiers is not None
    disk = result.tiers["media"]["disk"]
    assert disk["num_loads"] == 1
    assert disk["num_computed_instead"] >= 17
    assert disk["not_loaded"]["computing was faster"] == disk["num_tokens_computed_instead"]


def test_a_fast_tier_is_loaded_from_and_the_load_takes_time() -> None:
    fast = SimulatedTier("host", ENDLESS, ENTRY / 0.001)
    result = served(config(fast), returning(20))
    assert result.tiers is not None
    assert result.tiers["media"]["host"]["num_loads"] == 18
    assert result.tiers["media"]["host"]["mean_load_s"] == pytest.approx(0.005)  # five blocks, the last one not hit
    without = served(config(), returning(20))
    assert result.latency["first_token_s"]["p50"] < without.latency["first_token_s"]["p50"]


def test_a_request_waits_no_longer_than_the_deadline() -> None:
    dead = SimulatedTier("disk", ENDLESS, 1e9, 100.0, loads="always", deadline_s=0.5)
    result = served(config(dead), returning(30))
    assert result.requests["num_finished"] == 30
    assert result.latency["queueing_s"]["max"] <= 0.5 + 1e-3
    assert result.tiers is not None
    assert result.tiers["hits"]["disk"]["num_tokens"] == 0


def test_what_is_not_on_the_first_tier_comes_from_the_second() -> None:
    tiers = (host(6 * ENTRY), SimulatedTier("disk", ENDLESS, AT_ONCE, loads="always"))
    prompts = [(1, 2, 3, 4, 5), (6, 7, 8, 9, 10), (1, 2, 3, 4, 5)]
    result = served(config(*tiers), [request(each) for each in prompts])
    assert result.tiers is not None
    assert result.tiers["hits"]["host"]["num_tokens"] == BLOCK  # the head is evicted last
    assert result.tiers["hits"]["disk"]["num_tokens"] == 3 * BLOCK


def test_tiers_change_what_waits_and_no_other_figure_of_a_trace_that_never_returns() -> None:
    requests = [request((number, 2, 3), 0, 0.02 * number) for number in range(1, 9)]
    result, without = served(config(host()), requests), served(config(), requests)
    assert result.latency == without.latency
    assert result.steps == without.steps


# The medium


def test_reads_share_a_direction_and_writes_the_other() -> None:
    medium = Medium(100.0, 0.5)
    key = bytes(32)
    assert medium.begin(Read(1, key, 200, 9.0), 1.0) == 3.5
    assert medium.begin(Read(2, key, 100, 9.0), 1.0) == 4.5
    assert medium.begin(Write(3, key, 300, 1, 0, 9.0), 1.0) == 4.5
    assert medium.begin(Delete(4, key, 9.0), 1.0) == 1.0


def test_a_store_reports_ends_in_their_order() -> None:
    setting = SimulatedTier("disk", 10 * ENTRY, 1.0 * ENTRY)
    store = VirtualStore(setting.store_config(ENTRY), Medium(ENTRY, 0.0), (ENTRY,))
    assert store.next_event_s() is None
    store.advance(5.0)
    assert store.statistics().num_entries == 0
    store.check()


# Bad input


@pytest.mark.parametrize(
    "wrong",
    [{"nbytes": -1}, {"bandwidth": 0}, {"latency_s": -1}, {"medium": "tape"}, {"admission": "no"}, {"loads": "never"}],
)
def test_a_tier_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"medium": "disk", "nbytes": 100, "bandwidth": 1.0, **wrong}
    with pytest.raises(ConfigurationError):
        SimulatedTier(**fields)


def test_one_medium_has_one_tier() -> None:
    with pytest.raises(ConfigurationError, match="each medium may have one tier"):
        replace(config(), tiers=(host(), host()))
