"""Several sequences of one prompt: forks into samples, and the replacement of beams.

Both are nothing but forks and frees of the block space; which beam continues which is for the sampler to say.
"""

from collections import Counter

from pagedkv.scheduling.request import Request
from pagedkv.scheduling.state import SchedulerState
from pagedkv.space import BlockSpace

__all__ = ["fork_sequences", "replace_beams"]


def fork_sequences(state: SchedulerState, request: Request) -> None:
    """Fork the sequence of a computed prompt into all that the request wants."""
    if request.num_sequences > len(request.rows):
        request.rows += state.space.fork(request.rows[0], request.num_sequences - len(request.rows)).tolist()
        state.num_changes += 1


def replace_beams(state: SchedulerState) -> None:
    """Let new beams continue the old ones, wherever the sampler said so."""
    branching = [request for request in state.running if request.parents is not None]
    if branching:
        state.close_decoding()
        state.num_changes += 1
    for request in branching:
        _replace(state.space, request)


def _replace(space: BlockSpace, request: Request) -> None:
    """Free beams without children, and fork others. A parent's first child keeps its row."""
    parents = request.parents or ()
    num_children = Counter(parents)
    childless = [row for beam, row in enumerate(request.rows) if beam not in num_children]
    if childless:
        space.free(childless)
    rows_of = {
        beam: [row, *(space.fork(row, num_children[beam] - 1).tolist() if num_children[beam] > 1 else [])]
        for beam, row in enumerate(request.rows)
        if beam in num_children
    }
    request.rows = [rows_of[parent].pop(0) for parent in parents]
    request.parents = None
