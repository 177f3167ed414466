"""The scheduler as an engine meets it: tokens unknown in advance, ends, aborts, batches in flight, misuse."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention, RecurrentState, Replay, SlidingWindow
from pagedkv.errors import ConfigurationError, StepError, TokenError
from pagedkv.scheduling import UNKNOWN_TOKEN, PreemptionKind, Request, SchedulingConfig
from tests.scheduling.engine import Engine
from tests.space.replay_model import evict_windows

pytestmark = pytest.mark.interpreted


def engine(num_blocks: int = 40, num_host_blocks: int = 0, watermark: float = 0.0, **limits: Any) -> Engine:  # noqa: ANN401 - as they are
    """Make an engine over a pool of blocks of 4 tokens."""
    preemption: PreemptionKind = "swap" if num_host_blocks else "recompute"
    scheduling = replace(SchedulingConfig(8, 32, preemption), **limits)
    config = SpaceConfig(
        groups=(FullAttention(4),),
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_sequences=(2 if num_host_blocks else 1) * scheduling.max_sequences,
        max_tokens=4 * num_blocks,
        watermark=watermark,
        prefix_caching=True,
    )
    return Engine(scheduling, config)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_everybody_is_served_whatever_happens(data: st.DataObject) -> None:
    """Requests come, end early and are aborted while up to three batches are in flight; none is left over."""
    served = engine(
        data.draw(st.integers(8, 30)),
        max_sequences=data.draw(st.integers(3, 8)),
        max_batched_tokens=data.draw(st.integers(8, 40)),
        num_host_blocks=data.draw(st.sampled_from([0, 0, 6, 30])),
        watermark=data.draw(st.sampled_from([0.0, 0.1])),
        most_drafts=data.draw(st.sampled_from([0, 1, 5])),
    )
    served.end_probability = data.draw(st.sampled_from([0.0, 0.0, 0.1, 0.4]))
    most_in_flight = data.draw(st.integers(1, 3))
    trunk = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort"])):
            case "add":
                served.add(
                    trunk[: data.draw(st.integers(1, len(trunk)))] + data.draw(st.lists(st.integers(0, 3), max_size=6)),
                    data.draw(st.integers(0, 20)),
                    num_sequences=data.draw(st.integers(1, 3)),
                    priority=data.draw(st.integers(0, 1)),
                    is_guessed=data.draw(st.booleans()),
                )
            case "abort" if served.served:
                request = data.draw(st.sampled_from(served.served)).request
                was_done = request.is_done
                assert served.scheduler.abort(request) is not was_done
                served.space.check()
            case _:
                if len(served.in_flight) == most_in_flight or (served.in_flight and data.draw(st.booleans())):
                    served.finish()
                else:
                    served.schedule()
    while served.in_flight:
        served.finish()
    served.run()
    assert all(each.request.is_done for each in served.served)
    served.schedule()
    served.finish()


def test_two_batches_in_flight_share_no_request() -> None:
    served = engine()
    served.add([1, 2, 3], 5)
    served.step()
    served.add([4, 5, 6], 5)
    first, second = served.schedule(), served.schedule()
    assert first.decoding is not None
    assert [request.number for request in first.decoding.requests] == [0]
    assert [chunk.request.number for chunk in first.prefilling] == [1]
    assert second.decoding is None
    assert second.num_samples == 0
    served.finish()
    third = served.schedule()
    assert third.decoding is not None
    assert [request.number for request in third.decoding.requests] == [0, 1]
    served.finish()
    served.finish()
    served.run()


def test_those_who_decode_are_the_same_object_while_nobody_comes_or_goes() -> None:
    served = engine()
    served.add([1, 2, 3], 8)
    served.add([1, 2, 4], 8)
    served.step()
    batches = [served.step() for _ in range(7)]
    assert all(batch.decoding is other.decoding is not None for batch, other in pairwise(batches))
    assert served.scheduler.is_idle


def test_a_sample_that_ends_gives_its_row_up_and_the_others_go_on() -> None:
    served = engine()
    request = served.add([1, 2, 3, 4, 5], 6, num_sequences=3)
    batch = served.scheduler.schedule()
    served.scheduler.finish(batch, [7, 8, 9], ended=[1])
    assert len(request.rows) == request.num_sequences == 2
    batch = served.scheduler.schedule()
    assert batch.decoded_token_ids.tolist() == [7, 9]
    served.scheduler.finish(batch, [1, 2], ended=[0])
    assert len(request.rows) == request.num_sequences == 1
    batch = served.scheduler.schedule()
    assert batch.decoded_token_ids.tolist() == [2]
    assert served.scheduler.finish(batch, [5], ended=[0]).finished == (request,)
    assert served.scheduler.is_idle
    assert served.space.statistics().pools[0].num_in_use == 0


def test_who_is_held_keeps_its_blocks_and_the_others_go_on() -> None:
    served = engine()
    slow, other = served.add([1, 2, 3, 4, 5], 4, num_sequences=2), served.add([6, 7], 5)
    served.scheduler.finish(served.scheduler.schedule(), [-1, 9, 8], held=[slow])  # its first tokens wait
    batch = served.scheduler.schedule()
    assert batch.decoded_token_ids.tolist() == [8]
    served.scheduler.finish(batch, [1])
    with pytest.raises(TokenError, match="request 0 samples 2 tokens, got 1"):
        served.scheduler.supply(slow, [3])
    assert served.scheduler.supply(slow, [3, 4]).first_tokens == (slow,)
    with pytest.raises(StepError, match="request 0 is not held"):
        served.scheduler.supply(slow, [3, 4])
    batch = served.scheduler.schedule()
    assert batch.decoded_token_ids.tolist() == [3, 4, 1]
    served.scheduler.finish(batch, [-1, -1, 2], held=[slow])  # now those that it decodes
    assert (slow.num_generated, other.num_generated) == (1, 3)
    batch = served.scheduler.schedule()
    assert batch.decoded_token_ids.tolist() == [2]
    with pytest.raises(StepError, match="request 1 is not held"):
        served.scheduler.supply(other, [3])
    served.scheduler.finish(batch, [7])
    assert not served.scheduler.supply(slow, [5, 6], ended=[0]).finished
    assert len(slow.rows) == slow.num_sequences == 1
    batch = served.scheduler.schedule()
    assert batch.decoded_token_ids.tolist() == [6, 7]
    assert served.scheduler.finish(batch, [1, 0], held=[slow]).finished == (other,)
    assert served.scheduler.supply(slow, [1], ended=[0]).finished == (slow,)
    served.space.check()
    assert served.scheduler.is_idle
    assert served.space.statistics().pools[0].num_in_use == 0


def test_who_is_held_may_be_preempted_or_aborted() -> None:
    served = engine(num_blocks=6)
    first, held = served.add([1, 2, 3], 16), served.add([6, 7, 8], 12)
    served.scheduler.finish(served.scheduler.schedule(), [1, -1], held=[held])
    served.served[0].generated, served.served[1].generated = [[1]], []
    while not held.num_preemptions:
        assert not first.is_done
        batch = served.scheduler.schedule()
        served.scheduler.finish(batch, [1] * batch.num_samples)
        served.served[0].generated[0].append(1)
    with pytest.raises(StepError, match="not held"):
        served.scheduler.supply(held, [5])
    assert served.scheduler.abort(held)
    served.space.check()


def test_a_hit_may_be_bounded() -> None:
    served = engine()
    served.add(list(range(12)), 1)
    served.step()
    for bound, num_hit in ((None, 8), (5, 4), (0, 0)):
        request = served.add(list(range(12)), 1)
        request.max_hit_tokens = bound
        batch = served.step()
        assert [admission.num_hit_tokens for admission in batch.admitted] == [num_hit]


def test_beams_continue_the_parents_that_the_sampler_names() -> None:
    served = engine()
    request = served.add([1, 2, 3], 6, num_sequences=3)
    served.scheduler.finish(served.scheduler.schedule(), [10, 20, 30])
    batch = served.scheduler.schedule()
    rows = list(request.rows)
    served.scheduler.finish(batch, [11, 12, 13], parents={request: [2, 2, 0]})
    batch = served.scheduler.schedule()
    served.space.check()
    assert batch.decoded_token_ids.tolist() == [11, 12, 13]
    assert (request.rows[0], request.rows[2]) == (rows[2], rows[0])
    tables = [served.space.block_ids(row) for row in request.rows]
    assert tables[0][0] == tables[1][0] != tables[2][0]  # the second block, where they write, is each one's own
    assert len({table[1] for table in tables}) == 3


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_is_taken_notice_of_at_any_moment(num_steps: int) -> None:
    served = engine(max_batched_tokens=8)
    aborted, other = served.add(list(range(14)), 3), served.add(list(range(50, 53)), 9)
    for _ in range(num_steps):
        served.step()
    served.schedule()
    was_done = aborted.is_done
    assert served.scheduler.abort(aborted) is not was_done
    assert served.scheduler.abort(aborted) is False
    served.finish()
    served.run()
    assert served.finished[-1] is other
    assert (aborted in served.finished) is was_done


def test_batches_finish_in_order_and_with_all_their_tokens() -> None:
    served = engine()
    served.add([1, 2, 3], 5)
    first, second = served.scheduler.schedule(), served.scheduler.schedule()
    with pytest.raises(StepError, match=re.escape("got step 2, the oldest in flight is step 1")):
        served.scheduler.finish(second, [])
    with pytest.raises(TokenError, match="step 1 samples 1 tokens, got 2"):
        served.scheduler.finish(first, [1, 2])
    served.scheduler.finish(first, np.array([4], np.int32))
    served.scheduler.finish(second, [])
    with pytest.raises(StepError, match="the oldest in flight is none"):
        served.scheduler.finish(second, [])


def test_guesses_take_what_is_left_of_a_step() -> None:
    served = engine(most_drafts=4, max_batched_tokens=8)
    served.guesses_right = True
    served.add([1, 2, 3, 4], 12, is_guessed=True)
    served.step()
    batch = served.schedule()
    assert batch.drafts is not None
    assert (batch.drafts.counts.tolist(), len(batch.drafts.token_ids)) == ([4], 4)
    accepted = batch.drafts.token_ids.tolist()
    with pytest.raises(TokenError, match="step 2 computes 4 drafts of sequence 0, but num_accepted is 5"):
        served.scheduler.finish(batch, [7], num_accepted=[5])
    served.finish()
    (request,) = (each.request for each in served.served)
    assert served.served[0].generated[0][-5:-1] == accepted
    assert (request.num_generated, served.space.num_tokens(request.rows[0])) == (6, 9)
    served.add([5] * 7, 2)  # with the token that is decoded, all that a step may have
    batch = served.schedule()
    assert (batch.drafts, len(batch.prefilling[0].token_ids)) == (None, 7)
    served.finish()
    served.run()


def test_drafts_whose_ids_come_late_are_accepted_and_published_as_what_they_became() -> None:
    served = engine(most_drafts=4)
    served.guesses_right, served.late_probability = True, 1.0
    served.add([1, 2, 3, 4], 12, is_guessed=True)
    served.step()
    batch = served.scheduler.schedule()
    assert batch.drafts is not None
    assert batch.drafts.token_ids.tolist() == [UNKNOWN_TOKEN] * 4
    with pytest.raises(TokenError, match="step 2 has drafts whose ids are not known"):
        served.scheduler.finish(batch, [7], num_accepted=[1])
    for wrong in ([1, 2, 3], [1, 2, 3, -1]):
        with pytest.raises(TokenError, match="step 2 has 4 drafts, whose ids are 0 or more"):
            served.scheduler.fill_drafts(batch, wrong)
    served.scheduler.fill_drafts(batch, [11, 12, 13, 14])
    first = served.served[0].generated[0][0]
    served.scheduler.finish(batch, [7], num_accepted=[3])
    with pytest.raises(StepError, match="step 2 is not the newest in flight"):
        served.scheduler.fill_drafts(batch, [11, 12, 13, 14])
    assert served.space.match([1, 2, 3, 4, first, 11, 12, 13, 7]).num_tokens == 8
    assert served.space.match([1, 2, 3, 4, first, 11, 12, 14, 7]).num_tokens == 4


def test_guesses_take_what_is_left_of_the_blocks_and_nobody_gives_any_up() -> None:
    """Four blocks of 4 tokens: beside 12 tokens and 4 there is none for guesses; beside 13 of one request there is."""
    served = engine(num_blocks=5, most_drafts=4)
    served.guesses_right = True
    served.add([1] * 11, 5, is_guessed=True)
    served.add([2] * 3, 2)
    served.step()
    full = served.step()
    assert (full.drafts, full.preempted, len(full.decoded_token_ids)) == (None, (), 2)
    alone = served.step()
    assert alone.drafts is not None
    assert alone.drafts.counts.tolist() == [2]  # one behind these, and it has all that it asked for
    assert served.scheduler.is_idle


def test_a_prompt_alone_is_computed_and_over() -> None:
    served = engine(max_batched_tokens=8)
    request = served.add(list(range(13)), 0)
    assert served.run() == 2
    assert served.finished == [request]
    assert request.num_generated == 0


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_sequences": 0}, "max_sequences must be at least 1, got 0"),
        ({"max_sequences": 9, "max_batched_tokens": 8}, "max_batched_tokens (8) must be at least max_sequences (9)"),
        ({"preemption": "drop"}, "preemption must be recompute or swap, got 'drop'"),
    ],
)
def test_limits_that_cannot_work_are_refused(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        SchedulingConfig(**values)  # type: ignore[arg-type] # what a caller without types may give


def test_who_is_swapped_out_holds_no_rows_that_others_need() -> None:
    """A request of a smaller key finds rows for all its samples, though another one waits on the host."""
    served = engine(num_blocks=7, num_host_blocks=30, max_sequences=2, max_batched_tokens=16)
    last = served.add([1] * 8, 12, priority=-1)
    served.add([2] * 8, 12)
    while not served.scheduler.num_swapped:
        served.step()
    first = served.add([3] * 4, 4, num_sequences=2, priority=1)
    for _ in range(60):
        if not served.scheduler.is_idle:
            served.step()
    assert len(served.finished) == 3
    assert served.finished.index(first) < served.finished.index(last)


def test_promise_23_a_chunk_ends_where_a_state_is_to_be_kept() -> None:
    """Of 22 tokens 20 are computed first: the same prompt hits as many, and one that goes on from there, too."""
    groups = FullAttention(4), RecurrentState(16)
    num_blocks = {"device": 41, "state": 9}
    config = SpaceConfig(groups, num_blocks, max_sequences=8, max_tokens=160, watermark=0.0)
    served = Engine(SchedulingConfig(max_sequences=8, max_batched_tokens=32), config)
    told = []
    for prompt in ([*range(22)], [*range(22)], [*range(22), 7, 8, 9]):
        served.add(prompt, 2)
        first = served.step()
        told.append((first.admitted[0].num_hit_tokens, [(chunk.start, chunk.stop) for chunk in first.prefilling]))
        served.run()
    assert told == [(0, [(0, 20)]), (20, [(20, 22)]), (20, [(20, 24)])]


def replaying_engine(max_batched_tokens: int) -> Engine:
    """Make an engine whose windows are lost once a prompt of 40 tokens has run."""
    config = SpaceConfig(
        (FullAttention(4), SlidingWindow(5, 4, pool="windows", replay=Replay(12, 3))),
        num_blocks={"device": 60, "windows": 40},
        max_sequences=8,
        max_tokens=200,
        watermark=0.0,
        receipts=True,
    )
    served = Engine(SchedulingConfig(max_sequences=8, max_batched_tokens=max_batched_tokens), config)
    served.add(list(range(100, 160)), 1)
    served.run()
    evict_windows(served.space)
    return served


@pytest.mark.parametrize(
    ("budget", "start", "stop"), [(64, 40, 47), (16, 40, 44), (13, 40, 41), (12, 0, 12)], ids=lambda number: f"{number}"
)
def test_windows_are_computed_again_within_the_budget_of_a_step(budget: int, start: int, stop: int) -> None:
    served = replaying_engine(budget)
    served.add([*range(100, 140), *range(7)], 1)
    (chunk,) = served.step().prefilling
    assert (chunk.start, chunk.stop) == (start, stop)
    served.run()
    receipts = served.space.statistics().receipts
    assert receipts is not None
    assert receipts.num_replayed == (12 if start else 0)


def windowed_engine(num_windows: int = 9) -> Engine:
    """Make an engine in which a longer prompt than 8 tokens is computed in chunks: its pool has few windows."""
    groups = FullAttention(1, "full"), SlidingWindow(4, 1, pool="windows")
    num_blocks = {"full": 60, "windows": num_windows + 1}
    config = SpaceConfig(groups, num_blocks=num_blocks, max_sequences=8, max_tokens=40, watermark=0.0)
    return Engine(SchedulingConfig(max_sequences=8, max_batched_tokens=32), config)


def test_a_chunk_keeps_to_the_budget_of_its_step_and_to_what_its_request_can_hold() -> None:
    served = windowed_engine()
    served.add([*range(20)], 2)
    chunks = []
    for budget in (32, 2, 32, 3, 32, 32):
        batch = served.scheduler.schedule(budget)
        served.in_flight.append(batch)
        served.finish()
        chunks += [(chunk.start, chunk.stop) for chunk in batch.prefilling]
    assert chunks == [(0, 5), (5, 7), (7, 12), (12, 15), (15, 20)]


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_chunks_that_are_shifted_against_the_blocks_are_halved_where_windows_run_short(num_in_flight: int) -> None:
    """Chunks of 8 that begin at a block's beginning fit; after a chunk of 2 they lie on one block more."""
    groups = FullAttention(4, "full"), SlidingWindow(4, 4, pool="windows")
    config = SpaceConfig(groups, {"full": 30, "windows": 4}, max_sequences=8, max_tokens=40, watermark=0.0)
    served = Engine(SchedulingConfig(max_sequences=8, max_batched_tokens=32), config)
    served.add([*range(30)], 1)
    chunks = []
    for budget in (2, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32):
        batch = served.scheduler.schedule(budget)
        served.in_flight.append(batch)
        chunks += [(chunk.start, chunk.stop) for chunk in batch.prefilling]
        if len(served.in_flight) == num_in_flight:
            served.finish()
    assert chunks == [(0, 2), (2, 10), *((start, start + 4) for start in range(10, 30, 4))]


