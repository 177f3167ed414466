"""Draft states across groups: how many tokens may be open, the blocks of their states, and which become current.

:mod:`pagedkv.memory.tables.drafting` draws them. A token is *open* while it is not accepted: a draft, an unknown token,
or a filled one whose step is not acknowledged. In spaces without such groups all of this does nothing.
"""

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import SequenceError, StepError, TokenError
from pagedkv.memory.space.state import SpaceState
from pagedkv.memory.tables.drafting import most_open
from pagedkv.memory.tables.rows import NUM_ACCEPTED, NUM_PLANNED, NUM_TOKENS

__all__ = [
    "accept_states",
    "count_draft_blocks",
    "give_states_back",
    "has_open_states",
    "require_accepted",
    "require_computed_states",
    "require_drafts",
    "require_slots",
    "take_states",
]


def require_drafts(state: SpaceState, num_draft: int) -> None:
    """Raise TokenError for more drafts than a recurrent state can roll back."""
    if state.is_recurrent and num_draft > state.num_draft_states:
        raise TokenError(
            f"num_draft = {num_draft}, but a recurrent state cannot be rolled back by more than "
            f"{state.num_draft_states} tokens: give every such group more num_draft_states"
        )


def require_slots(state: SpaceState, batch: Int32Array, counts: Int32Array) -> None:
    """Raise TokenError if unknown tokens would give rows more open tokens than a group has draft states."""
    place = most_open(state.rows, batch, counts)
    row = int(batch[place]) if len(batch) else 0
    num_open = int(state.rows[row, NUM_TOKENS] - state.rows[row, NUM_ACCEPTED])
    if len(batch) and counts[place] and num_open + counts[place] > state.num_draft_states:
        raise TokenError(
            f"row {row} cannot take {counts[place]} unknown tokens: {num_open} are not accepted yet, and there is a "
            f"state for {state.num_draft_states} at one time; fill some in, acknowledge their step, or give recurrent "
            "groups more num_draft_states"
        )


def require_accepted(state: SpaceState, row: int) -> None:
    """Raise SequenceError if a row to be forked has open tokens: their draft states cannot be shared."""
    accepted, num_tokens = (int(state.rows[row, column]) for column in (NUM_ACCEPTED, NUM_TOKENS))
    if state.draft_tables and accepted < num_tokens:
        raise SequenceError(
            f"row {row} cannot be forked: {num_tokens - accepted} of its {num_tokens} tokens are not accepted yet, and "
            f"their states are its own; fork it at {accepted}, or accept them first"
        )


def require_computed_states(state: SpaceState, batch: Int32Array) -> None:
    """Raise StepError if rows to be declared computed have drafts, or planned tokens that may still be refused."""
    if not state.draft_tables:
        return
    accepted, num_tokens, planned = (state.rows[batch, column] for column in (NUM_ACCEPTED, NUM_TOKENS, NUM_PLANNED))
    unfit = (planned > accepted) | ((accepted < num_tokens) & (state.num_known[batch] == 0))
    if unfit.any():
        place = int(unfit.argmax())
        raise StepError(
            f"row {batch[place]} cannot be declared computed: {num_tokens[place] - accepted[place]} of its "
            f"{num_tokens[place]} tokens are not accepted yet; accept them, or roll it back, first"
        )


def has_open_states(state: SpaceState, batch: Int32Array) -> bool:
    """Return whether rows have open tokens, whose draft states cannot leave the device."""
    return bool(state.draft_tables) and bool((state.rows[batch, NUM_ACCEPTED] < state.rows[batch, NUM_TOKENS]).any())


def count_draft_blocks(
    state: SpaceState, batch: Int32Array, counts: Int32Array, num_draft: int, *, is_unknown: bool
) -> dict[str, int]:
    """Count, by pool, the blocks that the draft states of growing rows still need."""
    needed = dict.fromkeys(state.pools, 0)
    for drafts in state.draft_tables:
        view = drafts.group.view
        needed[drafts.pool.name] += drafts.loops.count_slots(
            view.pool, view.group, drafts.arrays, view.rows, batch, counts, num_draft, is_unknown
        )
    return needed


def take_states(state: SpaceState, batch: Int32Array, counts: Int32Array, num_draft: int, *, is_unknown: bool) -> None:
    """Before rows grow: make the draft states that this accepts current; give each unaccepted token a block."""
    grown = batch[counts > 0]
    if not is_unknown:
        accept_states(state, grown, state.rows[grown, NUM_ACCEPTED], state.rows[grown, NUM_TOKENS])
    for drafts in state.draft_tables:
        drafts.loops.take_slots(drafts.pool.arrays, drafts.arrays, state.rows, batch, counts, num_draft, is_unknown)


def accept_states(state: SpaceState, batch: Int32Array, before: Int32Array, accepted: Int32Array) -> None:
    """Make the draft states of newly accepted tokens current: ``before`` tokens were accepted, now ``accepted`` are."""
    for drafts in state.draft_tables:
        view = drafts.group.view
        drafts.loops.make_current(view.pool, view.group, drafts.arrays, view.rows, batch, before, accepted)


def give_states_back(state: SpaceState, batch: Int32Array, *, is_leaving: bool) -> None:
    """Free the blocks of draft states without an open token; all of them if the rows leave the device."""
    for drafts in state.draft_tables:
        drafts.loops.give_slots_back(drafts.pool.arrays, drafts.arrays, state.rows, batch, is_leaving)
