"""Drafts: guesses at a sequence's next tokens, computed in the same step as the token before them.

This is the last phase of a step. Drafts use only the rest of the token budget and of the free blocks, so they take
nothing from other requests: no request is preempted, or waits, for a draft. A sequence without room for its drafts has
none. Rejected drafts are rolled back when the batch is finished; until then the space does not publish drafts.

Only requests of one sequence have drafts, since samples and beams of one prompt advance together.

A request may propose :data:`UNKNOWN_TOKEN` for each draft: a model computes the drafts while the step runs, and
:func:`fill_drafts` sets their ids before the batch is finished.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import as_counts
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import TokenError
from pagedkv.scheduling.batch import Batch, BatchDraft, Drafts
from pagedkv.scheduling.request import UNKNOWN_TOKEN, Decoding, Request
from pagedkv.scheduling.state import SchedulerState

__all__ = ["append_drafts", "as_accepted", "fill_drafts", "roll_back_drafts"]


def append_drafts(state: SchedulerState, draft: BatchDraft, budget: int) -> None:
    """Append drafts to the decoding sequences, as far as there is room. O(requests), and the time of ``propose``."""
    if draft.decoding is None or not state.config.most_drafts:
        return
    proposed = _proposed(draft.decoding, state.config.most_drafts, budget)
    if proposed:
        appended = _append(state, draft.decoding, proposed)
        counts = np.zeros(len(draft.decoding.rows), np.int32)
        for place in appended:
            counts[place] = len(proposed[place])
        if appended:
            draft.drafts = Drafts(counts, np.concatenate([proposed[place] for place in appended]))


def as_accepted(batch: Batch, num_accepted: npt.ArrayLike | None) -> Int32Array | None:
    """Check the numbers of accepted drafts; return int32 ``[sequences]``; None for a batch without drafts.

    Raises TokenError.
    """
    num_decoded = len(batch.decoded_token_ids)
    if num_accepted is None:
        return None if batch.drafts is None else np.zeros(num_decoded, np.int32)
    accepted = as_counts(num_accepted, num_decoded, "num_accepted")
    had = 0 if batch.drafts is None else batch.drafts.counts
    if (accepted < 0).any() or (accepted > had).any():
        place = int(((accepted < 0) | (accepted > had)).argmax())
        num_drafts = 0 if batch.drafts is None else batch.drafts.counts[place]
        raise TokenError(
            f"step {batch.plan.step_id} computes {num_drafts} drafts of sequence {place}, but num_accepted is "
            f"{accepted[place]}"
        )
    if accepted.any() and batch.drafts is not None and (batch.drafts.token_ids == UNKNOWN_TOKEN).any():
        raise TokenError(
            f"step {batch.plan.step_id} has drafts whose ids are not known: bring them by fill_drafts first"
        )
    return None if batch.drafts is None else accepted.astype(np.int32)


def fill_drafts(state: SchedulerState, batch: Batch, token_ids: Int32Array) -> None:
    """Set the ids of all drafts of a batch, for requests that still have their rows. O(sequences + drafts)."""
    decoding, drafts = batch.decoding, batch.drafts
    assert decoding is not None
    assert drafts is not None
    drafts.token_ids[:] = token_ids
    counts = _counts_of_awaiting(decoding, drafts)
    places = np.flatnonzero(counts)
    mine = np.repeat(counts > 0, drafts.counts)
    state.space.replace_drafts(decoding.rows[places], token_ids[mine], counts[places])


def roll_back_drafts(state: SchedulerState, batch: Batch, num_accepted: Int32Array) -> None:
    """Roll back the rejected drafts of requests that still have their rows."""
    decoding, drafts = batch.decoding, batch.drafts
    assert decoding is not None
    assert drafts is not None
    places = np.flatnonzero(_counts_of_awaiting(decoding, drafts))
    rows = decoding.rows[places]
    state.space.truncate(rows, state.space.lengths(rows) - drafts.counts[places] + num_accepted[places])


def _counts_of_awaiting(decoding: Decoding, drafts: Drafts) -> Int32Array:
    """Count the drafts of each sequence, 0 where its request waits for nothing of these common steps any more."""
    counts = [
        part if _awaits(request, decoding) else np.zeros_like(part)
        for request, part in zip(decoding.requests, decoding.parts(drafts.counts), strict=True)
    ]
    return np.concatenate(counts)


def _awaits(request: Request, decoding: Decoding) -> bool:
    """Whether a request still waits for the tokens of these common steps."""
    return request.decoding is decoding or decoding in request.awaited[:1]


def _proposed(decoding: Decoding, most_drafts: int, budget: int) -> dict[int, Int32Array]:
    """Collect proposals, by place among the sequences, within the budget and each request's own limit."""
    proposed: dict[int, Int32Array] = {}
    place = 0
    for request in decoding.requests:
        # If all drafts are accepted, the request also gets the token after the last one.
        most = min(most_drafts, budget, request.max_new_tokens - request.num_generated - 1)
        if most > 0 and request.propose is not None and request.num_sequences == len(request.rows) == 1:
            token_ids = request.propose(most)
            assert len(token_ids) <= most, (
                f"request {request.number} proposed {len(token_ids)} drafts, not up to {most}"
            )
            if len(token_ids):
                proposed[place] = token_ids
                budget -= len(token_ids)
        place += len(request.rows)
    return proposed


def _append(state: SchedulerState, decoding: Decoding, proposed: dict[int, Int32Array]) -> list[int]:
    """Append the drafts together, or one by one if blocks are short; return the places with appended drafts."""
    places = list(proposed)
    appended: list[int] = []
    for some in (places, *([place] for place in places if len(places) > 1)):
        token_ids = np.concatenate([proposed[place] for place in some])
        counts = [len(proposed[place]) for place in some]
        if state.drops_blocks and not _can_go_on(state, decoding.rows[some], counts):
            continue
        shortage = state.space.append(decoding.rows[some], token_ids, counts, num_draft=counts)
        if shortage is None:
            appended += some
        if shortage is None and some is places:
            break
    return appended


def _can_go_on(state: SchedulerState, rows: Int32Array, counts: list[int]) -> bool:
    """Whether the token after the drafts would find blocks too: windows slide behind accepted drafts one step later."""
    with_next = np.minimum(np.array(counts) + 1, state.space.config.max_tokens - state.space.lengths(rows))
    return state.space.can_append(rows, with_next, num_draft=counts)
