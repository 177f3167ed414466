"""A load on engines: requests that come, leave, expire and branch, over pools too small for them, and passes that fail.

All of it follows from a seed: arrivals, cancellations and deadlines are counted in steps. Every second failure is the
model's, and the engine continues. The others are faults outside the model, which end the engine: another one is built,
with other settings, and the requests of the first are lost, as they should be.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, EngineRequest, PromptLookup, SamplingParams
from pagedkv.errors import EngineError, RequestError
from tests.compiling import TESTED_POLICIES
from tests.engine.guesses import guess
from tests.engine.serving import CONFIG, PROMPTS, Reference, reference

__all__ = ["Load", "same_answers"]

SETTINGS: Final[tuple[EngineConfig, ...]] = (
    replace(CONFIG, num_blocks=24, max_sequences=8),
    replace(CONFIG, num_blocks=24, max_sequences=8, num_host_blocks=16, preemption="swap"),
    replace(CONFIG, num_blocks=40, min_partial_hit=2, eviction=TESTED_POLICIES[-1]),
    replace(CONFIG, num_blocks=28, prefix_caching=False),
    replace(CONFIG, num_blocks=24, max_sequences=8, speculation=PromptLookup()),
    replace(
        CONFIG,
        num_blocks=24,
        max_sequences=8,
        num_host_blocks=16,
        preemption="swap",
        speculation=PromptLookup(num_tokens=2, max_ngram=2),
    ),
)
NUM_NEW: Final = 20
NUM_DISTINCT: Final = 12
STEPS_A_LIFE: Final = 400
"""Between two failures, in the mean."""
STEPS_BETWEEN_CHECKS: Final = 50
GUESSED_BY_HAND: Final = 0.5
"""Of requests of engines that guess; these models hardly repeat themselves."""


def same_answers(n: int, max_tokens: int) -> SamplingParams:
    """Ask for n answers of the most likely tokens: drawn, but with no choice, where there are several."""
    params = SamplingParams(max_tokens=max_tokens)
    return replace(params, n=n, temperature=1.0, top_k=1) if n > 1 else params


@dataclass(slots=True, eq=False)
class Visitor:
    """A request with its fate.

    Args:
        request: the request; place: of its prompt.
        began: the step at which it was first admitted.
        ends_at, expires_at: steps before which it is cancelled, and is past its deadline.
    """

    request: EngineRequest
    place: int
    ends_at: int
    expires_at: int
    began: int | None = None


@dataclass(eq=False)
class Load:
    """Serves random requests.

    Args:
        model: the model, whose passes fail now and then.
        seed: of everything.
        first_life: which of the settings the first engine has.

    Attributes:
        longest_stay: most steps from a request's first admission to its end. Before that it waits, for as long as
            earlier requests take, and no later one is admitted before it.
    """

    model: PreTrainedModel
    seed: int
    first_life: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_lives: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_undone: int = 0
    longest_stay: int = 0

    def __post_init__(self) -> None:
        """Generate the expected answers densely."""
        self._draw = np.random.default_rng(self.seed)
        lengths = self._draw.integers(1, 24, NUM_DISTINCT - len(PROMPTS))
        own = [self._draw.integers(1, 199, length).tolist() for length in lengths]
        self._prompts: list[Sequence[int]] = [*PROMPTS, *own]
        self._expected: list[Reference] = reference(self.model, self._prompts, NUM_NEW)
        self._visitors: list[Visitor] = []

    def run(self, num_requests: int) -> None:
        """Serve so many, however many engines that takes; proves after each that nothing is left in it."""
        num_left = num_requests
        while num_left or self._visitors:
            num_left -= self._live(num_left)

    def _live(self, num_left: int) -> int:
        """Serve with one engine until its pass fails or everybody is served; return how many came."""
        llm = LLM(self.model, SETTINGS[(self.first_life + self.num_lives) % len(SETTINGS)])
        self.num_lives += 1
        fails_at = self.num_steps + int(self._draw.geometric(1 / STEPS_A_LIFE))
        num_came = 0
        while num_came < num_left or self._visitors:
            num_came += self._let_come(llm, num_left - num_came)
            self._let_leave(llm)
            if llm.core.has_work:
                fails = self.num_steps >= fails_at
                try:
                    self._step(llm, fails=fails)
                except EngineError:
                    self._lose(llm)
                    return num_came
                if fails:
                    fails_at = self.num_steps + int(self._draw.geometric(1 / STEPS_A_LIFE))
            self._see_off(llm)
        self._require_nothing_left(llm)
        return num_came

    def _let_come(self, llm: LLM, most: int) -> int:
        num_new = min(most, int(self._draw.poisson(0.8)))
        for _ in range(num_new):
            place = int(self._draw.integers(len(self._prompts)))
            samples = int(self._draw.choice([1, 1, 1, 2, 3]))
            params = same_answers(samples, int(self._draw.integers(1, NUM_NEW + 1)))
            stay = self._draw.integers(0, 40, 2) + np.where(self._draw.random(2) < 0.15, 0, 10**9)
            try:
                (request,) = llm.submit([self._prompts[place]], params)
            except RequestError:  # too large for this engine's pool; other requests are not affected
                self.outcomes["refused"] += samples
                continue
            if request.scheduled.propose is not None and self._draw.random() < GUESSED_BY_HAND:
                guess(request, self._expected[place].token_ids, wrong_every=4)
            ends_at, expires_at = (self.num_steps + stay).tolist()
            self._visitors.append(Visitor(request, place, ends_at, expires_at))
        return num_new

    def _let_leave(self, llm: LLM) -> None:
        for visitor in self._visitors:
            if visitor.ends_at <= self.num_steps:
                llm.core.abort(visitor.request)
            elif visitor.expires_at <= self.num_steps:
                llm.core.abort(visitor.request, "deadline")

    def _step(self, llm: LLM, *, fails: bool) -> None:
        handle = None
        if fails:  # before anything is computed, or when all of it is
            module = self.model if self._draw.random() < 0.5 else self.model.get_input_embeddings()
            handle = module.register_forward_hook(_fail if self._draw.random() < 0.5 else _be_wrong)
        try:
            record = llm.step()
        finally:
            self.num_steps += 1
            if handle is not None:
                handle.remove()
        is_something = record.num_tokens or record.num_resumed or record.num_swapped_out or record.failure
        assert is_something, f"no request advances: {record}"
        self.num_undone += record.failure is not None
        self.num_preemptions += record.num_swapped_out + record.num_recomputed
        self.num_drafted += record.num_drafted
        self.num_accepted += record.num_accepted
        if self.num_steps % STEPS_BETWEEN_CHECKS == 0:
            llm.core.space.check()

    def _see_off(self, llm: LLM) -> None:
        """Remove visitors that have ended, after a check of their answers; requests are admitted in order."""
        del llm
        admitted = [visitor.request.num_cached_tokens is not None for visitor in self._visitors]
        began = [visitor.request.number for visitor, is_in in zip(self._visitors, admitted, strict=True) if is_in]
        waiting = [
            visitor.request.number
            for visitor, is_in in zip(self._visitors, admitted, strict=True)
            if not is_in and not visitor.request.is_finished
        ]
        assert not began or not waiting or max(began) < min(waiting), "a request was admitted before an earlier one"
        for visitor, is_in in zip(self._visitors, admitted, strict=True):
            if is_in and visitor.began is None:
                visitor.began = self.num_steps
            if visitor.request.is_finished:
                self._look(visitor)
                if visitor.began is not None:
                    self.longest_stay = max(self.longest_stay, self.num_steps - visitor.began)
        self._visitors = [visitor for visitor in self._visitors if not visitor.request.is_finished]

    def _look(self, visitor: Visitor) -> None:
        expected = self._expected[visitor.place]
        for each in visitor.request.output().completions:
            assert each.finish_reason is not None
            self.outcomes[each.finish_reason] += 1
            certain = expected.num_certain
            assert list(each.token_ids[:certain]) == expected.token_ids[: len(each.token_ids)][:certain]
            if each.finish_reason == "length":
                assert len(each.token_ids) == visitor.request.params.max_tokens

    def _lose(self, llm: LLM) -> None:
        """The requests of a failed engine are lost, and further calls raise its error."""
        for visitor in self._visitors:
            self.outcomes["lost"] += visitor.request.params.n
        self._visitors = []
        try:
            llm.step()
        except EngineError as problem:
            assert "injected" in str(problem)  # noqa: PT017 - the driver is no test
        else:
            raise AssertionError("an engine that failed continues")

    def _require_nothing_left(self, llm: LLM) -> None:
        space = llm.core.space
        space.check()
        assert not llm.core.has_work
        assert not llm.core._live.by_schedule
        assert space.num_live_blocks() == 0
        for name, count in space.config.blocks_by_pool().items():
            assert space.num_free_blocks(name) == count - 1


def _fail(module: torch.nn.Module, *_: object) -> None:
    raise ValueError(f"injected into {type(module).__name__}")


def _be_wrong(module: torch.nn.Module, *_: object) -> None:
    raise AssertionError(f"injected into {type(module).__name__}")
