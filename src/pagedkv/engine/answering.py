"""From a step's logits to its answers: rows to be sampled, their drafts, the tokens that answers take, rows that wait.

Logits are in the order of the rows. A row with drafts has a line for its own token, then one after each draft::

    rows      | row 0         | row 1 | row 2, drafts a, b   |
    logits    | behind its    | ...   | behind its token,    |
              | token         |       | behind a, behind b   |
    lines       0               1       2, 3, 4

A draft is accepted where it equals the token that is sampled at its position. After each draft a token is sampled as if
all drafts before it were accepted: with the penalties, bans and noise of that position. The first of these tokens
depends on no draft, and each further one is valid while all drafts before it were equal to the sampled tokens. So an
answer has the tokens that it would have without drafts, greedy or not, and ends at the same place: tokens sampled after
one that ends it are dropped.

All rows are sampled together (:class:`~pagedkv.engine.sampling.BatchSampler`). A request with a row that waits
for a foreign processor is held: its other rows keep their tokens, and none of its rows advances until the last one has
a token. A request with a row that fails has failed. Other requests are not affected.

Sampling has two halves. :meth:`Answering.begin` samples tokens, which the next step reads on the device.
:meth:`Answering.end` appends them to the answers once the host has them, and skips answers that have ended meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, final

import numpy as np
import torch

from pagedkv.contract.arrays import Int32Array
from pagedkv.engine.request import EngineRequest, Sample
from pagedkv.engine.sampling import (
    NO_TOKEN,
    BatchSampler,
    PendingTokens,
    Place,
    SampledTokens,
    TokenLogprobs,
    WaitingRow,
)
from pagedkv.errors import SamplingError
from pagedkv.scheduling import Batch, Decoding, Drafts, Request


class SampledRow(NamedTuple):
    """An answer for which a token is sampled.

    Args:
        request: the request; sample: the answer.
        drafts: draft tokens that the step verifies.
    """

    request: EngineRequest
    sample: Sample
    drafts: tuple[int, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Whether its answer has not ended."""
        return self.sample.finish_reason is None and self.request.finished is None


def with_drafts(rows: Sequence[SampledRow], drafts: Drafts) -> list[SampledRow]:
    """Add their drafts to decoding rows."""
    token_ids, counts = drafts.token_ids.tolist(), drafts.counts.tolist()
    drafted, first = [], 0
    for row, count in zip(rows, counts, strict=True):
        drafted.append(row._replace(drafts=tuple(token_ids[first : first + count])) if count else row)
        first += count
    return drafted


def lines_of(rows: Sequence[SampledRow]) -> list[range]:
    """Return the lines of the logits of each row."""
    lines, first = [], 0
    for row in rows:
        lines.append(range(first, first + 1 + len(row.drafts)))
        first = lines[-1].stop
    return lines


def places_of(rows: Sequence[SampledRow]) -> list[Place]:
    """Return, for each line of the logits, its sequence and the drafts before the line."""
    places: list[Place] = []
    for row in rows:
        places.append(row.sample.place)
        if row.drafts:
            places += [Place(row.sample.sequence, row.drafts[:count]) for count in range(1, len(row.drafts) + 1)]
    return places


@final
class RowLists:
    """Lists the rows of batches. The list of decoding rows is reused while the same sequences decode.

    Args:
        requests: the requests under way, by the scheduler's record of each.
    """

    def __init__(self, requests: Mapping[Request, EngineRequest]) -> None:
        self._requests = requests
        self._decoding: Decoding | None = None
        self._decoding_rows: tuple[SampledRow, ...] = ()

    def decoding(self, batch: Batch) -> Sequence[SampledRow]:
        """Return the rows of decoding sequences, without their drafts."""
        if batch.decoding is not self._decoding:
            self._decoding = batch.decoding
            requests = [] if batch.decoding is None else [self._requests[each] for each in batch.decoding.requests]
            self._decoding_rows = tuple(SampledRow(request, sample) for request in requests for sample in request.live)
        return self._decoding_rows

    def of(self, batch: Batch) -> Sequence[SampledRow]:
        """Return the rows to be sampled: decoding sequences, with their drafts, then those of complete prompts."""
        decoding = self.decoding(batch)
        rows = decoding if batch.drafts is None else with_drafts(decoding, batch.drafts)
        chunks = [chunk for chunk in batch.prefilling if chunk.num_samples]
        if not chunks:
            return rows
        requests = [self._requests[chunk.request] for chunk in chunks]
        return [*rows, *(SampledRow(request, sample) for request in requests for sample in request.live)]

    def forget(self) -> None:
        """Drop the list of decoding rows, since some answers have ended."""
        self._decoding, self._decoding_rows = None, ()


