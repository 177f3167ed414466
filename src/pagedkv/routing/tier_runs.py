"""Which replicas can load which tokens of a prompt behind their hits, for models that keep whole prefixes.

Behind a hit, consecutive runs count, each for the medium of the run before it, or else for the first medium that has
it. The runs of a prompt are looked up some at a time, and only where some replica goes on: a prompt that is in no tier
costs one look-up of a few runs in each medium.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.routing.residency import MOST_REPLICAS, Residency, Uint64Array

__all__ = ["tokens_behind_hits"]

FIRST_RUNS: Final = 32
"""Runs of the first look-up; each further one has twice as many."""
NO_MEDIUM: Final = -1
ONE: Final = np.uint64(1)
NOTHING: Final = np.uint64(0)


@compiled
def _count(  # noqa: PLR0913, PLR0917 - what is looked up, the hits, and where it is written
    bits: Uint64Array,
    first: int,
    replicas: np.uint64,
    held: Int32Array,
    run_tokens: int,
    most: int,
    next_run: Int32Array,
    medium_of: Int32Array,
    counts: Int32Array,
) -> np.uint64:
    """Count the tokens of runs from ``first`` on; return the replicas that may go on behind them, one bit for each.

    ``bits`` has a row for each medium, and ``counts`` a column. ``next_run`` and ``medium_of`` are the next run of each
    replica, and the medium of the last one.
    """
    num_media, end = bits.shape[0], first + bits.shape[1]
    going = NOTHING
    for replica in range(MOST_REPLICAS):
        mask = ONE << np.uint64(replica)
        if replicas & mask == NOTHING:
            continue
        run, medium = next_run[replica], medium_of[replica]
        while run < end:
            if medium == NO_MEDIUM or bits[medium, run - first] & mask == NOTHING:
                medium = NO_MEDIUM
                for number in range(num_media - 1, -1, -1):
                    if bits[number, run - first] & mask != NOTHING:
                        medium = number
                if medium == NO_MEDIUM:
                    break
            num_tokens = min((run + 1) * run_tokens, most) - max(run * run_tokens, held[replica])
            if num_tokens > 0:
                counts[replica, medium] += num_tokens
            run += 1
        next_run[replica], medium_of[replica] = run, medium
        if run >= end:
            going |= mask
    return going


def tokens_behind_hits(  # noqa: PLR0913, PLR0917 - tables, a prompt, and its hits
    media: Sequence[Residency], keys: Uint32Array, held: Sequence[int], replicas: int, run_tokens: int, most: int
) -> Int32Array:
    """Count the tokens behind each replica's hit that it can load: int32 ``[64, media]``.

    Args:
        media: the tables of entries, the fastest medium first.
        keys: uint32 ``[runs, 8]``, of the prompt's runs.
        held: tokens that hit, by number of the replica.
        replicas: the replicas to count for, one bit for each.
        run_tokens: tokens of a run.
        most: tokens of the prompt that may hit.

    Cost: O(media x runs up to the end of the longest load + replicas x these runs).
    """
    hits = np.array(held, np.int32)
    next_run = hits // np.int32(run_tokens)
    medium_of = np.full(MOST_REPLICAS, NO_MEDIUM, np.int32)
    counts = np.zeros((MOST_REPLICAS, len(media)), np.int32)
    going, at_once = replicas, FIRST_RUNS
    while going:
        first = min(int(next_run[number]) for number in range(going.bit_length()) if going >> number & 1)
        if first >= len(keys):
            break
        some = np.ascontiguousarray(keys[first : first + at_once])
        bits = np.empty((len(media), len(some)), np.uint64)
        for row, entries in zip(bits, media, strict=True):
            entries.look_up(some, out=row)
        going = int(_count(bits, first, np.uint64(going), hits, run_tokens, most, next_run, medium_of, counts))
        at_once *= 2
    return counts
