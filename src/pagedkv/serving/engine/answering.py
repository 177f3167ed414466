"""From a step's logits to its answers: who gets which token, whose row waits, who fails.

Rows are sampled all together (:class:`~pagedkv.serving.engine.sampling.BatchSampler`). A request of which a row waits
for a foreign processor is held: all of its rows keep what they got, and none of them goes on, until the last one has
its token. A request of which a row fails has failed. Nobody else notices either.

A row with drafts has a row of logits behind each of them too (:mod:`~pagedkv.serving.engine.draft_acceptance`).

Sampling has two halves. :meth:`Answering.begin` draws tokens, which are on the device at once. :meth:`Answering.end`
lets the answers grow, as soon as the host has these tokens; rows of answers that ended meanwhile are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

import numpy as np
import torch

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import SamplingError
from pagedkv.serving.engine.draft_acceptance import accept_drafts, only
from pagedkv.serving.engine.engine_request import EngineRequest
from pagedkv.serving.engine.sampled_rows import SampledRow, lines_of, places_of
from pagedkv.serving.engine.sampling import (
    NO_TOKEN,
    BatchSampler,
    PendingTokens,
    Place,
    SampledTokens,
    TokenLogprobs,
    WaitingRow,
)

__all__ = ["Answering", "Sampler", "Sampling", "Taken"]


class Sampler(Protocol):
    """What draws tokens: :class:`~pagedkv.serving.engine.sampling.BatchSampler`, or one that answers by a script."""

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Draw a token for each row of logits."""

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Ask rows again that waited."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What came of rows.

    Args:
        token_ids: int32 ``[rows]``, NO_TOKEN where a row waits or failed.
        ended: places of rows whose token is the last of their answer by its own rules.
        held: requests of which a row waits; failures: requests of which one failed, and why.
        parents: for requests of beams, which old beam each row's new one continues, where that is not its own.
        num_accepted: by place, how many drafts came before the row's token; 0 where none did.
    """

    token_ids: Int32Array
    ended: list[int] = field(default_factory=list)
    held: tuple[EngineRequest, ...] = ()
    failures: dict[EngineRequest, Exception] = field(default_factory=dict)
    parents: dict[EngineRequest, tuple[int, ...]] = field(default_factory=dict)
    num_accepted: dict[int, int] = field(default_factory=dict)

    def among(self, places: Sequence[int], num_rows: int) -> "Taken":
        """Tell the same of rows that stand at these places among more, of which nothing is known yet."""
        token_ids = np.full(num_rows, NO_TOKEN, np.int32)
        token_ids[places] = self.token_ids
        accepted = {places[place]: count for place, count in self.num_accepted.items()}
        ended = [places[place] for place in self.ended]
        return Taken(token_ids, ended, self.held, dict(self.failures), dict(self.parents), accepted)

    def with_searched(self, searched: "Taken") -> "Taken":
        """Add what became of beams, which are other rows of the same ones."""
        return Taken(
            np.where(searched.token_ids == NO_TOKEN, self.token_ids, searched.token_ids),
            self.ended + searched.ended,
            self.held,
            self.failures | searched.failures,
            searched.parents,
            self.num_accepted,
        )


@dataclass(slots=True, eq=False)
class _Held:
    """A request of which a row waits.

    Args:
        rows: all of its rows in the step.
        token_ids, logprobs: what each of them got so far.
        waiting: those that wait, by place in ``rows``.
    """

    rows: list[SampledRow]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    waiting: dict[int, WaitingRow]


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """Tokens of rows that are drawn, while their answers have not grown yet.

    Args:
        rows: whose they are.
        places: which of them were drawn: all but beams.
        pending: what was drawn for these; None: nothing.
        searched: what became of beams, which have gone on already.
    """

    rows: Sequence[SampledRow]
    places: Sequence[int]
    pending: PendingTokens | None
    searched: Taken | None = None


@final
class Answering:
    """Samples rows, and keeps what waits.

    Args:
        sampler: what draws tokens.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._held: dict[EngineRequest, _Held] = {}

    def begin(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> Sampling:
        """Sample a step's rows. Searches among beams go on at once; other answers grow by :meth:`end`.

        Args:
            logits: float32 ``[rows and drafts, vocabulary]``: those behind a row's drafts follow its own.
            rows: whose they are; those of a request stand together.
        """
        if all(row.request.beams is None for row in rows):
            return Sampling(rows, range(len(rows)), self._draw(logits, rows))
        lines = lines_of(rows)
        others = [place for place, row in enumerate(rows) if row.request.beams is None]
        mine = [line for place in others for line in lines[place]]
        pending = self._draw(logits[mine], [rows[place] for place in others]) if others else None
        searched = Taken(np.full(len(rows), NO_TOKEN, np.int32))
        for request in dict.fromkeys(row.request for row in rows if row.request.beams is not None):
            places = [place for place, row in enumerate(rows) if row.request is request]
            _continue_beams(request, logits[[lines[place].start for place in places]], places, searched)
        return Sampling(rows, others, pending, searched)

    def end(self, sampling: Sampling) -> Taken:
        """Let the answers grow by what was sampled, unless they ended meanwhile. The host waits for the tokens."""
        rows, searched = sampling.rows, sampling.searched
        taken = Taken(np.full(len(rows), NO_TOKEN, np.int32))
        if sampling.pending is not None:
            with torch.inference_mode():  # as the pass whose tensors these are
                sampled = sampling.pending.wait()
            taken = self._end_drawn(sampled, rows, sampling.places)
        return taken if searched is None else taken.with_searched(searched)

    def _end_drawn(self, sampled: SampledTokens, rows: Sequence[SampledRow], places: Sequence[int]) -> Taken:
        """Let the answers of the rows at these places grow, unless they ended meanwhile."""
        going = [place for place in places if rows[place].goes_on]
        if len(going) == len(rows):
            return self._take(sampled, rows)
        drawn = [rows[place] for place in places]
        lines = dict(zip(places, lines_of(drawn), strict=True))
        mine = only(sampled, [line for place in going for line in lines[place]])
        return self._take(mine, [rows[place] for place in going]).among(going, len(rows))

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> PendingTokens:
        with torch.inference_mode():  # as the pass that made the logits, which are changed meanwhile
            if isinstance(self._sampler, BatchSampler):
                return self._sampler.begin(logits, places_of(rows))
            sampled = self._sampler.sample(logits, places_of(rows))
            return PendingTokens(sampled.token_ids, sampled)

    def _take(self, sampled: SampledTokens, rows: Sequence[SampledRow]) -> Taken:
        if any(row.drafts for row in rows):
            return self._take_drafted(sampled, rows)
        return self._take_sampled(sampled, rows)

    def _take_sampled(self, sampled: SampledTokens, rows: Sequence[SampledRow]) -> Taken:
        token_ids: Int32Array = sampled.token_ids.cpu().numpy()
        if not (sampled.waiting or sampled.failures or sampled.logprobs):
            tokens = token_ids.tolist()
            return Taken(token_ids, [place for place, row in enumerate(rows) if row.sample.take(tokens[place])])
        return self._take_apart(sampled, token_ids, rows)

    def retry_waiting(self) -> list[tuple[EngineRequest, Taken]]:
        """Ask the rows again that wait. Answers what is known of requests that wait no more."""
        answers = []
        for request, held in list(self._held.items()):
            places = list(held.waiting)
            with torch.inference_mode():
                sampled = self._sampler.resume([held.waiting[place] for place in places])
            still = {each.row for each in sampled.waiting}  # places in the batch that they came with
            tokens = sampled.token_ids.tolist()
            for index, place in enumerate(places):
                held.token_ids[place], held.logprobs[place] = tokens[index], sampled.logprobs.get(index)
            held.waiting = {place: row for place, row in held.waiting.items() if row.row in still}
            failure = next(iter(sampled.failures.values()), None)
            if failure is not None or not held.waiting:
                del self._held[request]
                answers.append((request, _taken(request, held, failure)))
        return answers

    def forget(self, request: EngineRequest) -> None:
        """Let a request wait for nothing: it has ended, or is to be computed again."""
        self._held.pop(request, None)

    @property
    def num_held(self) -> int:
        """Requests of which a row waits."""
        return len(self._held)

    def _take_drafted(self, sampled: SampledTokens, rows: Sequence[SampledRow]) -> Taken:
        """Take tokens of rows of which some have drafts: these row by row, the others together."""
        lines = lines_of(rows)
        others = [place for place, row in enumerate(rows) if not row.drafts]
        plain = only(sampled, [lines[place].start for place in others])
        taken = self._take_sampled(plain, [rows[place] for place in others]).among(others, len(rows))
        tokens = sampled.token_ids.tolist()
        for place, row in enumerate(rows):
            if row.drafts:
                verdict = accept_drafts(row, lines[place], tokens, sampled)
                taken.token_ids[place] = verdict.token_id
                taken.num_accepted[place] = verdict.num_accepted
                if verdict.failure is not None:
                    taken.failures[row.request] = verdict.failure
                elif verdict.has_ended:
                    taken.ended.append(place)
        return taken

    def _take_apart(self, sampled: SampledTokens, token_ids: Int32Array, rows: Sequence[SampledRow]) -> Taken:
        """Take tokens where rows wait, fail or have log-probabilities."""
        failures = {rows[place].request: failure for place, failure in sampled.failures.items()}
        waiting = {each.row: each for each in sampled.waiting}
        held = dict.fromkeys(rows[place].request for place in waiting)
        for failed in failures:
            held.pop(failed, None)
        tokens = token_ids.tolist()
        for request in held:
            places = [place for place, row in enumerate(rows) if row.request is request]
            self._held[request] = _Held(
                [rows[place] for place in places],
                [tokens[place] for place in places],
                [sampled.logprobs.get(place) for place in places],
                {index: waiting[place] for index, place in enumerate(places) if place in waiting},
            )
        ended = [
            place
            for place, row in enumerate(rows)
            if row.request not in failures
            and row.request not in held
            and row.sample.take(tokens[place], sampled.logprobs.get(place))
        ]
        return Taken(token_ids, ended, tuple(held), failures)


def _continue_beams(request: EngineRequest, logits: torch.Tensor, places: list[int], taken: Taken) -> None:
    """Continue the beams of one request, of whose rows these are the logits; all of them end together."""
    beams = request.beams
    assert beams is not None, f"request {request.number} has no beams"
    is_first = not request.live[0].token_ids  # rows are alike still: whichever continues whichever
    try:
        with torch.inference_mode():
            step = beams.step(logits)
    except SamplingError as problem:
        taken.failures[request] = problem
        return
    taken.token_ids[places] = step.token_ids
    if step.is_over:
        beams.tell(request.samples)
        taken.ended.extend(places)
    elif not is_first and step.parents != tuple(range(len(places))):
        taken.parents[request] = step.parents


def _taken(request: EngineRequest, held: _Held, failure: Exception | None) -> Taken:
    """Let the answers of a request grow that waits no more, unless it failed."""
    token_ids = np.array(held.token_ids, np.int32)
    if failure is not None:
        return Taken(token_ids, failures={request: failure})
    taken = zip(held.rows, held.token_ids, held.logprobs, strict=True)
    ended = [place for place, (row, token, logprobs) in enumerate(taken) if row.sample.take(token, logprobs)]
    assert NO_TOKEN not in held.token_ids, "a row that neither waits nor failed has no token"
    return Taken(token_ids, ended)