class DraftResult(NamedTuple):
    """The result of a row with drafts.

    Args:
        token_id: the last token appended to its answer, NO_TOKEN where the row failed.
        num_accepted: drafts accepted before that token.
        has_ended: whether that token ended the answer by a stop rule.
        failure: why the row has failed; None: it has not.
    """

    token_id: int
    num_accepted: int
    has_ended: bool = False
    failure: Exception | None = None


def accept_drafts(row: SampledRow, lines: range, token_ids: Sequence[int], sampled: SampledTokens) -> DraftResult:
    """Append a row's sampled tokens to its answer, up to the first that differs from its draft or ends the answer.

    Args:
        row: the row; lines: its lines of the logits.
        token_ids: the sampled tokens of all lines; sampled: their failures and log-probabilities.
    """
    row.request.num_drafted += len(row.drafts)
    for num_accepted, line in enumerate(lines):
        if line in sampled.failures:
            return DraftResult(NO_TOKEN, num_accepted, failure=sampled.failures[line])
        has_ended = row.sample.take(token_ids[line], sampled.logprobs.get(line))
        if has_ended or row.drafts[num_accepted : num_accepted + 1] != (token_ids[line],):
            return DraftResult(token_ids[line], num_accepted, has_ended)
        row.request.num_accepted += 1
    raise AssertionError("behind the last draft nothing is guessed")


def only(sampled: SampledTokens, lines: Sequence[int]) -> SampledTokens:
    """Select lines, in this order; their rows are renumbered from 0."""
    places = {line: place for place, line in enumerate(lines)}
    which = torch.tensor(lines, dtype=torch.int64, device=sampled.token_ids.device)
    return SampledTokens(
        sampled.token_ids[which],
        tuple(replace(each, row=places[each.row]) for each in sampled.waiting if each.row in places),
        {places[line]: failure for line, failure in sampled.failures.items() if line in places},
        {places[line]: logprobs for line, logprobs in sampled.logprobs.items() if line in places},
    )


class Sampler(Protocol):
    """Samples tokens: :class:`~pagedkv.engine.sampling.BatchSampler`, or a scripted one."""

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Sample a token for each row of logits."""

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Call the foreign processors of waiting rows again."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """The result of sampling rows.

    Args:
        token_ids: int32 ``[rows]``, NO_TOKEN where a row waits or failed.
        ended: places of rows whose token ended their answer by a stop rule.
        held: requests with a row that waits; failures: requests with a row that failed, and its error.
        parents: by request of beams, the old beam that each row's new beam continues, unless each continues its own.
        num_accepted: by place, the number of drafts accepted before the row's token.
    """

    token_ids: Int32Array
    ended: list[int] = field(default_factory=list)
    held: tuple[EngineRequest, ...] = ()
    failures: dict[EngineRequest, Exception] = field(default_factory=dict)
    parents: dict[EngineRequest, tuple[int, ...]] = field(default_factory=dict)
    num_accepted: dict[int, int] = field(default_factory=dict)

    def among(self, places: Sequence[int], num_rows: int) -> "Taken":
        """Return the same for ``num_rows`` rows, of which these are at ``places`` and the others have no token."""
        token_ids = np.full(num_rows, NO_TOKEN, np.int32)
        token_ids[places] = self.token_ids
        accepted = {places[place]: count for place, count in self.num_accepted.items()}
        ended = [places[place] for place in self.ended]
        return Taken(token_ids, ended, self.held, dict(self.failures), dict(self.parents), accepted)

    def accepted_of(self, num_decoding: int) -> Int32Array:
        """Return how many drafts each of the first rows, which decode, accepted: int32 ``[num_decoding]``."""
        accepted = np.zeros(num_decoding, np.int32)
        accepted[list(self.num_accepted)] = list(self.num_accepted.values())
        return accepted

    def with_searched(self, searched: "Taken") -> "Taken":
        """Merge the result of the beams among the same rows."""
        return Taken(
            np.where(searched.token_ids == NO_TOKEN, self.token_ids, searched.token_ids),
            self.ended + searched.ended,
            self.held,
            self.failures | searched.failures,
            searched.parents,
            self.num_accepted,
        )


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request with a row that waits.

    Args:
        rows: all of its rows in the step.
        token_ids, logprobs: those of each row so far.
        waiting: the waiting rows, by place in ``rows``.
    """

    rows: list[SampledRow]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    waiting: dict[int, WaitingRow]


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """Sampled tokens that are not appended to their answers yet.

    Args:
        rows: the rows of the step.
        places: places of the sampled ones: all except beams.
        pending: the tokens of these; None: there are none.
        searched: the result of the beams, which have advanced already; None: there are none.
    """

    rows: Sequence[SampledRow]
    places: Sequence[int]
    pending: PendingTokens | None
    searched: Taken | None = None


