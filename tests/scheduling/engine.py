"""A small engine without a model: tokens are drawn as they are needed, and each request's own are kept.

It knows no output in advance, ends sequences when it likes, guesses at random, finds as many guesses right as it likes,
may have several batches in flight, and checks every step.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.scheduling import (
    NO_INTENT,
    UNKNOWN_TOKEN,
    Batch,
    CacheIntent,
    Progress,
    Request,
    Scheduler,
    SchedulingConfig,
)
from pagedkv.space import BlockSpace

__all__ = ["Engine", "Served"]

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(eq=False)
class Served:
    """A request, and what was generated for it: a list for each sequence that goes on."""

    request: Request
    prompt: list[int]
    generated: list[list[int]] = field(default_factory=list)


class Engine:
    """Drives a scheduler; the space proves its invariants after every operation."""

    def __init__(self, config: SchedulingConfig, space_config: SpaceConfig, seed: int = 0) -> None:
        self.space = BlockSpace(space_config)
        self.scheduler = Scheduler(config, self.space)
        self.random = Random(seed)
        self.served: list[Served] = []
        self.in_flight: deque[Batch] = deque()
        self.finished: list[Request] = []
        self.rejected: list[Request] = []
        self.sampled: dict[Request, list[list[int]]] = {}  # of the batch that is being finished, for each sequence
        self.end_probability = 0.0
        self.num_drafted = 0
        self.late_probability = 0.3
        self.guesses_right = False  # as many tokens as it may, and all of them

    def add(  # noqa: PLR0913 - a request, by keywords
        self,
        prompt: list[int],
        max_new_tokens: int,
        *,
        num_sequences: int = 1,
        priority: int = 0,
        is_guessed: bool = False,
        intent: CacheIntent = NO_INTENT,
        replaces: Request | None = None,
    ) -> Request:
        """Let a request arrive."""
        request = Request(
            number=len(self.served),
            num_prompt_tokens=len(prompt),
            max_new_tokens=max_new_tokens,
            load=lambda num_generated: self._load(served, num_generated),
            num_sequences=num_sequences,
            priority=priority,
            propose=self._propose if is_guessed else None,
            intent=intent,
            replaces=replaces,
            sequences=lambda: [np.array(prompt + tokens, np.int32) for tokens in self._answers(served)],
        )
        served = Served(request, prompt)
        self.served.append(served)
        if not self.scheduler.add(request):
            self.rejected.append(request)
        return request

    @staticmethod
    def _load(served: Served, num_generated: int) -> npt.NDArray[np.int32]:
        if num_generated == 0:
            served.generated = []
        produced = served.generated[0] if num_generated else []
        assert len(produced) == num_generated
        return np.array(served.prompt + produced, np.int32)

    def _answers(self, served: Served) -> list[list[int]]:
        """Return what was generated, with what the scheduler is being told: an engine knows that already."""
        told = served.generated or [[]]
        sampled = self.sampled.get(served.request, [])
        return [past + more for past, more in zip(told, sampled, strict=True)] if len(sampled) == len(told) else told

    def _propose(self, most: int) -> npt.NDArray[np.int32]:
        num_guesses = most if self.guesses_right else self.random.randint(0, most)
        if self.random.random() < self.late_probability:
            return np.full(num_guesses, UNKNOWN_TOKEN, np.int32)
        return np.array([self.random.randrange(10) for _ in range(num_guesses)], np.int32)

    def _tell_late_drafts(self, batch: Batch) -> None:
        """Draw the ids of drafts that were not known when the batch was planned."""
        if batch.drafts is None or (batch.drafts.token_ids != UNKNOWN_TOKEN).all():
            return
        known = batch.drafts.token_ids
        drawn = [self.random.randrange(10) if token == UNKNOWN_TOKEN else token for token in known.tolist()]
        self.scheduler.fill_drafts(batch, drawn)
        self.space.check()

    def schedule(self) -> Batch:
        """Put one more batch in flight."""
        batch = self.scheduler.schedule()
        self.rejected += batch.rejected
        self.in_flight.append(batch)
        self.space.check()
        if batch.decoding is not None:
            parts = batch.decoding.parts(batch.decoded_token_ids)
            for request, part in zip(batch.decoding.requests, parts, strict=True):
                assert part.tolist() == [tokens[-1] for tokens in self.served[request.number].generated]
        self._check_drafts(batch)
        self._tell_late_drafts(batch)
        self._check_lists()
        return batch

    def finish(self) -> Progress:
        """Finish the oldest batch in flight with drawn tokens."""
        batch = self.in_flight.popleft()
        token_ids = np.array([self.random.randrange(10) for _ in range(batch.num_samples)], np.int32)
        goes_on = np.array([self.random.random() >= self.end_probability for _ in token_ids], np.bool_)
        before = {each.request: each.request.num_generated for each in self.served}
        accepted = self._accept(batch)
        counts = [len(tokens) for tokens in accepted]
        ended = np.flatnonzero(~goes_on).tolist()
        by_request = self._by_request(batch, token_ids)
        self.sampled = {request: [[token] for token in tokens.tolist()] for request, tokens in by_request}
        progress = self.scheduler.finish(batch, token_ids, ended=ended, num_accepted=counts or None)
        self.sampled = {}
        parts = zip(by_request, self._by_request(batch, goes_on), strict=True)
        place = 0
        for (request, tokens), (_, stays) in parts:
            right = accepted[place] if place < len(accepted) else []
            place += len(tokens)
            if request.num_generated == before[request] + len(right) + 1:  # else the end was not seen
                served = self.served[request.number]
                told = served.generated or [[] for _ in tokens]
                served.generated = [
                    [*past, *right, token]
                    for past, token, lasts in zip(told, tokens.tolist(), stays, strict=True)
                    if lasts
                ]
            else:
                assert request.num_generated == before[request] or request.is_done
        self.finished += progress.finished
        self.space.check()
        self._check_lists()
        return progress

    def _accept(self, batch: Batch) -> list[list[int]]:
        """Say which drafts are right, the first ones: of each sequence that decodes."""
        if batch.drafts is None:
            return []
        parts = np.split(batch.drafts.token_ids, np.cumsum(batch.drafts.counts)[:-1])
        least = self.guesses_right
        return [part[: self.random.randint(len(part) * least, len(part))].tolist() for part in parts]

    def _check_drafts(self, batch: Batch) -> None:
        """Prove that no request gave anything up for a guess, and that no guess goes beyond its request's tokens."""
        num_chunked = sum(len(chunk.token_ids) for chunk in batch.prefilling)
        num_tokens = len(batch.decoded_token_ids) + batch.num_drafted + num_chunked
        assert num_tokens == batch.plan.compute.num_tokens <= self.scheduler._state.config.max_batched_tokens
        if batch.drafts is None or batch.decoding is None:
            return
        assert not batch.preempted
        assert not batch.rejected
        for request, part in zip(batch.decoding.requests, batch.decoding.parts(batch.drafts.counts), strict=True):
            assert request.propose is not None or not part.any()
            assert len(part) == 1 or not part.any()
            assert (self.space.lengths(request.rows) <= request.most_tokens).all()
        self.num_drafted += batch.num_drafted

    @staticmethod
    def _by_request(batch: Batch, sampled: npt.NDArray[Scalar]) -> list[tuple[Request, npt.NDArray[Scalar]]]:
        """Share out what was sampled, in the order that a batch tells."""
        shares: list[tuple[Request, npt.NDArray[Scalar]]] = []
        if batch.decoding is not None:
            shares += zip(batch.decoding.requests, batch.decoding.parts(sampled), strict=True)
        start = len(batch.decoded_token_ids)
        for chunk in batch.prefilling:
            shares.append((chunk.request, sampled[start : start + chunk.num_samples]))
            start += chunk.num_samples
        return shares

    def step(self) -> Batch:
        """Run one step to its end."""
        batch = self.schedule()
        self.finish()
        return batch

    def run(self, most_steps: int = 10_000) -> int:
        """Serve everybody; return how many steps that took."""
        num_steps = 0
        while not self.scheduler.is_idle:
            self.step()
            num_steps += 1
            assert num_steps <= most_steps, "somebody is never served"
        return num_steps

    def _check_lists(self) -> None:
        """Prove that the scheduler and the space know the same rows."""
        running = self.scheduler.running
        assert [request.key for request in running] == sorted(request.key for request in running)
        rows = [row for request in running for row in request.rows]
        assert len(rows) == len(set(rows)) <= self.space.config.max_sequences
        assert not any(request.is_done for request in running)
        if not self.in_flight:  # what was refused is gone: the token sampled last alone is still to be appended
            for request in running:
                known = request.num_known - 1 if request.is_ready and not request.parents else request.num_scheduled
                assert (self.space.lengths(request.rows) == known).all()
        statistics = self.space.statistics()
        if self.scheduler.is_idle and not self.in_flight:
            assert all(pool.num_in_use == pool.num_deferred == 0 for pool in statistics.pools)
