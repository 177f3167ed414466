"""Where requests go, and why."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv import FullAttention
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import ConfigurationError
from pagedkv.routing import IndexState, ReplicaIndex, Router, Routing, RoutingReason, RoutingRules
from tests.space.spaces import new_space, tokens

pytestmark = pytest.mark.interpreted

PROMPT = tokens(400)


def new_router(
    *names: str, routing: Routing = "prefix", rules: RoutingRules | None = None, lifetimes: bool = True
) -> Router:
    router = Router(ReplicaIndex((FullAttention(4),)), routing, rules)
    for name in names:
        router.add_replica(name)
        if lifetimes:
            router.index.note_alive(name, "1", 0)
    return router


def store(router: Router, name: str, prompt: np.ndarray, batch: int = 0) -> None:
    """Let a replica store a prompt, and the index learn of it."""
    space = new_space(FullAttention(4), num_blocks=200, max_tokens=800, events=True)
    space.allocate(prompt)
    router.apply(name, "1", batch, space.drain_events(), 0.0)


def test_a_prompt_goes_where_most_of_it_is() -> None:
    router = new_router("a", "b", "c")
    store(router, "b", PROMPT[:200])
    choice = router.choose(1, PROMPT, 0.0)
    assert (choice.replica, choice.reason) == ("b", RoutingReason.MOST_CACHED)
    assert (choice.chosen.num_hit_tokens, choice.chosen.num_promised_tokens, choice.chosen.cost) == (200, 0, 400)
    assert [each.cost for each in choice.candidates[1:]] == [800, 800]
    assert choice.explain().splitlines() == [
        "400 tokens go to b: it has most of the prompt",
        "  b: 200 tokens cached; 0 tokens queued of 0 waiting, 0 decoding; cost 400",
        "  a: 0 tokens cached; 0 tokens queued of 0 waiting, 0 decoding; cost 800",
        "  c: 0 tokens cached; 0 tokens queued of 0 waiting, 0 decoding; cost 800",
    ]


def test_what_no_replica_has_goes_to_the_least_loaded() -> None:
    router = new_router("a", "b")
    assert router.choose(1, PROMPT, 0.0).replica == "a"
    choice = router.choose(2, tokens(40, first=1000), 0.0)
    assert (choice.replica, choice.reason) == ("b", RoutingReason.NOT_CACHED)


def test_where_all_have_equally_much_the_load_is_the_reason() -> None:
    router = new_router("a", "b")
    for name in ("a", "b"):
        store(router, name, PROMPT[:200])
    router.choose(1, tokens(20, first=900), 0.0, among=["a"])
    choice = router.choose(2, PROMPT, 0.0)
    assert (choice.replica, choice.reason) == ("b", RoutingReason.LEAST_LOADED)
    three = new_router("a", "b", "c")
    for name in ("a", "b"):
        store(three, name, PROMPT[:200])
    assert three.choose(1, PROMPT, 0.0).reason is RoutingReason.MOST_CACHED, "c has less"


def test_a_long_queue_is_worth_more_than_a_short_prefix() -> None:
    router = new_router("a", "b")
    store(router, "a", PROMPT[:40])
    router.choose(1, tokens(500, first=2000), 0.0, among=["a"])
    choice = router.choose(2, PROMPT, 0.0)
    assert (choice.replica, choice.reason) == ("b", RoutingReason.SHORTER_QUEUE)
    router.ended(1)
    assert router.choose(3, PROMPT, 0.0).replica == "b", "which is promised all of it"


def test_a_burst_of_one_prefix_does_not_scatter_before_its_events_come() -> None:
    """Twenty that wait are less than 1,600 tokens anew; of 400 tokens six would be more, and it would be right to."""
    router, shared = new_router("a", "b", "c", "d"), tokens(1600)
    prompts = [np.concatenate([shared, tokens(8, first=3000 + 10 * number)]) for number in range(20)]
    choices = [router.choose(number, prompt, 0.001 * number) for number, prompt in enumerate(prompts)]
    assert len({choice.replica for choice in choices}) == 1
    assert choices[1].chosen.num_promised_tokens == choices[1].chosen.num_hit_tokens == 1600


def test_a_burst_does_not_pile_up_either() -> None:
    """Requests that decode are work, so that after some the prefix is computed a second time elsewhere."""
    router = new_router("a", "b", rules=RoutingRules(decode_tokens=64))
    counts: Counter[str] = Counter()
    for number in range(40):
        choice = router.choose(number, np.concatenate([PROMPT, tokens(8, first=1000 + 10 * number)]), 0.0)
        router.prefilled(number)
        counts[choice.replica] += 1
    assert set(counts.values()) == {20}


@pytest.mark.parametrize("has_answers", [False, True])
def test_a_burst_of_one_prompt_is_shared_out_before_any_of_it_decodes(*, has_answers: bool) -> None:
    """None has its first token yet, so what waits counts with its decoding; idle replicas compute the prefix too."""
    router, prompt = new_router("a", "b", "c"), tokens(1600)
    counts: Counter[str] = Counter()
    for number in range(400):
        choice = router.choose(number, prompt, 0.001 * number)
        counts[choice.replica] += 1
        if has_answers and number >= 30:
            router.prefilled(number - 30)
    assert len(counts) == 3
    assert max(counts.values()) - min(counts.values()) <= 30
    reasons = {reason for reason, number in router.num_by_reason.items() if number}
    assert RoutingReason.SHORTER_QUEUE in reasons, "a copy was cheaper than waiting"


def test_a_copy_is_made_only_where_it_is_cheaper_than_waiting() -> None:
    router, prompt = new_router("a", "b"), tokens(1600)
    homes = [router.choose(number, prompt, 0.0).replica for number in range(12)]
    assert set(homes) == {"a"}, "eleven short ones behind it cost less than 1,600 tokens anew"


def test_a_replica_over_its_share_is_passed_over_and_that_is_the_reason() -> None:
    router = new_router("a", "b", rules=RoutingRules(share_slack_tokens=100, most_over_share=0.1))
    store(router, "a", PROMPT)
    for number in range(3):
        router.choose(number, tokens(300, first=1000 * number), 0.0, among=["a"])
        router.ended(number)
    choice = router.choose(9, np.concatenate([PROMPT[:200], tokens(150, first=5000)]), 0.0)
    assert (choice.replica, choice.reason) == ("b", RoutingReason.BALANCE)
    assert [each.is_over_share for each in choice.candidates] == [False, True]
    assert "over its share" in choice.explain()
    later = router.choose(10, np.concatenate([PROMPT[:200], tokens(150, first=6000)]), 1000.0)
    assert later.replica == "a", "what was computed long ago weighs nothing"


def test_promises_end_with_their_events_or_their_time() -> None:
    router = new_router("a", "b", rules=RoutingRules(promise_s=2.0))
    assert router.choose(1, PROMPT, 0.0, among=["b"]).replica == "b"
    assert router.choose(2, PROMPT, 1.0).chosen.num_promised_tokens == 396
    store(router, "b", PROMPT)
    choice = router.choose(3, PROMPT, 1.5)
    assert (choice.chosen.num_hit_tokens, choice.chosen.num_promised_tokens) == (396, 0)
    router = new_router("a", "b", rules=RoutingRules(promise_s=2.0))
    router.choose(1, PROMPT, 0.0, among=["b"])
    router.ended(1)
    assert router.choose(2, PROMPT, 5.0, among=["b"]).chosen.num_hit_tokens == 0


def test_a_degraded_index_counts_and_says_so() -> None:
    router = new_router("a", "b")
    store(router, "a", PROMPT, batch=3)
    choice = router.choose(1, PROMPT, 0.0)
    assert (choice.replica, choice.chosen.state) == ("a", IndexState.DEGRADED)
    assert "index degraded" in choice.explain()


def test_a_replica_that_is_gone_gives_its_requests_back() -> None:
    router = new_router("a", "b")
    first = [router.choose(number, tokens(40, first=100 * number), 0.0).replica for number in range(6)]
    lost = router.remove_replica("a")
    assert lost == tuple(number for number, name in enumerate(first) if name == "a")
    again = [router.choose(number, tokens(40, first=100 * number), 0.0) for number in lost]
    assert {(choice.replica, choice.reason) for choice in again} == {("b", RoutingReason.ONLY)}
    router.loads.check()
    router.add_replica("a")
    assert router.choose(99, PROMPT, 0.0).replica == "a"


def test_a_choice_that_is_taken_back_leaves_no_promise_and_no_work() -> None:
    router = new_router("a", "b")
    first = router.choose(1, PROMPT, 0.0)
    assert first.replica == "a"
    router.take_back(1, router.index.hash(PROMPT, NO_KEYS), 0.5)
    again = router.choose(1, PROMPT, 1.0)
    assert (again.reason, again.candidates) == (first.reason, first.candidates), "as if it had never been sent"
    router.loads.check()
    router.take_back(2, router.index.hash(PROMPT, NO_KEYS), 1.0)
    assert len(router.loads) == 1, "one that is not outstanding is nothing"


def test_what_others_promised_stays_when_a_choice_is_taken_back() -> None:
    router = new_router("a", "b")
    longer = np.concatenate([PROMPT, tokens(40, first=900)])
    router.choose(1, PROMPT, 0.0)
    assert router.choose(2, longer, 0.0).chosen.num_promised_tokens == 400
    router.take_back(2, router.index.hash(longer, NO_KEYS), 0.0)
    assert router.choose(3, longer, 0.0).chosen.num_promised_tokens == 400


def test_a_reason_is_true_of_the_replicas_that_may_not_be_chosen_too() -> None:
    router = new_router("a", "b", "c")
    store(router, "a", PROMPT)
    store(router, "b", PROMPT[:200])
    reasons = [
        router.choose(number, PROMPT, 0.0, among=among).reason for number, among in enumerate((["b", "c"], ["c"]))
    ]
    assert reasons == [RoutingReason.UNAVAILABLE, RoutingReason.ONLY_LEFT]
    assert router.choose(9, tokens(90, first=5000), 0.0, among=["b", "c"]).reason is RoutingReason.NOT_CACHED


def test_in_turn_and_by_load_alone() -> None:
    turns = new_router("a", "b", "c", routing="round-robin")
    store(turns, "b", PROMPT)
    assert [turns.choose(number, PROMPT, 0.0).replica for number in range(4)] == ["a", "b", "c", "a"]
    loads = new_router("a", "b", routing="least-loaded")
    store(loads, "b", PROMPT)
    loads.choose(0, tokens(20, first=900), 0.0, among=["b"])
    choice = loads.choose(1, PROMPT, 0.0)
    assert (choice.replica, choice.reason) == ("a", RoutingReason.LEAST_LOADED)


@given(st.lists(st.tuples(st.sampled_from(["choose", "prefilled", "ended"]), st.integers(0, 9)), max_size=60))
def test_loads_are_the_sums_of_what_is_outstanding(operations: list[tuple[str, int]]) -> None:
    router, outstanding = new_router("a", "b"), set[int]()
    for operation, number in operations:
        if operation == "choose" and number not in outstanding:
            router.choose(number, tokens(10 + number, first=100 * number), 0.0)
            outstanding.add(number)
        elif operation == "prefilled":
            router.prefilled(number)
        elif operation == "ended":
            router.ended(number)
            outstanding.discard(number)
        router.loads.check()
        assert len(router.loads) == len(outstanding)


def test_wrong_calls_are_refused() -> None:
    router = new_router("a")
    router.choose(1, PROMPT, 0.0)
    with pytest.raises(ConfigurationError, match="request 1 is already outstanding, on 'a'"):
        router.choose(1, PROMPT, 0.0)
    with pytest.raises(ConfigurationError, match="there is no replica to choose from"):
        new_router().choose(1, PROMPT, 0.0)
    with pytest.raises(ConfigurationError, match="no replica 'z'"):
        router.choose(2, PROMPT, 0.0, among=["a", "z"])
    with pytest.raises(ConfigurationError, match="routing"):
        new_router(routing="random")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="promise_s must be above 0"):
        RoutingRules(promise_s=0)
    with pytest.raises(ConfigurationError, match="decode_tokens must be 0 or more"):
        RoutingRules(decode_tokens=-1)
