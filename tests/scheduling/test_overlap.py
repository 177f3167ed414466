"""Steps that overlap: tokens are appended before they are sampled, and answers are those of steps one by one."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.errors import ConfigurationError, StepError
from pagedkv.scheduling import UNKNOWN_TOKEN, Batch, Progress, Request, Scheduler, SchedulingConfig
from pagedkv.space import BlockSpace

ENDS_AT = 7
"""Tokens that this divides end their sequence."""
MOST_FAILURES = 12
"""A request with recurrent states starts over at each, so it would never end if every fifth step failed."""


@dataclass(eq=False)
class Asked:
    """A request with its answers: a list of tokens for each sample, and which samples go on."""

    prompt: list[int]
    samples: list[list[int]]
    live: list[int] = field(default_factory=list)


def token_of(number: int, sample: int, position: int) -> int:
    """Give the only token that may stand there."""
    return Random(f"{number} {sample} {position}").randrange(1, 100)


def answer_of(number: int, sample: int, most: int) -> list[int]:
    """Give the answer that a sample must have."""
    tokens: list[int] = []
    while len(tokens) < most and (not tokens or tokens[-1] % ENDS_AT):
        tokens.append(token_of(number, sample, len(tokens)))
    return tokens


class Server:
    """Serves scripted answers with up to two batches in flight, and checks the space after every call."""

    def __init__(self, scheduling: SchedulingConfig, space: SpaceConfig) -> None:
        self.config = scheduling
        self.space = BlockSpace(space)
        self.scheduler = Scheduler(scheduling, self.space)
        self.in_flight: deque[tuple[Batch, list[tuple[Request, int]]]] = deque()
        self.asked: dict[Request, Asked] = {}
        self.held: list[tuple[Request, list[int]]] = []
        self.num_unknown = 0
        self.num_preempted = 0
        self.fails_every = 0
        self.num_failed = 0
        self.num_preempted_by_failure = 0

    def add(
        self,
        prompt: list[int],
        most: int,
        *,
        num_sequences: int = 1,
        runs_ahead: bool = True,
        is_guessed: bool = False,
    ) -> Request:
        """Let a request arrive."""
        asked = Asked(prompt, [[] for _ in range(num_sequences)], list(range(num_sequences)))
        request = Request(
            len(self.asked),
            len(prompt),
            most,
            lambda num: self._load(asked, num),
            num_sequences,
            propose=(lambda most: np.full(most, 3, np.int32)) if is_guessed else None,
            runs_ahead=runs_ahead,
        )
        self.asked[request] = asked
        assert self.scheduler.add(request)
        return request

    @staticmethod
    def _load(asked: Asked, num_generated: int) -> npt.NDArray[np.int32]:
        if not num_generated:
            for sample in asked.live:
                asked.samples[sample] = []
            return np.array(asked.prompt, np.int32)
        assert len(asked.samples[asked.live[0]]) == num_generated
        return np.array(asked.prompt + asked.samples[asked.live[0]], np.int32)

    def schedule(self) -> Batch:
        """Put one more batch in flight."""
        batch = self.scheduler.schedule()
        if batch.preempted:
            assert not self.config.overlap or not any(len(each.plan.compute.rows) for each, _ in self.in_flight)
            self.num_preempted += len(batch.preempted)
            self.held = [each for each in self.held if each[0].awaited]
        places: list[tuple[Request, int]] = []
        if batch.decoding is not None:
            for request, part in zip(
                batch.decoding.requests, batch.decoding.parts(batch.decoded_token_ids), strict=True
            ):
                asked = self.asked[request]
                known = [asked.samples[sample][-1:] for sample in asked.live]
                is_unknown = (part == UNKNOWN_TOKEN).all()
                assert is_unknown or [[token] for token in part.tolist()] == known
                assert not is_unknown or (request.runs_ahead and request.propose is None and self.in_flight)
                self.num_unknown += len(part) * bool(is_unknown)
                places += [(request, sample) for sample in asked.live]
        for chunk in batch.prefilling:
            places += [(chunk.request, sample) for sample in self.asked[chunk.request].live][: chunk.num_samples]
        assert len(places) == batch.num_samples
        assert batch.plan.compute.num_tokens <= self.config.max_batched_tokens
        self.in_flight.append((batch, places))
        self.space.check()
        return batch

    def finish(self, *, holds: bool = False) -> Progress:
        """Finish the oldest batch; ``holds``: requests that do not run ahead get their tokens later."""
        batch, places = self.in_flight.popleft()
        tokens = [self._next_of(*place) for place in places]
        held = {request for request, _ in places if not request.runs_ahead and not request.is_done and holds}
        ended = [
            place
            for place, token in enumerate(tokens)
            if token != UNKNOWN_TOKEN and not token % ENDS_AT and places[place][0] not in held
        ]
        progress = self.scheduler.finish(batch, tokens, ended=ended, held=held)
        for request in held:
            self.held.append(
                (request, [token for (other, _), token in zip(places, tokens, strict=True) if other is request])
            )
        self._grow([each for each in zip(places, tokens, strict=True) if each[0][0] not in held])
        self.space.check()
        return progress

    def fail(self) -> None:
        """Let the oldest step in flight fail: all batches in flight are undone."""
        in_flight = [batch for batch, _ in self.in_flight]
        self.in_flight.clear()
        lengths = {request: request.num_generated for request in self.asked}
        aborted = self.scheduler.abort_in_flight()
        self.space.check()
        if aborted is None:
            assert not in_flight
            return
        assert aborted.steps.step_ids == tuple(batch.plan.step_id for batch in in_flight)
        assert all(request.is_done or not request.rows for request in (*aborted.withdrawn, *aborted.preempted))
        assert not set(aborted.withdrawn) & set(aborted.preempted)
        for request, num_generated in lengths.items():
            assert request.num_generated in {num_generated, 0 if request.num_sequences > 1 else num_generated}
        self.held = [each for each in self.held if each[0].awaited]
        self.num_failed += 1
        self.num_preempted_by_failure += len(aborted.preempted)

    def supply(self) -> None:
        """Bring the tokens of the request that was held first."""
        request, tokens = self.held.pop(0)
        if not request.awaited:
            return  # it was aborted
        places = [(request, sample) for sample in self.asked[request].live]
        ended = [place for place, token in enumerate(tokens) if not token % ENDS_AT]
        self.scheduler.supply(request, tokens, ended=ended)
        self._grow(list(zip(places, tokens, strict=True)))
        self.space.check()

    def _next_of(self, request: Request, sample: int) -> int:
        asked = self.asked[request]
        if request.is_done or sample not in asked.live:
            return UNKNOWN_TOKEN
        return token_of(request.number, sample, len(asked.samples[sample]))

    def _grow(self, sampled: Sequence[tuple[tuple[Request, int], int]]) -> None:
        for (request, sample), token in sampled:
            if token != UNKNOWN_TOKEN:
                self.asked[request].samples[sample].append(token)
                if not token % ENDS_AT:
                    self.asked[request].live.remove(sample)

    def run(self) -> int:
        """Serve everything with one batch ahead; return how many batches computed anything."""
        num_steps = num_rounds = 0
        while not self.scheduler.is_idle or self.in_flight:
            if not self.scheduler.is_idle:
                num_steps += len(self.schedule().plan.compute.rows) > 0
                num_rounds += 1
                if self.fails_every and num_rounds % self.fails_every == 0 and self.num_failed < MOST_FAILURES:
                    self.fail()
                assert num_rounds < 3_000, "a request is never served"
            while self.in_flight and len(self.in_flight) > (not self.scheduler.is_idle):
                self.finish()
        return num_steps

    def require_cut_off(self, aborted: set[Request]) -> None:
        """Compare what aborted requests have, and forget them."""
        for request in aborted:
            for sample, tokens in enumerate(self.asked[request].samples):
                assert tokens == answer_of(request.number, sample, request.max_new_tokens)[: len(tokens)]
            del self.asked[request]

    def require_answers(self) -> None:
        """Compare every answer that was served to its end."""
        for request, asked in self.asked.items():
            for sample, tokens in enumerate(asked.samples):
                expected = answer_of(request.number, sample, request.max_new_tokens)
                assert tokens == expected, f"sample {sample} of request {request.number}"
        assert all(pool.num_in_use == pool.num_deferred == 0 for pool in self.space.statistics().pools)


def server(
    groups: tuple[GroupSpec, ...] = (FullAttention(block_size=4),),
    num_blocks: int = 200,
    num_host_blocks: int = 0,
    **limits: object,
) -> Server:
    """Make a server whose steps overlap."""
    preemption = "swap" if num_host_blocks else "recompute"
    scheduling = SchedulingConfig(**{"max_sequences": 8, "overlap": True, "preemption": preemption, **limits})  # type: ignore[arg-type]
    pools = dict.fromkeys((group.pool for group in groups), num_blocks)
    space = SpaceConfig(
        groups=groups,
        num_blocks=pools,
        num_host_blocks=dict.fromkeys(pools, num_host_blocks),
        max_sequences=16,
        max_tokens=256,
        watermark=0.0,
        in_order=True,
        receipts=True,
    )
    return Server(scheduling, space)


GROUPS: tuple[tuple[GroupSpec, ...], ...] = (
    (FullAttention(block_size=4),),
    (FullAttention(block_size=4), SlidingWindow(window=6, block_size=4)),
    (FullAttention(block_size=8), RecurrentState(checkpoint_interval=8)),
)


def add_any(data: st.DataObject, served: Server, *, is_guessing: bool) -> None:
    """Let a request of any kind arrive."""
    number = len(served.asked)
    prompt = [token_of(number % 2, 9, place) for place in range(data.draw(st.integers(1, 30)))]
    num_sequences = data.draw(st.integers(1, 3))
    kind = data.draw(st.sampled_from(("ahead", "ahead", "apart", "guessed")))
    served.add(
        prompt,
        data.draw(st.integers(1, 12)),
        num_sequences=num_sequences,
        runs_ahead=kind != "apart",
        is_guessed=kind == "guessed" and is_guessing,
    )


@given(st.data())
@settings(max_examples=60)
def test_answers_are_those_of_one_step_after_the_other(data: st.DataObject) -> None:
    """Short pools, samples, guesses, held and aborted requests, failed steps.

    Only aborted answers differ, and these are cut off.
    """
    groups = data.draw(st.sampled_from(GROUPS))
    swaps = data.draw(st.booleans())
    budget = data.draw(st.sampled_from((8, 24, 500)))
    num_blocks = data.draw(st.sampled_from((26, 40, 200)))
    is_guessing = data.draw(st.booleans()) and len(groups) == 1
    served = server(
        groups,
        num_blocks,
        60 if swaps else 0,
        max_batched_tokens=budget,
        most_drafts=2 * is_guessing,
        first_promise=2,
        overlap=data.draw(st.sampled_from((True, True, False))),
    )
    served.fails_every = data.draw(st.sampled_from((0, 3, 5)))
    aborted: set[Request] = set()
    choices = ("schedule", "schedule", "schedule", "finish", "finish", "hold", "add", "add", "supply", "abort", "fail")
    for choice in data.draw(st.lists(st.sampled_from(choices), max_size=60)):
        running = served.scheduler.running
        if choice == "add":
            add_any(data, served, is_guessing=is_guessing)
        elif choice == "schedule" and len(served.in_flight) < 3:
            served.schedule()
        elif choice in {"finish", "hold"} and served.in_flight:
            served.finish(holds=choice == "hold")
        elif choice == "supply" and served.held:
            served.supply()
        elif choice == "fail":
            served.fail()
        elif choice == "abort" and running:
            request = running[data.draw(st.integers(0, len(running) - 1))]
            aborted.add(request)
            served.scheduler.abort(request)
            served.space.check()
    while served.held:
        served.supply()
    served.run()
    served.require_cut_off(aborted)
    served.require_answers()


def test_a_step_is_planned_before_the_tokens_of_the_last_are_known() -> None:
    """As many steps as without overlap while nothing ends early: one for the prompts, one for each further token."""
    served = server()
    numbers = [number for number in range(40) if len(answer_of(number, 0, 6)) == 6]
    for number in range(numbers[1] + 1):
        served.add([number + 1] * 5, 6 if number in numbers else 1)
    assert served.run() == 6
    assert served.num_unknown == 2 * 5
    served.require_answers()


def test_a_late_stop_costs_one_token_that_is_neither_published_nor_computed_output() -> None:
    """A sequence that ends while a later step computes it: its receipt has one abandoned token, its blocks are free."""
    number = next(number for number in range(99) if len(answer_of(number, 0, 20)) == 4)
    served = server()
    for _ in range(number):
        served.scheduler.abort(served.add([1], 1))
    request = served.add([5] * 9, 20)
    served.run()
    assert request.receipt.num_abandoned == 1
    assert request.receipt.num_computed == 9 + 3  # as without overlap: the token that ends it is never computed
    for aborted in list(served.asked)[:number]:
        del served.asked[aborted]
    served.require_answers()
    tokens = np.array([5] * 9 + answer_of(number, 0, 20) + [1] * 4, np.int32)
    assert served.space.match(tokens).num_tokens == 12  # full blocks of the 12 computed tokens


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_short_pool_is_drained_before_a_request_is_preempted(num_host_blocks: int) -> None:
    """So the same requests are swapped or computed again as without overlap, with all their tokens known."""
    served = server(num_blocks=16, num_host_blocks=num_host_blocks, first_promise=1)
    numbers = [number for number in range(99) if len(answer_of(number, 0, 16)) == 16][:4]
    for number in range(numbers[-1] + 1):
        request = served.add([number + 1] * 7, 16)
        if number not in numbers:
            served.scheduler.abort(request)
            del served.asked[request]
            served.asked[Request(number, 1, 1, lambda _: np.zeros(0, np.int32))] = Asked([], [answer_of(number, 0, 1)])
    served.run()
    assert served.num_preempted
    assert served.num_unknown
    served.require_answers()


def test_a_request_that_runs_ahead_cannot_be_held_once_a_later_step_decodes_it() -> None:
    """Its token is computed on the device already; nothing is changed."""
    served = server()
    request = served.add([1, 2, 3], 9)
    served.schedule()
    served.schedule()
    batch, _ = served.in_flight[0]
    with pytest.raises(StepError, match="cannot be held: a later step already decodes its token"):
        served.scheduler.finish(batch, [1], held=[request])
    served.space.check()
    served.run()
    served.require_answers()


def test_the_option_is_a_flag() -> None:
    """As other flags are."""
    with pytest.raises(ConfigurationError, match="overlap must be True or False"):
        SchedulingConfig(overlap=1)  # type: ignore[arg-type]