def test_room_for_the_rest_of_a_prompt_is_not_given_to_a_newcomer() -> None:
    """The prompt's chunks leave budget and windows, which its next chunks take."""
    served = windowed_engine()
    long, short = served.add([*range(20)], 3), served.add([9] * 4, 3)
    admitted: dict[Request, int] = {}
    while not served.scheduler.is_idle:
        batch = served.step()
        assert not batch.preempted
        admitted |= {admission.request: batch.plan.step_id for admission in batch.admitted}
    assert admitted[short] > admitted[long] + 3, "it came while the prompt was computed in 4 steps"


def test_drafts_of_all_sequences_are_appended_together_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(most_drafts=3)
    served.guesses_right, served.late_probability = True, 0.0
    for number in range(3):
        served.add([number] * 4, 12, is_guessed=True)
    served.step()
    appended, append = [], served.space.append

    def noted(rows: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as they are
        appended.append((len(rows), options.get("num_draft")))
        return append(rows, *args, **options)

    monkeypatch.setattr(served.space, "append", noted)
    assert served.step().num_drafted == 9
    assert appended == [(3, None), (3, [3, 3, 3])]


def test_nobody_is_preempted_where_just_enough_blocks_wait_for_a_step_in_flight() -> None:
    """Of three blocks two are held, and the third comes back with the step that computes an aborted request."""
    served = engine(num_blocks=4)
    first, second = served.add([1] * 4, 6), served.add([2] * 4, 6)
    served.scheduler.finish(served.scheduler.schedule(), [-1, -1], held=[first, second])
    aborted = served.add([3] * 4, 6)
    in_flight = served.scheduler.schedule()
    assert [admission.request for admission in in_flight.admitted] == [aborted]
    served.scheduler.supply(first, [7])
    served.scheduler.abort(aborted)
    batch = served.scheduler.schedule()
    assert (batch.decoding, batch.preempted) == (None, ())
    served.scheduler.finish(in_flight, [8])
    served.scheduler.finish(batch, [])
    batch = served.scheduler.schedule()
    assert (batch.decoded_token_ids.tolist(), batch.preempted) == ([7], ())


def test_requests_whose_step_failed_go_on_from_their_computed_tokens() -> None:
    """One decodes, one is in the middle of its prompt: both keep their rows, and compute the same tokens again."""
    served = engine(max_batched_tokens=8)
    decoding = served.add([1] * 5, 4)
    served.step()
    prefilling = served.add([2] * 20, 4)
    served.step()
    lengths = served.space.lengths([*decoding.rows, *prefilling.rows]).tolist()
    failed = served.scheduler.schedule()
    aborted = served.scheduler.abort_in_flight()
    assert aborted is not None
    assert (aborted.withdrawn, aborted.preempted) == ((), ())
    assert served.space.lengths([*decoding.rows, *prefilling.rows]).tolist() == lengths == [6, 7]
    again = served.scheduler.schedule()
    assert again.decoded_token_ids.tolist() == failed.decoded_token_ids.tolist()
    assert [(chunk.start, chunk.stop) for chunk in again.prefilling] == [(7, 14)]
