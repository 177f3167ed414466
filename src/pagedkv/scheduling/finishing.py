"""What sampled tokens change: prompts are forked, sequences end, finished requests give their blocks up."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.arrays import Int32Array
from pagedkv.scheduling.batch import Batch, Chunk, Progress
from pagedkv.scheduling.branching import fork_sequences
from pagedkv.scheduling.decoding import Decoding
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.state import BY_KEY, SchedulerState

__all__ = ["finish"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]


def finish(
    state: SchedulerState,
    batch: Batch,
    token_ids: Int32Array,
    ended: Sequence[int],
    parents: Mapping[Request, Sequence[int]],
) -> Progress:
    """Take in what the oldest batch sampled; its step is acknowledged."""
    goes_on = None
    if len(ended):
        goes_on = np.ones(len(token_ids), np.bool_)
        goes_on[ended] = False
    decoded = [] if batch.decoding is None else _take_decoded(state, batch.decoding, token_ids, goes_on)
    for request, beams in parents.items():
        if not request.is_done:
            request.parents = beams
    first_tokens = []
    start = len(batch.decoded_token_ids)
    for chunk in batch.prefilling:
        if chunk.request.awaited is chunk:
            _take_first(state, chunk, token_ids[start:], goes_on if goes_on is None else goes_on[start:])
            first_tokens.append(chunk.request)
        start += chunk.num_samples
    finished = sorted((request for request in decoded + first_tokens if request.has_all_tokens), key=BY_KEY)
    for request in finished:
        state.free(request)
        request.drop()
    return Progress(tuple(first_tokens), tuple(finished))


def _take_decoded(
    state: SchedulerState, decoding: Decoding, token_ids: Int32Array, goes_on: BoolArray | None
) -> list[Request]:
    """Note a token of each sequence that has decoded; return the requests that may be finished by it."""
    if state.is_current(decoding):
        decoding.take(token_ids[: len(decoding.rows)])
        if goes_on is None and decoding.num_steps_left > 0:
            return []
        requests = list(decoding.requests)
    else:
        requests = []
        for request, part in zip(decoding.requests, decoding.parts(token_ids), strict=True):
            if request.awaited is decoding:
                request.take(part)
                state.note_newcomer()
                requests.append(request)
    if goes_on is not None:
        for request, stays in zip(decoding.requests, decoding.parts(goes_on), strict=True):
            if not stays.all() and request in requests:
                _end_sequences(state, request, stays)
    return requests


def _take_first(state: SchedulerState, chunk: Chunk, token_ids: Int32Array, goes_on: BoolArray | None) -> None:
    """Note the token that follows a prompt, of each sequence, and fork the prompt."""
    request = chunk.request
    request.awaited = None
    if chunk.num_samples:
        request.take(token_ids[: chunk.num_samples])
    if goes_on is not None and not goes_on[: chunk.num_samples].all():
        _end_sequences(state, request, goes_on[: chunk.num_samples])
    if request.num_sequences > 1 and not request.has_all_tokens:
        fork_sequences(state, request)
    state.note_newcomer()


def _end_sequences(state: SchedulerState, request: Request, goes_on: BoolArray) -> None:
    """Go on with some sequences of a request only; the last to end leave their rows to the request's end."""
    if request.decoding is not None:
        state.close_decoding()
    request.num_sequences = int(goes_on.sum())
    if not request.num_sequences or request.has_all_tokens:
        return
    request.next_token_ids = request.next_token_ids[goes_on]
    if len(request.rows) == len(goes_on) > 1:
        ended = [row for row, stays in zip(request.rows, goes_on, strict=True) if not stays]
        state.space.free(ended, num_generated=[request.num_generated] * len(ended))
        request.rows = [row for row, stays in zip(request.rows, goes_on, strict=True) if stays]
        state.num_changes += 1
