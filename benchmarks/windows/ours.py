"""Hits of this package, through the public API alone, with the settings that a space has by itself."""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from benchmarks.windows.setting import BLOCK_SIZE, NUM_WINDOWS, WINDOW, steps, two_pools
from benchmarks.windows.workloads import Request
from pagedkv import Allocation, BlockSpace, FullAttention, SlidingWindow, SpaceConfig

__all__ = ["config_of", "our_hits"]


def our_hits(
    requests: Iterable[Request], num_blocks: int, *, separate: bool = False, max_decoded: int = BLOCK_SIZE
) -> list[int]:
    """Count the tokens of each prompt that hit.

    Args:
        requests: the requests; num_blocks: of one pool or of two, null blocks included.
        separate: whether the full group and the windows have a pool each.
        max_decoded: most tokens of an answer in one step, as in :func:`~benchmarks.windows.setting.steps`.
    """
    space = BlockSpace(config_of(num_blocks, separate=separate))
    return [_serve(space, request, max_decoded) for request in requests]


def config_of(num_blocks: int, *, separate: bool) -> SpaceConfig:
    """Configure a space of one full group and the windows, in one pool or in two, with no policy named."""
    full, window = ("full", "window") if separate else ("device", "device")
    windows = NUM_WINDOWS * (SlidingWindow(WINDOW, BLOCK_SIZE, pool=window),)
    sizes = dict(zip((full, window), two_pools(num_blocks), strict=True)) if separate else num_blocks
    return SpaceConfig((FullAttention(BLOCK_SIZE, pool=full), *windows), sizes)


def _serve(space: BlockSpace, request: Request, max_decoded: int) -> int:
    match = space.match(request.prompt)
    first, *stops = steps(request, match.num_tokens, max_decoded=max_decoded)
    tokens = np.concatenate([request.prompt, request.answer])
    admitted = space.allocate(tokens[:first], match=match)
    assert isinstance(admitted, Allocation), admitted
    _run(space)
    for start, stop in pairwise((first, *stops)):
        shortage = space.append(admitted.row, tokens[start:stop])
        assert shortage is None, shortage
        _run(space)
    space.free(admitted.row)
    return admitted.num_hit_tokens


def _run(space: BlockSpace) -> None:
    space.acknowledge(space.plan_step().step_id)