@final
class Answering:
    """Samples rows, and keeps the rows that wait.

    Args:
        sampler: samples tokens.

    Attributes:
        held: the requests with a row that waits.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.held: dict[EngineRequest, HeldRequest] = {}

    def begin(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> Sampling:
        """Sample a step's rows. Beams advance at once; other answers grow in :meth:`end`.

        Args:
            logits: float32 ``[rows and drafts, vocabulary]``; the logits after a row's drafts follow those of the row.
            rows: the rows; those of one request are adjacent.
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
        """Append the sampled tokens to their answers, unless these ended meanwhile. The host waits for the tokens."""
        if sampling.pending is None:
            taken = Taken(np.full(len(sampling.rows), NO_TOKEN, np.int32))
        else:
            with torch.inference_mode():  # as in the pass that made these tensors
                sampled = sampling.pending.wait()
            going = [place for place in sampling.places if sampling.rows[place].goes_on]
            if len(going) == len(sampling.rows):
                taken = self._take(sampled, sampling.rows)
            else:
                lines = dict(
                    zip(sampling.places, lines_of([sampling.rows[place] for place in sampling.places]), strict=True)
                )
                mine = only(sampled, [line for place in going for line in lines[place]])
                taken = self._take(mine, [sampling.rows[place] for place in going]).among(going, len(sampling.rows))
        return taken if sampling.searched is None else taken.with_searched(sampling.searched)

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> PendingTokens:
        with torch.inference_mode():  # as in the pass that made the logits, which are changed here
            if isinstance(self._sampler, BatchSampler):
                return self._sampler.begin(logits, places_of(rows))
            sampled = self._sampler.sample(logits, places_of(rows))
            return PendingTokens(sampled.token_ids, sampled)

    def _take(self, sampled: SampledTokens, rows: Sequence[SampledRow]) -> Taken:
        if any(row.drafts for row in rows):
            return self._take_drafted(sampled, rows)
        token_ids: Int32Array = sampled.token_ids.cpu().numpy()
        if not (sampled.waiting or sampled.failures or sampled.logprobs):
            tokens = token_ids.tolist()
            return Taken(token_ids, [place for place, row in enumerate(rows) if row.sample.take(tokens[place])])
        return self._take_apart(sampled, token_ids, rows)

    def retry_waiting(self) -> list[tuple[EngineRequest, Taken]]:
        """Sample the waiting rows again. Return the requests that do not wait any more, with their results."""
        answers = []
        for request, held in list(self.held.items()):
            places = list(held.waiting)
            with torch.inference_mode():
                sampled = self._sampler.resume([held.waiting[place] for place in places])
            still = {each.row for each in sampled.waiting}  # places in the batch of their step
            tokens = sampled.token_ids.tolist()
            for index, place in enumerate(places):
                held.token_ids[place], held.logprobs[place] = tokens[index], sampled.logprobs.get(index)
            held.waiting = {place: row for place, row in held.waiting.items() if row.row in still}
            failure = next(iter(sampled.failures.values()), None)
            if failure is not None or not held.waiting:
                del self.held[request]
                answers.append((request, _taken(request, held, failure)))
        return answers

    def forget(self, request: EngineRequest) -> None:
        """Drop a request's waiting rows: it has ended, or is computed again."""
        self.held.pop(request, None)

    def _take_drafted(self, sampled: SampledTokens, rows: Sequence[SampledRow]) -> Taken:
        """Take the tokens of rows: those with drafts one by one, the others together."""
        lines = lines_of(rows)
        others = [place for place, row in enumerate(rows) if not row.drafts]
        plain = only(sampled, [lines[place].start for place in others])
        taken = self._take(plain, [rows[place] for place in others]).among(others, len(rows))
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
        """Take the tokens of a step in which rows wait, fail or have log-probabilities."""
        failures = {rows[place].request: failure for place, failure in sampled.failures.items()}
        waiting = {each.row: each for each in sampled.waiting}
        held = dict.fromkeys(rows[place].request for place in waiting)
        for failed in failures:
            held.pop(failed, None)
        tokens = token_ids.tolist()
        for request in held:
            places = [place for place, row in enumerate(rows) if row.request is request]
            self.held[request] = HeldRequest(
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
    """Advance the beams of one request by its rows' logits. The rows of a finished search end together."""
    beams = request.beams
    assert beams is not None, f"request {request.number} has no beams"
    is_first = not request.live[0].token_ids  # all rows are still equal, so parents need no forks
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


def _taken(request: EngineRequest, held: HeldRequest, failure: Exception | None) -> Taken:
    """Append the tokens of a request that does not wait any more, unless it failed."""
    token_ids = np.array(held.token_ids, np.int32)
    if failure is not None:
        return Taken(token_ids, failures={request: failure})
    taken = zip(held.rows, held.token_ids, held.logprobs, strict=True)
    ended = [place for place, (row, token, logprobs) in enumerate(taken) if row.sample.take(token, logprobs)]
    assert NO_TOKEN not in held.token_ids, "a row that neither waits nor failed has no token"
    return Taken(token_ids, ended)
