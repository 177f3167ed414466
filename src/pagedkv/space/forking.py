"""Forking: new rows that share every block of another row."""

from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import SequenceError
from pagedkv.space.pending import note_reliance
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.row_record import set_lengths
from pagedkv.tables.rows import NUM_ACCEPTED, NUM_PLANNED, NUM_TOKENS, blocks_for

__all__ = ["fork", "inherit"]


def inherit(state: SpaceState, parent: int, children: Int32Array) -> None:
    """Copy what new rows share with ``parent`` whatever its length. Their own lengths are set already."""
    rows = state.rows
    state.loops.inherit(rows, state.planned_array, state.relies_on, state.publish_limits, parent, children)
    if parent in state.media_keys:
        state.media_keys |= dict.fromkeys(children.tolist(), state.media_keys[parent])
        state.media_reach[children] = state.media_reach[parent]
    for feature in state.features:
        feature.forked(parent, children)


def fork(state: SpaceState, ledger: StepLedger, parent: int, num_children: int) -> Int32Array:
    """Make new rows that share every block of ``parent``.

    Raises:
        TooManySequencesError: there are fewer vacant rows.
        SequenceError: a recurrent state would have to be advanced for several sequences at once, or rolled back.
    """
    rows = state.rows
    if state.is_recurrent and rows[parent, NUM_PLANNED] < rows[parent, NUM_TOKENS]:
        raise SequenceError(
            f"row {parent} has tokens {rows[parent, NUM_PLANNED]} to {rows[parent, NUM_TOKENS]} not planned yet: "
            "its recurrent state can be forked only after plan_step"
        )
    for feature in state.features:
        feature.require_forkable(parent)
    state.require_vacant_rows(num_children)
    state.is_changing = True
    children = state.take_rows(num_children)
    num_tokens = int(rows[parent, NUM_TOKENS])
    set_lengths(rows, children, num_tokens, int(rows[parent, NUM_ACCEPTED]))
    if state.is_overlapped:
        state.num_known[children] = state.num_known[parent]
    inherit(state, parent, children)
    for group in state.groups:
        state.loops.fork_row(*group.view, parent, children)
        table = group.arrays.table[parent, : blocks_for(num_tokens, group.block_size)]
        note_reliance(state, ledger, group, children, table)
    for chains in state.chains:
        chains[children] = chains[parent]
    for observer in state.observers.forked:
        observer.forked(parent, children, num_tokens)
    state.is_changing = False
    return children
