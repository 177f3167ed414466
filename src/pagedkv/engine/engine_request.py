"""EngineRequest: a request with its tokens; and what its caller gets in the end.

Beside the scheduler's :class:`~pagedkv.scheduling.Request`, which knows counts and rows, this knows tokens: the prompt,
and what was generated for each of its samples. The tokens of a request that starts over after a preemption are asked
from here.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from pagedkv.arrays import Int32Array
from pagedkv.engine.params import SamplingParams
from pagedkv.scheduling import Request

__all__ = ["Completion", "EngineRequest", "FinishReason", "RequestOutput", "Sample"]

FinishReason: TypeAlias = Literal["stop", "length", "aborted", "rejected"]


@dataclass(slots=True, eq=False)
class Sample:
    """One answer under way.

    Args:
        index: its place among the request's answers.
        token_ids: what was generated.
        finish_reason: why it ended; None while it goes on.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request under way.

    Args:
        number: its place in the order of arrival.
        prompt_token_ids: int32 ``[n]``.
        params: what it asks for.
        stop_token_ids: all tokens that end a sequence of it.
        arrived: when it came, by the engine's clock, in seconds.
        samples: its answers; live: those that go on, in the order of its rows.
        first_token: when the first token was known; finished: when all answers had ended.
        num_cached_tokens: tokens of the prompt that were hit when it was first admitted.
        num_recomputed_tokens: tokens that were computed, and had to be given up.
        num_preemptions: how often it had to give its blocks up.
    """

    number: int
    prompt_token_ids: Int32Array
    params: SamplingParams
    stop_token_ids: frozenset[int]
    arrived: float
    samples: list[Sample] = field(init=False)
    live: list[Sample] = field(init=False)
    scheduled: Request = field(init=False)
    first_token: float | None = None
    finished: float | None = None
    num_cached_tokens: int | None = None
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        """Make its samples, and its part in the schedule."""
        self.samples = [Sample(index) for index in range(self.params.n)]
        self.live = list(self.samples)
        self.scheduled = Request(
            self.number,
            len(self.prompt_token_ids),
            self.params.max_tokens,
            self._load,
            num_sequences=self.params.n,
        )

    @property
    def is_finished(self) -> bool:
        """Whether all its answers have ended."""
        return self.finished is not None

    def take(self, sample: Sample, token_id: int) -> bool:
        """Note a sampled token; return whether it is the sample's last by its own rules."""
        sample.token_ids.append(token_id)
        num_tokens = len(sample.token_ids)
        if token_id in self.stop_token_ids and num_tokens >= self.params.min_tokens:
            sample.finish_reason = "stop"
        elif num_tokens >= self.params.max_tokens:
            sample.finish_reason = "length"
        return sample.finish_reason == "stop"

    def end(self, reason: FinishReason, now: float) -> None:
        """End all that goes on."""
        for sample in self.samples:
            sample.finish_reason = sample.finish_reason or reason
        self.finished = now

    def output(self) -> "RequestOutput":
        """Tell how far it has come."""
        completions = tuple(
            Completion(sample.index, tuple(sample.token_ids), sample.finish_reason) for sample in self.samples
        )
        return RequestOutput(
            self.number,
            tuple(self.prompt_token_ids.tolist()),
            completions,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_preemptions=self.num_preemptions,
            first_token_seconds=None if self.first_token is None else self.first_token - self.arrived,
            total_seconds=None if self.finished is None else self.finished - self.arrived,
        )

    def _load(self, num_generated: int) -> Int32Array:
        """Give what is to be computed; with several answers, these begin again."""
        if num_generated == 0:
            for sample in self.live:
                sample.token_ids.clear()
            return self.prompt_token_ids
        generated = np.array(self.live[0].token_ids[:num_generated], np.int32)
        return np.concatenate([self.prompt_token_ids, generated])


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Args:
        index: its place among the request's answers.
        token_ids: what was generated.
        finish_reason: "stop", "length", "aborted", "rejected"; None while it goes on.
        text: the same as text, where there is a tokenizer.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of a request.

    Args:
        number: its place in the order of arrival.
        prompt_token_ids: its prompt.
        completions: its answers.
        num_cached_tokens: tokens of the prompt that need not be computed.
        num_recomputed_tokens: tokens that were computed, and given up by preemption.
        num_preemptions: how often it had to give its blocks up.
        first_token_seconds, total_seconds: from its arrival to its first token, and to its end.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    first_token_seconds: float | None
    total_seconds: float | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first answer."""
        return self.completions[0].token_ids
