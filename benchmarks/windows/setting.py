"""The model and the engine that all figures are for: groups, windows, blocks, pools, and the steps of a request.

One request is served after another. A prompt is computed in chunks, and each step is over before the next begins.
"""

from collections.abc import Iterator
from typing import Final

from benchmarks.windows.workloads import Request

__all__ = ["BLOCK_SIZE", "MAX_CHUNK", "NUM_NEEDED", "NUM_WINDOWS", "WINDOW", "steps", "two_pools"]

BLOCK_SIZE: Final = 16
NUM_WINDOWS: Final = 5
"""Groups with a window, beside one full group."""
WINDOW: Final = 128
MAX_CHUNK: Final = 512
NUM_NEEDED: Final = -(-(WINDOW - 1) // BLOCK_SIZE)
"""Blocks right before a boundary that a hit there needs of a window group."""

MOST_RUNNING: Final = NUM_WINDOWS * (-(-(WINDOW - 1 + MAX_CHUNK) // BLOCK_SIZE) + 1)
"""Blocks of all windows that a request takes while a chunk is computed, at most."""
SHARE_OF_WINDOWS: Final = 4


def two_pools(num_blocks: int) -> tuple[int, int]:
    """Divide blocks among the pool of the full group and that of all windows.

    The windows' pool holds the most that a running request takes of it, and a quarter of what is left.
    """
    num_window = MOST_RUNNING + (num_blocks - MOST_RUNNING) // SHARE_OF_WINDOWS
    return num_blocks - num_window, num_window


def steps(request: Request, num_hit_tokens: int, *, max_decoded: int = 1) -> Iterator[int]:
    """List the position up to which each step computes: chunks of the prompt, then its answer but for the last token.

    Args:
        request: the request; num_hit_tokens: of its prompt.
        max_decoded: most tokens of the answer in one step, a divisor of the block size. A step of several ends at a
            block's boundary; in between nothing is taken, named or given back, so that hits are the same.
    """
    stop = len(request.prompt)
    last = stop + len(request.answer) - 1
    yield from range(num_hit_tokens + MAX_CHUNK, stop, MAX_CHUNK)
    yield stop
    while stop < last:
        stop = min(stop - stop % max_decoded + max_decoded, last)
        yield stop
