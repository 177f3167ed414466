"""The retention rules: which tokens a query still needs. Groups differ in nothing else.

Sources: sliding windows as in Mistral 7B (arXiv 2310.06825), sinks as in StreamingLLM (arXiv 2309.17453),
chunked local attention as in Llama 4. A recurrent layer needs the state after the token before.
"""

from pagedkv.compilation.compiled import inlined
from pagedkv.tables.rows import (
    BLOCK_SIZE,
    CHUNK,
    ENDS_HITS,
    FULL,
    KIND,
    NUM_SINK_BLOCKS,
    RECURRENT,
    SPAN,
    WINDOW,
    GroupArrays,
)

__all__ = ["first_block_of_hit", "first_needed_token", "serves"]


@inlined
def first_needed_token(kind: int, span: int, query: int) -> int:
    """Return the first position (sinks aside) that computing position ``query`` or any later one still reads."""
    if kind == FULL:
        return 0
    if kind == WINDOW:
        return max(0, query - span + 1)
    if kind == CHUNK:
        return query // span * span
    assert kind == RECURRENT
    return max(0, query - 1)


@inlined
def first_block_of_hit(kind: int, span: int, length: int, block_size: int, ends_hits: int) -> int:
    """Return the first logical block (sinks aside) that a prefix hit of ``length`` tokens needs.

    In a group that ``ends_hits`` it is never after the last block: at the start of a chunk nothing before it is read,
    but some group must prove that these tokens were ever computed.
    """
    needed = first_needed_token(kind, span, length) // block_size
    return min(needed, max(0, length // block_size - 1)) if ends_hits else needed


@inlined
def serves(group: GroupArrays, index: int, length: int) -> bool:
    """Whether a hit of ``length`` tokens needs logical block ``index``."""
    block_size = group.parameters[BLOCK_SIZE]
    first = first_block_of_hit(
        group.parameters[KIND], group.parameters[SPAN], length, block_size, group.parameters[ENDS_HITS]
    )
    return index < length // block_size and (index >= first or index < group.parameters[NUM_SINK_BLOCKS])
