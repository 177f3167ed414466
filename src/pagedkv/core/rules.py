"""The retention rules: which tokens a query still needs, which is all that groups differ in.

Sources: sliding windows as in Mistral 7B (arXiv 2310.06825), sinks as in StreamingLLM (arXiv 2309.17453),
chunked local attention as in Llama 4. A recurrent layer needs the state after the token before.
"""

from pagedkv.core.compiled import inlined
from pagedkv.core.rows import CHUNK, FULL, RECURRENT, WINDOW

__all__ = ["first_block_of_hit", "first_needed_token"]


@inlined
def first_needed_token(kind: int, span: int, query: int) -> int:
    """First position (sinks apart) that computing position ``query`` and all later ones still reads."""
    if kind == FULL:
        return 0
    if kind == WINDOW:
        return max(0, query - span + 1)
    if kind == CHUNK:
        return query // span * span
    assert kind == RECURRENT
    return max(0, query - 1)


@inlined
def first_block_of_hit(kind: int, span: int, length: int, block_size: int) -> int:
    """First logical block (sinks apart) that a prefix hit of ``length`` tokens needs.

    Always the last block at least: where a chunk begins nothing before it is read, but without any
    block there would be nothing to show that these tokens were ever computed.
    """
    return min(first_needed_token(kind, span, length) // block_size, max(0, length // block_size - 1))
