"""Rolling rows back: drafts are rejected, reserved slots freed, the remaining tokens accepted and published."""

from typing import NoReturn

import numpy as np

from pagedkv.contract.arrays import Int32Array, Int64Array, Uint32Array
from pagedkv.errors import SharedPrefixError, TruncationError
from pagedkv.space.publishing import publish
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.row_record import freeze, set_accepted_of
from pagedkv.tables.rows import NUM_ACCEPTED, NUM_TOKENS
from pagedkv.tables.truncating import (
    CONTENT_GONE,
    HIT_UNCOMPUTED,
    SHARED,
    STATE_ADVANCED,
    obstacle,
    rewind_chains,
)

__all__ = ["rewind_chains_of", "truncate"]


def truncate(state: SpaceState, ledger: StepLedger, batch: Int32Array, lengths: Int64Array) -> None:
    """Roll rows back to given lengths and accept the remaining tokens.

    Raises:
        TruncationError: the length is outside ``[1, num_tokens]``, needs content that is gone, or ends in a hit that a
            group has yet to compute.
        SharedPrefixError: another sequence or a ticket holds the blocks; nothing was changed.
    """
    _require_truncation(state, batch, lengths)
    _require_known_lengths(state, batch, lengths)
    state.is_changing = True
    for observer in state.observers.truncating:
        observer.truncating(batch, lengths)
    any_full = _shrink(state, batch, lengths)
    if state.is_overlapped or state.draft_tables:
        _accept_later(state, batch, lengths)
    else:
        state.loops.accept(state.rows, batch, lengths)
    if ledger.unfilled:
        ledger.lower_ends(state.rows[:, NUM_TOKENS])
    if any_full:
        publish(state, ledger, batch)
    state.is_changing = False


def _require_truncation(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> None:
    places = [state.loops.first_unfit_length(*group.view, batch, lengths) for group in state.groups]
    if max(places) < 0:
        return
    place = min(place for place in places if place >= 0)
    row, length, num_tokens = int(batch[place]), int(lengths[place]), int(state.rows[batch[place], NUM_TOKENS])
    if not 1 <= length <= num_tokens:
        raise TruncationError(f"row {row} has {num_tokens} tokens: it cannot be rolled back to {length}")
    group = state.groups[places.index(place)]
    code = obstacle(*group.view, row, length)
    holders = "other sequences or tickets hold" if state.held else "other sequences hold"
    _refuse(group, f"row {row} cannot be rolled back from {num_tokens} to {length} tokens", length, holders, code)


def _require_known_lengths(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> None:
    if not state.is_overlapped:
        return
    known = state.num_known[batch]
    unfit = (known > 0) & (lengths > known)
    if unfit.any():
        place = int(unfit.argmax())
        raise TruncationError(
            f"row {batch[place]} cannot be rolled back to {lengths[place]} tokens: only {known[place]} are known; fill "
            f"in what was sampled, or roll it back to {known[place]} or fewer"
        )


def _accept_later(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> None:
    """Accept the remaining tokens, in spaces where rows may have unknown tokens or draft states."""
    accepted = state.rows[batch, NUM_ACCEPTED]
    state.loops.accept(state.rows, batch, lengths)
    if state.is_overlapped:
        _stay_overlapped(state, batch, accepted)
    for feature in state.features if state.draft_tables else ():
        feature.accepted(batch, accepted, state.rows[batch, NUM_ACCEPTED])
        feature.truncated(batch)


def _stay_overlapped(state: SpaceState, batch: Int32Array, accepted: Int32Array) -> None:
    """Let overlapped rows accept their remaining tokens only when the steps that compute these are acknowledged."""
    is_overlapped = state.num_known[batch] > 0
    rows, accepted = batch[is_overlapped], accepted[is_overlapped]
    state.num_known[rows] = state.rows[rows, NUM_TOKENS]
    set_accepted_of(state.rows, rows, np.minimum(accepted, state.rows[rows, NUM_TOKENS]))


def _refuse(group: Group, what: str, length: int, holders: str, code: int) -> NoReturn:
    if code == SHARED:
        raise SharedPrefixError(f"{what}: {holders} its blocks of group {group.index} beyond {length}")
    if code == CONTENT_GONE:
        raise TruncationError(
            f"{what}: group {group.index} has released what position {length} reads; free it and allocate again"
        )
    if code == HIT_UNCOMPUTED:
        raise TruncationError(
            f"{what}: the other groups hit as much, and group {group.index} is still to compute it; plan the step first"
        )
    assert code == STATE_ADVANCED
    raise TruncationError(
        f"{what}: the recurrent state of group {group.index} is past that and {length} is no checkpoint "
        f"(every {group.block_size} tokens); free it and allocate again"
    )


def _shrink(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> bool:
    """Free every group's blocks beyond the lengths; return whether a full block waits for its digest."""
    any_full = False
    for group in state.outsiders:
        state.loops.shrink(*group.view, batch, lengths, state.row_scratch)
    for chains, lane in zip(state.chains, state.lanes, strict=True):
        num_rewound = 0
        for group in lane:  # all of them have digested the same blocks
            num_rewound, fills = state.loops.shrink(*group.view, batch, lengths, state.row_scratch)
            any_full |= fills
        if num_rewound:
            rewind_chains_of(state, lane, chains, state.row_scratch[:num_rewound])
    return any_full


def rewind_chains_of(state: SpaceState, lane: tuple[Group, ...], chains: Uint32Array, rewound: Int32Array) -> None:
    """Continue the digest chains of rewound rows behind the blocks that they still have, in any group of the lane."""
    for group in lane:
        num_missing = rewind_chains(*group.view, rewound, chains)
        rewound = rewound[:num_missing]
    freeze(state.rows, rewound)  # the digest that their next blocks would continue is gone
