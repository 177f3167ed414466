"""Several sequences with one prompt: forks into samples, the replacement of beams, and forks of other requests.

All of these are forks and frees of the block space. The sampler decides which old beam each new one continues.
"""

from collections import Counter

from pagedkv.contract.answers import PrefixGone, Shortage
from pagedkv.scheduling.keeping import replaced_content, supersede
from pagedkv.scheduling.request import Request
from pagedkv.scheduling.state import SchedulerState
from pagedkv.space import BlockSpace

__all__ = ["branch_off", "fork_sequences", "replace_beams"]


def fork_sequences(state: SchedulerState, request: Request) -> None:
    """Fork the sequence of a computed prompt into all sequences of the request."""
    if request.num_sequences > len(request.rows):
        request.rows += state.space.fork(request.rows[0], request.num_sequences - len(request.rows)).tolist()
        state.num_changes += 1


def branch_off(state: SchedulerState, row: int, child: Request) -> int:
    """Run a request that begins with the tokens of a row, by a fork; return the number of shared tokens.

    Returns 0, and changes nothing, if there is no room. The request's last known token is never shared, since its
    logits are needed. If a window or a state at that position has been evicted, the longest prefix that every group
    still has is shared.
    """
    num_sequences = state.num_running_sequences() + child.num_sequences
    if num_sequences > state.config.max_sequences or child.max_hit_tokens is not None:
        return 0
    child.load_tokens()
    replaced = replaced_content(state.space, child)
    num_shared = min(len(child.known_token_ids) - 1, state.space.num_tokens(row))
    forked = state.space.fork(row, at=num_shared) if num_shared else None
    if isinstance(forked, PrefixGone):
        num_shared = forked.longest
        forked = state.space.fork(row, at=num_shared) if num_shared else None
    if forked is None or isinstance(forked, PrefixGone | Shortage):
        return 0
    child.rows = forked.tolist()
    child.num_scheduled = num_shared
    if state.splits_leases:
        child.stops = tuple(place.num_tokens for place in child.intent.breakpoints)
    state.join(child)
    supersede(state.space, child, replaced)
    return num_shared


def replace_beams(state: SchedulerState) -> None:
    """Replace old beams by new ones, for all requests with parents from the sampler."""
    branching = [request for request in state.running if request.parents is not None]
    if branching:
        state.close_decoding()
        state.num_changes += 1
    for request in branching:
        _replace(state.space, request)


def _replace(space: BlockSpace, request: Request) -> None:
    """Free beams without children, and fork the others. A parent's first child keeps its row."""
    parents = request.parents or ()
    num_children = Counter(parents)
    childless = [row for beam, row in enumerate(request.rows) if beam not in num_children]
    if childless:
        request.note_receipts(space.free(childless))
    rows_of = {
        beam: [row, *(space.fork(row, num_children[beam] - 1).tolist() if num_children[beam] > 1 else [])]
        for beam, row in enumerate(request.rows)
        if beam in num_children
    }
    request.rows = [rows_of[parent].pop(0) for parent in parents]
    request.parents = None
